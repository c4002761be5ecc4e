// Step by step: the recorded rounds once more, in the columns themselves. Drafts appear, the target decides, its own token comes.

/** The rounds of all samples in the order of their arrival. A step has one round of each sample that took part: sample to the
 *  number of its round. `seconds`: when the last of them had come. */
export function steps(trace) {
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
export class Replay {
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
