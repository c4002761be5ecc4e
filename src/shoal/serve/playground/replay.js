// What can be watched once more of the run that is shown: its rounds step by step, and its race with plain decoding.

import { Race } from "./race.js";

const at = (id) => document.getElementById(id);

// ── play, pause, step ──────────────────────────────────────────────────────────────────────────────────────────────

// The transport of a replay: play, pause, step, scrub and speed, over positions that a track shows.
//
// A track has: `length`, its last position (0 is before anything came); `time(position)`, seconds on its clock; `show(position)`;
// `describe(position)`, a sentence; `marks`, the positions that the scrubber stops at; `close()`.

const panel = at("replay");
const [play, scrubber, speed, sentence] = ["play", "scrubber", "speed", "frame"].map(at);
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const STILL_PAUSE = 500; // least milliseconds between two pictures then

let track = null;
let position = 0;
let clock = null; // while it plays: { started, frame, drawn }
let opener = null; // what the focus goes back to

/** Shows a track from its start, paused. */
function open(next, { speed: wanted = "1" } = {}) {
  if (track) leave();
  else opener = document.activeElement;
  track = next;
  speed.value = wanted;
  scrubber.max = track.marks.length - 1;
  panel.hidden = false;
  go(0);
  panel.scrollIntoView(); // to the top: what is watched is below it
  play.focus({ preventScroll: true });
}

/** Ends the replay, if there is one: all is shown as it came. */
function close() {
  if (!track) return;
  const inside = panel.contains(document.activeElement);
  leave();
  track = null;
  panel.hidden = true;
  if (inside) opener?.focus();
}

/** The clock of the track has changed: playing goes on from where it is. */
function retime() {
  if (clock) start();
}

function leave() {
  pause();
  track.close();
}

// ── moving ──────────────────────────────────────────────────────────────────────────────────────────────────────────

function go(to) {
  position = Math.min(Math.max(to, 0), track.length);
  track.show(position);
  const mark = track.marks.findLastIndex((mark) => mark <= position);
  scrubber.value = mark;
  sentence.textContent = track.describe(position);
  scrubber.setAttribute("aria-valuetext", sentence.textContent);
  at("to-start").disabled = at("step-back").disabled = position === 0;
  at("step-on").disabled = position === track.length;
}

function step(by) {
  pause();
  const focused = document.activeElement;
  go(position + by);
  if (focused.disabled) play.focus(); // a disabled button would lose the focus, and with it the keys
}

function start() {
  pause();
  if (position === track.length) go(0);
  const rate = 1000 / Number(speed.value); // milliseconds per second of the track
  clock = { started: performance.now() - track.time(position) * rate, rate, drawn: -Infinity };
  dress(true);
  clock.frame = requestAnimationFrame(tick);
}

function tick(now) {
  const passed = (performance.now() - clock.started) / clock.rate;
  let next = position;
  while (next < track.length && track.time(next + 1) <= passed) next += 1;
  const late = !STILL.matches || now - clock.drawn >= STILL_PAUSE || next === track.length;
  if (next !== position && late) {
    clock.drawn = now;
    go(next);
  }
  if (position === track.length) pause();
  else clock.frame = requestAnimationFrame(tick);
}

function pause() {
  if (!clock) return;
  cancelAnimationFrame(clock.frame);
  clock = null;
  dress(false);
}

/** What is heard while it plays would never end, so it is only heard when it pauses. */
function dress(playing) {
  play.setAttribute("aria-label", playing ? "Pause" : "Play");
  play.title = playing ? "Pause" : "Play";
  panel.classList.toggle("playing", playing);
  sentence.setAttribute("aria-live", playing ? "off" : "polite");
}

const toggle = () => (clock ? pause() : start());

// ── wiring ──────────────────────────────────────────────────────────────────────────────────────────────────────────

const KEYS = {
  " ": toggle, ArrowLeft: () => step(-1), ArrowRight: () => step(1), Home: () => step(-Infinity), End: () => step(Infinity),
};

