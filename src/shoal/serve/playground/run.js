// One answer as it comes: its texts, its counts, and the time it took in this browser.

import { events } from "./stream.js";

/** Adds up the choices of a streamed answer. */
export class Run {
  constructor() {
    this.choices = new Map();
    this.seconds = 0;
  }

  /** Streams a request; `onChoice` sees each choice of each chunk after it is counted, `onEnd` the usage. */
  async follow(path, body, key, signal, onChoice = () => {}, onEnd = () => {}) {
    const started = performance.now();
    for await (const event of events(path, body, key, signal)) {
      this.seconds = (performance.now() - started) / 1000;
      for (const choice of event.choices) {
        this.count(choice);
        onChoice(choice);
      }
      if (event.usage) onEnd(event.usage);
    }
  }

  count({ index, text, delta, shoal }) {
    const before = this.choices.get(index)?.text ?? "";
    this.choices.set(index, { ...shoal, text: before + (text ?? delta?.content ?? "") });
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
