// The columns of samples: their tokens, rounds and drafters, and the card of a token.

import { ending } from "./api.js";
import { copies } from "./page.js";

// ── the card of a token ────────────────────────────────────────────────────────────────────────────────────────────

// What is known of one token, without a mouse too: a card beside it, by tap, click or keyboard. A sample is one stop of the Tab key;
// inside, the arrow keys go from token to token.

const figure = (value, digits) => value.toFixed(digits).replace("-", "−");
const facts = new WeakMap(); // token element -> what is known of it
const card = document.createElement("div");
let shown = null; // the token whose card is open

/** Keeps what is known of a token for its card: `id`, `text`, `logprob`, `drafter` (null: the target's own), and `top`, its
 *  alternatives as [text, log-probability], if they were asked for. The round is the element's data-round. */
function remember(node, token) {
  facts.set(node, token);
  node.tabIndex = -1;
}

/** Opens cards for the tokens in a container, now and later. */
export function inspect(container) {
  card.id = "token-card";
  card.className = "token-card";
  card.setAttribute("role", "tooltip");
  card.hidden = true;
  container.after(card);
  container.addEventListener("click", ({ target }) => toggle(tokenAt(target)));
  container.addEventListener("focusin", ({ target }) => {
    if (facts.has(target)) enter(target);
  });
  container.addEventListener("focusout", () => hide());
  container.addEventListener("keydown", press);
  document.addEventListener("keydown", escape, true);
  document.addEventListener("pointerdown", ({ target }) => {
    if (shown && !shown.contains(target) && !card.contains(target)) hide();
  });
  addEventListener("resize", hide);
  addEventListener("scroll", () => shown && place(), { passive: true, capture: true });
  new MutationObserver((changes) => settle(new Set(changes.map(({ target }) => target.closest(".text")))))
    .observe(container, { childList: true, subtree: true });
}

const tokenAt = (target) => target.closest?.(".token") ?? null;
const tokensOf = (node) => [...node.closest(".text").querySelectorAll(".token")].filter((token) => facts.has(token));

/** Every sample has one token that Tab reaches; a card whose token is gone closes. `texts`: those that changed, null for what is no text.
 *  What this changes are attributes, which are not observed. */
function settle(texts) {
  if (shown && !shown.isConnected) hide();
  for (const text of texts) {
    if (!text || text.querySelector('.token[tabindex="0"]')) continue;
    const first = text.querySelector(".token[tabindex]");
    if (first) first.tabIndex = 0;
  }
}

function enter(token) {
  for (const other of token.closest(".text").querySelectorAll('.token[tabindex="0"]')) other.tabIndex = -1;
  token.tabIndex = 0;
  if (token.matches(":focus-visible")) show(token);
}

function toggle(token) {
  if (!facts.has(token) || !getSelection().isCollapsed) return; // who selects text wants no card
  if (shown === token) hide();
  else show(token);
}

// ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────────

