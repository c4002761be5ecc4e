// One answer as it comes: its texts, its counts, and the time it took in this browser.

/** Adds up the choices of a streamed answer. Its clock starts when it is made. */
export class Run {
  constructor() {
    this.choices = new Map();
    this.trace = []; // what came when: { seconds, index, text, committed, rounds }
    this.started = performance.now();
    this.seconds = 0; // until the last event
  }

  /** Follows an answer to its end; `onChoice` sees each choice of each event after it is counted, `onEnd` the usage. */
  async follow(answer, onChoice = () => {}, onEnd = () => {}) {
    for await (const event of answer) {
      this.seconds = (performance.now() - this.started) / 1000;
      for (const choice of event.choices) {
        this.count(choice);
        onChoice(choice);
      }
      if (event.usage) onEnd(event.usage);
    }
  }

  count({ index, text, delta, shoal }) {
    const before = this.choices.get(index)?.text ?? "";
    const piece = text ?? delta?.content ?? "";
    this.choices.set(index, { ...shoal, text: before + piece });
    const { committed = 0, by_round: rounds = [] } = shoal ?? {};
    this.trace.push({ seconds: this.seconds, index, text: piece, committed, rounds });
  }

  /** The sum of one figure over all choices. */
  sum(name) {
    return [...this.choices.values()].reduce((sum, choice) => sum + (choice[name] ?? 0), 0);
  }

  get rate() {
    return this.seconds ? this.sum("committed") / this.seconds : 0;
  }

  /** How many texts are those of another run, as far as both went (time may have cut either). */
  agreeing(other) {
    const same = (a, b) => a.startsWith(b) || b.startsWith(a);
    return [...this.choices].filter(([index, { text }]) => same(text, other.choices.get(index)?.text ?? "")).length;
  }
}