play.addEventListener("click", toggle);
at("to-start").addEventListener("click", () => step(-Infinity));
at("step-back").addEventListener("click", () => step(-1));
at("step-on").addEventListener("click", () => step(1));
at("close-replay").addEventListener("click", close);
scrubber.addEventListener("input", () => {
  pause();
  go(track.marks[scrubber.value]);
});
speed.addEventListener("change", retime);
panel.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    event.stopPropagation();
    close();
    return;
  }
  const { target } = event;
  const own = target.matches("select") || (event.key === " " ? target.matches("button") : target.matches("input"));
  if (own || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

// ── rounds, step by step ───────────────────────────────────────────────────────────────────────────────────────────

// Step by step: the recorded rounds once more, in the columns themselves. Drafts appear, the target decides, its own token comes.

/** The rounds of all samples in the order of their arrival. A step has one round of each sample that took part: sample to the
 *  number of its round. `seconds`: when the last of them had come. */
function steps(trace) {
  const found = [];
  const counts = new Map();
  let step = null;
  for (const { seconds, index, rounds } of trace) {
    for (let one = 0; one < rounds.length; one++) {
      if (!step || step.rows.has(index)) found.push((step = { rows: new Map() }));
      const number = counts.get(index) ?? 0;
      counts.set(index, number + 1);
      step.rows.set(index, number);
      step.seconds = seconds;
    }
  }
  return found;
}

/** A track of the player over the rounds of a run. `recorded()`: whether its clock is the arrival times, or one second a round. */
class Replay {
  constructor(run, columns, recorded) {
    this.recorded = recorded;
    this.steps = steps(run.trace);
    this.columns = columns.all;
    this.parts = this.columns.map((column) => column.rounds.parts);
    this.lines = this.columns.map((column) => column.node.insertBefore(line(), column.text));
    this.frames = this.steps.flatMap((step, number) => this.framesOf(step, number));
    this.length = this.frames.length;
    this.marks = [0, ...this.frames.flatMap((frame, index) => (frame.last ? [index + 1] : []))];
    this.container = columns.container;
    this.container.style.minHeight = `${this.container.offsetHeight}px`; // texts shrink, and the page would jump
    this.container.classList.add("replaying");
    this.shown = this.length;
  }

  /** A round without drafts has nothing to decide. */
  framesOf(step, number) {
    const rows = [...step.rows].map(([index, round]) => ({ index, round, ...(this.parts[index][round] ?? NOTHING) }));
    const drafted = rows.some(({ accepted, struck }) => accepted.length + struck.length);
    const kinds = drafted ? ["drafts", "verdict", "own"] : ["own"];
    return kinds.map((kind, place) => (
      { kind, rows, number, share: (place + 1) / kinds.length, last: place === kinds.length - 1 }
    ));
  }

  time(position) {
    if (position === 0) return 0;
    const { number, share } = this.frames[position - 1];
    const end = (step) => (step < 0 ? 0 : this.recorded() ? this.steps[step].seconds : step + 1);
    return end(number - 1) + (end(number) - end(number - 1)) * share;
  }

  show(position) {
    this.mark(false);
    while (this.shown < position) apply(this.frames[this.shown++], true);
    while (this.shown > position) apply(this.frames[--this.shown], false);
    this.mark(true);
    this.lines.forEach((line, index) => { line.textContent = this.told(index, position); });
  }

  /** The target's own tokens stand out in the picture in which they come. */
  mark(on) {
    const frame = this.frames[this.shown - 1];
    if (frame?.kind !== "own") return;
    for (const { own } of frame.rows) for (const node of own) node.classList.toggle("now", on);
  }

  /** What one sample is at. */
  told(index, position) {
    const frame = this.frames[position - 1];
    const row = frame?.rows.find((row) => row.index === index);
    if (!row) return this.rest(index, frame ? frame.number : -1);
    const drafted = row.accepted.length + row.struck.length;
    const round = `round ${row.round + 1}: `;
    if (frame.kind === "drafts") return round + (drafted ? `${drafted} drafted` : "nothing drafted");
    const verdict = drafted ? `${row.accepted.length} of ${drafted} accepted` : "nothing drafted";
    return round + verdict + (frame.kind === "own" && row.own.length ? ", then the target's own" : "");
  }

  /** What a sample is at whose round this is not. */
  rest(index, number) {
    const [before, after] = [this.steps.slice(0, number + 1), this.steps.slice(number + 1)];
    if (!after.some(({ rows }) => rows.has(index))) return "ended";
    return before.some(({ rows }) => rows.has(index)) ? "pausing" : "waiting";
  }

  describe(position) {
    const total = this.steps.length;
    if (position === 0) return `Before the first of ${total} rounds.`;
    const { kind, rows, number } = this.frames[position - 1];
    const sum = (name) => rows.reduce((sum, row) => sum + row[name].length, 0);
    const [accepted, struck, own] = ["accepted", "struck", "own"].map(sum);
    const round = `Round ${number + 1} of ${total}: `;
    if (kind === "drafts") return `${round}${tokens(accepted + struck)} drafted.`;
    if (kind === "verdict") return `${round}the target accepts ${accepted} and rejects ${struck}.`;
    return `${round}the target adds ${tokens(own)} of its own.`;
  }

  close() {
    this.show(this.length);
    this.mark(false);
    for (const line of this.lines) line.remove();
    this.container.classList.remove("replaying");
    this.container.style.minHeight = "";
  }
}

const NOTHING = { accepted: [], struck: [], own: [] };
const tokens = (count) => `${count} token${count === 1 ? "" : "s"}`;

function line() {
  const made = document.createElement("p");
  made.className = "step";
  return made;
}

/** Shows a picture over the one before it, or takes it back. */
function apply({ kind, rows }, on) {
  for (const { accepted, struck, own } of rows) {
    for (const node of kind === "own" ? own : [...accepted, ...struck]) {
      if (kind !== "verdict") node.classList.toggle("later", !on);
      if (kind !== "own") node.classList.toggle("proposed", on === (kind === "drafts"));
    }
  }
}

// ── what is offered ────────────────────────────────────────────────────────────────────────────────────────────────

// What can be watched once more of the run that is shown: its rounds, and its race with plain decoding.

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
