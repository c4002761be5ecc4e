// The figures above the columns, and the gauge: tokens per second, speculative and plain, on one scale.

const at = (id) => document.getElementById(id);

function write(id, text) {
  at(id).textContent = text;
}

/** The counts of a run so far. */
export function showFigures(run, seed) {
  const [committed, rounds, drafted, accepted] = ["committed", "rounds", "drafted", "accepted"].map((name) => run.sum(name));
  at("figures").hidden = false;
  write("acceptance", rounds ? (committed / rounds).toFixed(2) : "–");
  write("accepted", drafted ? `${accepted} of ${drafted}` : "none drafted");
  write("tokens", committed);
  write("seconds", run.seconds.toFixed(2));
  write("used-seed", seed ?? "none");
}

/** The bars. `plain` is null while nothing was measured to compare with; `note` says what was. */
export function showSpeed(run, plain, note) {
  const most = Math.max(run.rate, plain?.rate ?? 0, 1e-9);
  bar("mine", run.rate, most);
  bar("plain", plain?.rate ?? 0, most);
  write("times", plain?.rate && run.rate ? `${(run.rate / plain.rate).toFixed(2)}×` : "–");
  write("gauge-note", note);
}

function bar(id, rate, most) {
  write(id, rate ? `${rate.toFixed(0)} tok/s` : "–");
  at(`${id}-bar`).style.setProperty("--share", rate / most);
}

/** What the plain run was, and what it proves. */
export function comparison(run, plain, seeded) {
  const how = "Both measured just now in this browser, prompt and network included, one run each.";
  if (!seeded) return `${how} This server keeps no seeds, so plain decoding drew other samples.`;
  return `${how} With the same seed plain decoding wrote the same text in ${run.agreeing(plain)} of ${run.choices.size} samples.`;
}
