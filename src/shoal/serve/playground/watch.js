// What can be watched once more of the run that is shown: its rounds, and its race with plain decoding.

import { close, open, retime } from "./player.js";
import { Race } from "./race.js";
import { Replay, steps } from "./replay.js";

const at = (id) => document.getElementById(id);
const pace = at("pace");
const recorded = () => pace.value === "recorded";

const ROUNDS = {
  "": "The order of the rounds is the recorded one; their times are not: every round takes one second at 1×, a third for each of its steps.",
  recorded: "Times are those at which rounds arrived in this browser, the steps of a round a third of its time each.",
};
const RACE = "Times are those at which tokens arrived in this browser. The two runs were measured one after the other, not at once: "
  + "first the speculative one, then the plain one; each clock starts when its request is sent, so prompt, network and whoever else "
  + "is served are in it.";

let shown = null; // { run, plain, columns, drafts }, plain undefined until it is measured

/** Offers what there is to watch; null: nothing. */
export function offer(result) {
  if (result?.columns !== shown?.columns) close();
  shown = result;
  at("watch-rounds").hidden = !result?.drafts || !steps(result.run.trace).length;
  at("watch-race").hidden = !result?.plain;
}

function watchRounds() {
  open(new Replay(shown.run, shown.columns, recorded));
  label("Round", true, ROUNDS[pace.value]);
}

function watchRace() {
  close();
  const race = new Race(shown.run, shown.plain);
  open(race, { speed: race.speed });
  label("Time", false, RACE);
}

function label(name, paced, note) {
  at("scrub-label").textContent = name;
  at("pace-field").hidden = !paced;
  at("times-note").textContent = note;
}

at("watch-rounds").addEventListener("click", watchRounds);
at("watch-race").addEventListener("click", watchRace);
pace.addEventListener("change", () => {
  at("times-note").textContent = ROUNDS[pace.value];
  retime();
});
