// The columns: one per sample, filled token by token, ranked as they go.

import { copies } from "./clipboard.js";
import { remember } from "./inspect.js";
import { Rounds } from "./rounds.js";
import { ending } from "./served.js";

const number = (value, digits) => (value === null ? "–" : value.toFixed(digits).replace("-", "−"));

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

/** One column. */
class Sample {
  constructor(index, drafters) {
    this.drafters = drafters; // null: the run does not draft, so its rounds say nothing
    this.place = null; // its rank, once there is a token
    this.figures = { mean_logprob: null, committed: 0, drafted: 0, accepted: 0, rounds: 0 };
    this.waiting = { tokens: [], rounds: [] }; // what has come and is not drawn yet
    this.node = element("article", "sample");
    const title = element("h2", "", `Sample ${index + 1}`);
    title.id = `sample-${index + 1}`;
    this.node.setAttribute("aria-labelledby", title.id);
    this.rank = element("span", "rank");
    this.about = element("p", "about");
    this.text = element("pre", "text");
    this.rounds = new Rounds(this.text, drafters);
    const head = element("header", "");
    head.append(title, this.rank, copyButton(index, this.text));
    this.node.append(head, this.about, this.text);
    this.describe("waiting");
  }

  /** Takes what a chunk brings, to be drawn later. */
  add({ tokens, by_round: rounds = [], ...figures }) {
    this.figures = figures;
    this.waiting.tokens.push(...tokens);
    if (this.drafters) this.waiting.rounds.push(...rounds);
  }

  /** Draws what has come since the last time. */
  draw() {
    const { tokens, rounds } = this.waiting;
    this.waiting = { tokens: [], rounds: [] };
    this.rounds.append(tokens.map((token) => tokenNode(token, this.drafters)));
    this.rounds.add(rounds);
    this.describe("drawing");
  }

  /** Takes how it ended. */
  end({ ended_by, error }) {
    this.rounds.end();
    this.node.classList.toggle("failed", error !== null);
    this.describe(error ?? ending(ended_by));
  }

  describe(state) {
    const { mean_logprob, committed, rounds } = this.figures;
    const passes = this.drafters ? [`${number(rounds ? committed / rounds : null, 2)} per pass`] : [];
    const figures = [`${committed} tokens`, ...passes, `mean log-prob ${number(mean_logprob, 3)}`, state];
    this.about.replaceChildren(...figures.flatMap((figure) => [element("span", "", figure), " "]));
  }

  showRank(rank) {
    if (rank === this.place) return;
    this.place = rank;
    this.rank.textContent = rank === null ? "" : `#${rank}`;
    this.rank.title = rank === null ? "" : `rank ${rank} by mean log-probability`;
    this.node.classList.toggle("best", rank === 1);
  }
}

/** Copies a sample's text, of which rejected drafts are no part. */
function copyButton(index, text) {
  const button = element("button", "copy", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", `Copy sample ${index + 1}`);
  copies(button, () => text.textContent, `Sample ${index + 1}`);
  return button;
}

function tokenNode(token, drafters) {
  const { text, logprob, drafter } = token;
  const node = element("span", drafter === null ? "token" : `token draft ${drafters.style(drafter)}`, text);
  const from = drafter === null ? "the target's own, " : `accepted draft of ${drafter}, `;
  node.title = `${drafters ? from : ""}log-prob ${number(logprob, 3)}`;
  remember(node, token);
  return node;
}

/** All columns of a run. */
export class Samples {
  constructor(container, n, drafters) {
    this.container = container;
    this.drafters = drafters;
    this.all = Array.from({ length: n }, (_, index) => new Sample(index, drafters));
    this.changed = new Set();
    container.replaceChildren(...this.all.map((sample) => sample.node));
  }

  /** Takes a choice of a chunk, and its tokens with what is known of them, to be drawn by `draw`. */
  add({ index, shoal }, tokens) {
    if (!shoal) return; // the opening of a conversation has nothing yet
    this.all[index].add({ ...shoal, tokens });
    this.changed.add(this.all[index]);
  }

  draw() {
    if (!this.changed.size) return;
    for (const sample of this.changed) sample.draw();
    this.changed.clear();
    this.rank();
  }

  /** Takes the usage that ends an answer. */
  end(usage) {
    this.draw();
    for (const took of usage.choices) this.all[took.index].end(took);
    this.drafters?.count(usage.by_drafter);
  }

  rank() {
    const mean = (sample) => sample.figures.mean_logprob;
    const ranked = this.all.filter((sample) => mean(sample) !== null).sort((a, b) => mean(b) - mean(a));
    for (const sample of this.all) sample.showRank(ranked.indexOf(sample) + 1 || null);
  }
}