function press(event) {
  const token = document.activeElement;
  if (!facts.has(token) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") toggle(token);
  else {
    const next = neighbour(token, event.key);
    if (next === undefined) return;
    next?.focus({ focusVisible: true });
    next?.scrollIntoView({ block: "nearest" });
  }
  event.preventDefault();
}

/** Where a key leads: null if there is nothing that way, undefined if the key leads nowhere. */
function neighbour(token, key) {
  const all = tokensOf(token);
  const at = all.indexOf(token);
  if (key === "ArrowRight") return all[at + 1] ?? null;
  if (key === "ArrowLeft") return all[at - 1] ?? null;
  if (key === "Home") return all[0];
  if (key === "End") return all.at(-1);
  if (key === "ArrowDown") return onLine(token, all.slice(at + 1));
  if (key === "ArrowUp") return onLine(token, all.slice(0, at).reverse());
  return undefined;
}

/** Where a token's first visible text stands: one that begins with a line break has an empty box on the line before. */
function boxOf(token) {
  return [...token.getClientRects()].find(({ width }) => width > 0) ?? token.getBoundingClientRect();
}

/** Of tokens in order of distance: the one on the next line that is nearest sideways. */
function onLine(token, others) {
  const { left, top, height } = boxOf(token);
  let line = null;
  let best = null;
  for (const other of others) {
    const there = boxOf(other);
    if (Math.abs(there.top - top) < height / 2) continue;
    line ??= there.top;
    if (Math.abs(there.top - line) >= height / 2) break;
    const distance = Math.abs(there.left - left);
    if (!best || distance < best.distance) best = { distance, other };
  }
  return best?.other ?? null;
}

/** Esc closes the card first, and stops a run only when none is open. */
function escape(event) {
  if (event.key !== "Escape" || !shown) return;
  hide();
  event.stopPropagation();
}

// ── the card ────────────────────────────────────────────────────────────────────────────────────────────────────────

function show(token) {
  hide();
  shown = token;
  card.replaceChildren(...content(facts.get(token), token.dataset.round));
  card.hidden = false;
  token.setAttribute("aria-describedby", card.id);
  token.classList.add("inspected");
  place();
}

function hide() {
  if (!shown) return;
  shown.removeAttribute("aria-describedby");
  shown.classList.remove("inspected");
  shown = null;
  card.hidden = true;
}

/** Below the token, above where there is no room below, and inside the window. */
function place() {
  const [at, own, gap] = [boxOf(shown), card.getBoundingClientRect(), 6];
  const left = Math.max(gap, Math.min(at.left, document.documentElement.clientWidth - own.width - gap));
  const below = at.bottom + gap;
  const top = below + own.height > innerHeight ? Math.max(gap, at.top - gap - own.height) : below;
  card.style.setProperty("left", `${left}px`);
  card.style.setProperty("top", `${top}px`);
}

function piece(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

/** A token's text with its blanks visible. */
const visible = (text) => (text === "" ? "no text" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

function chance(logprob) {
  if (logprob === null) return "–";
  const percent = 100 * Math.exp(logprob);
  return percent < 0.01 ? "< 0.01 %" : `${figure(percent, percent < 1 ? 2 : 1)} %`;
}

function content({ id, text, logprob, drafter, top = [] }, round) {
  const rows = [
    ...(drafter === null && round === undefined ? [] : [
      ["from", drafter === null ? "the target itself" : `accepted draft of ${drafter}`],
      ["round", round ?? "–"],
    ]),
    ["token id", id],
    ["log-probability", logprob === null ? "–" : logprob > -0.0005 ? "> −0.0005" : figure(logprob, 3)],
    ["probability", chance(logprob)],
  ];
  const list = document.createElement("dl");
  for (const [name, value] of rows) list.append(piece("dt", name), " ", piece("dd", value), " ");
  return [piece("p", visible(text), "token-text"), list, ...(top.length ? [alternatives(top, text)] : [])];
}

function alternatives(top, text) {
  const section = piece("div", "", "alternatives");
  const list = document.createElement("ol");
  for (const [name, logprob] of top) {
    const item = piece("li", "", name === text ? "drawn" : "");
    item.append(piece("span", visible(name)), " ", piece("b", chance(logprob)));
    item.style.setProperty("--share", Math.exp(logprob));
    list.append(item);
  }
  section.append(piece("p", "most probable here"), list);
  return section;
}

// ── drafters ───────────────────────────────────────────────────────────────────────────────────────────────────────

// Which drafter proposed a token: each has a colour and a line of its own, and an entry in the legend.

const STYLES = 4; // of classes by-0, by-1, ...; more drafters than that share them

/** The drafters of a run, in the order in which their first tokens came. */
export class Drafters {
  constructor(legend) {
    this.legend = legend;
    this.entries = new Map();
    legend.replaceChildren();
  }

  /** The class of a drafter's tokens; its entry is there from its first token on. */
  style(name) {
    if (!this.entries.has(name)) this.enter(name);
    return this.entries.get(name).style;
  }

  /** Takes what the usage says of all samples. */
  count(byDrafter) {
    for (const [name, { drafted, accepted }] of Object.entries(byDrafter)) {
      this.style(name);
      this.entries.get(name).counts.textContent = `${accepted} of ${drafted} accepted`;
    }
  }

  enter(name) {
    const style = `by-${this.entries.size % STYLES}`;
    const [item, token, counts] = ["li", "span", "span"].map((tag) => document.createElement(tag));
    token.className = `token draft ${style}`;
    token.textContent = name;
    counts.textContent = "accepted";
    item.append(token, " ", counts);
    this.legend.append(item);
    this.entries.set(name, { style, counts });
  }
}

// ── rounds ─────────────────────────────────────────────────────────────────────────────────────────────────────────

// The rounds of one sample: which drafts were rejected, and where each round begins among the sample's tokens.

/** Puts what rounds tell between the tokens of a sample. A round may come before its tokens, or its tokens before their round. */
class Rounds {
  constructor(text, drafters) {
    this.text = text; // the element whose token nodes are the sample's
    this.drafters = drafters;
    this.tokens = [];
    this.waiting = [];
    this.done = [];
  }

  /** Takes token nodes, in order, and puts them at the end. */
  append(nodes) {
    this.tokens.push(...nodes);
    this.text.append(...nodes);
    this.settle(false);
  }

  /** Takes rounds, in order. */
  add(rounds) {
    this.waiting.push(...rounds);
    this.settle(false);
  }

  /** No more comes: what a stop string has cut away has no tokens. */
  end() {
    this.settle(true);
  }

  /** The nodes of each round: accepted drafts, rejected ones, the target's own token. */
  get parts() {
    return this.done.map(({ start, accepted, committed, struck }) => (
      { accepted: this.tokens.slice(start, start + accepted), struck, own: this.tokens.slice(start + accepted, start + committed) }
    ));
  }

  settle(ended) {
    while (this.waiting.length) {
      const [{ start, accepted, committed, rejected }] = this.waiting;
      const place = start + accepted; // of the target's own token, before which the rejected drafts stood
      if (this.tokens.length <= place && !ended) return;
      this.waiting.shift();
      const struck = rejected.map((draft) => rejectedNode(draft, this.drafters));
      this.done.push({ start, accepted, committed, struck });
      mark((accepted ? null : struck[0]) ?? this.tokens[start], this.done.length);
      for (const node of this.tokens.slice(start, place + 1)) node.dataset.round = this.done.length;
      if (place < this.tokens.length) this.tokens[place].before(...struck);
      else this.text.append(...struck);
    }
  }
}

/** Marks the node that a round begins with; what a stop string cut away has none. */
function mark(node, round) {
  if (!node) return;
  node.classList.add("begins");
  node.title = `round ${round}: ${node.title}`;
}

/** Its text is drawn by the style sheet, so that neither the element's text nor a selection has what the sample does not. */
function rejectedNode({ text, drafter }, drafters) {
  const node = document.createElement("s");
  node.className = `rejected ${drafters.style(drafter)}`;
  node.dataset.text = text.replaceAll("\n", "↵");
  node.title = `rejected draft of ${drafter}`;
  return node;
}

// ── columns ────────────────────────────────────────────────────────────────────────────────────────────────────────

// The columns: one per sample, filled token by token, ranked as they go.

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
