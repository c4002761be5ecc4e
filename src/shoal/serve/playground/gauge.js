// The figures above the columns, and the gauge: tokens per second, speculative and plain, on one scale.

const at = (id) => document.getElementById(id);

function write(id, text) {
  at(id).textContent = text;
}

/** Nothing has come yet. `drafts`: whether the run may draft; `compared`: whether plain decoding comes after it; `pair`: whether there is
 *  a drafter at all. What has nothing to show is not there. */
export function reset(seed, { drafts, compared, pair }) {
  at("figures").hidden = false;
  at("results").classList.toggle("undrafted", !drafts);
  at("results").classList.toggle("uncompared", !compared);
  for (const id of ["acceptance", "accepted", "tokens", "seconds", "times"]) write(id, "–");
  write("used-seed", seed ?? "none");
  at("used-seed").parentElement.hidden = seed === undefined;
  write("mine-label", drafts ? "speculative" : pair ? "plain" : "speed");
  if (drafts) showPlain("has not been");
  else write("gauge-note", pair ? "No drafts: this run is plain decoding itself." : "");
  for (const id of ["mine", "plain"]) bar(id, 0, 1);
}

/** Whether plain decoding "is being" or "has not been" measured. */
export function showPlain(how) {
  write("gauge-note", `Plain decoding ${how} measured.`);
}

/** The counts and the speed of a run so far. */
export function showFigures(run) {
  const counts = ["committed", "rounds", "drafted", "accepted"];
  const [committed, rounds, drafted, accepted] = counts.map((name) => run.sum(name));
  write("acceptance", rounds ? (committed / rounds).toFixed(2) : "–");
  write("accepted", drafted ? `${accepted} of ${drafted}` : "none drafted");
  write("tokens", committed);
  write("seconds", run.seconds.toFixed(2));
  bar("mine", run.rate, run.rate);
}

/** Both speeds on one scale, and what the texts prove. */
export function showComparison(run, plain, seeded) {
  const most = Math.max(run.rate, plain.rate);
  bar("mine", run.rate, most);
  bar("plain", plain.rate, most);
  write("times", plain.rate ? `${(run.rate / plain.rate).toFixed(2)}×` : "–");
  const how = "Both measured just now in this browser, prompt and network included, one run each.";
  const same = `${run.agreeing(plain)} of ${run.choices.size} samples`;
  const texts = seeded
    ? `With the same seed plain decoding wrote the same text in ${same}.`
    : "This server keeps no seeds, so plain decoding drew other samples.";
  write("gauge-note", `${how} ${texts}`);
}

function bar(id, rate, most) {
  write(id, rate ? `${rate.toFixed(0)} tok/s` : "–");
  at(`${id}-bar`).style.setProperty("--share", rate ? rate / most : 0);
}
