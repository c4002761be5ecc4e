// One answer as it comes: its texts, its counts, and the time it took in this browser.

import { withAlternatives } from "./alternatives.js";

/** Adds up the choices of a streamed answer. Its clock starts when it is made. */
export class Run {
  constructor() {
    this.choices = new Map(); // by index: text, tokens (with their alternatives), by_round, and the last counts
    this.usage = null; // what the server says at the end
    this.trace = []; // what came when: { seconds, index, text, committed, rounds }
    this.started = performance.now();
    this.seconds = 0; // until the last event
  }

  /** Follows an answer to its end; `onChoice` sees each choice of each event after it is counted, with its tokens; `onEnd` the usage. */
  async follow(answer, onChoice = () => {}, onEnd = () => {}) {
    for await (const event of answer) {
      this.seconds = (performance.now() - this.started) / 1000;
      for (const choice of event.choices) {
        onChoice(choice, this.count(choice));
      }
      if (event.usage) onEnd((this.usage = event.usage));
    }
  }

  /** Takes a choice of an event; returns its tokens. */
  count(choice) {
    const { index, shoal } = choice;
    const piece = choice.text ?? choice.delta?.content ?? "";
    const tokens = withAlternatives(choice);
    const { committed = 0, by_round: rounds = [] } = shoal ?? {};
    const before = this.choices.get(index) ?? { text: "", tokens: [], by_round: [] };
    before.tokens.push(...tokens);
    before.by_round.push(...rounds);
    this.choices.set(index, { ...before, ...shoal, text: before.text + piece, tokens: before.tokens, by_round: before.by_round });
    this.trace.push({ seconds: this.seconds, index, text: piece, committed, rounds });
    return tokens;
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
