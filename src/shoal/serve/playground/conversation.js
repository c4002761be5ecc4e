// Conversations: kept in this browser, and their messages as elements.

import { ending } from "./api.js";
import { Markdown } from "./markdown.js";
import { composes, copyButton } from "./page.js";

// ── kept conversations ─────────────────────────────────────────────────────────────────────────────────────────────

// Conversations, kept in this browser: each under a key of its own, so that several tabs do not overwrite each other's.
//
// { id, title, changed, system, messages }; a message is { role: "user", text }, or { role: "assistant", candidates, chosen }, `chosen` being
// null until somebody chooses. A candidate is { text, reasoning, stats, error, edited };
// `stats.context`: tokens of the conversation with it. A title of null: the first message's.

const PREFIX = "shoal-chat:";
const TITLE = 60; // characters

/** A conversation without messages; it is kept once it is saved. */
export function fresh(system = "") {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: null, changed: Date.now(), system, messages: [] };
}

/** All conversations, those that were changed last before the others. */
export function all() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  return ids.map(read).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

/** A conversation by its id; null if there is none, or none that can be read. */
export function read(id) {
  try {
    const found = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(found?.messages) ? found : null;
  } catch {
    return null;
  }
}

/** Raises DOMException: the browser has no room left. */
export function save(conversation) {
  localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

export function removeAll() {
  for (const { id } of all()) remove(id);
}

/** Tells when another tab changed a conversation; null: any of them. */
export function onChange(told) {
  addEventListener("storage", ({ key }) => {
    if (key === null || key.startsWith(PREFIX)) told(key?.slice(PREFIX.length) ?? null);
  });
}

export function titleOf({ title, messages }) {
  const line = title ?? messages.find(({ role }) => role === "user")?.text.trim().split("\n")[0] ?? "New chat";
  return line.length > TITLE ? `${line.slice(0, TITLE)}…` : line;
}

/** The candidate that the conversation goes on from; if nobody chose, the most probable of those that the model ended. */
export function chosenOf({ candidates, chosen }) {
  if (chosen !== null) return chosen;
  const rank = ({ stats, error }) => (error ? -1 : ["eos", "stop"].includes(stats?.ended) ? 1 : 0);
  const order = candidates.map((one, index) => ({ index, rank: rank(one), mean: one.stats?.mean ?? -Infinity }));
  return order.sort((a, b) => b.rank - a.rank || b.mean - a.mean)[0].index;
}

/** The tokens that the conversation took when its last answer ended; null where that is not known. */
export function contextOf({ messages }) {
  const answers = messages.filter(({ role }) => role === "assistant").map((message) => message.candidates[chosenOf(message)]);
  return answers.at(-1)?.stats?.context ?? null;
}

/** The conversation for people to read: what was said, of each answer the candidate that was chosen. */
export function asMarkdown(conversation) {
  const { system, messages } = conversation;
  const said = system.trim() ? [["System", system]] : [];
  for (const message of messages) {
    said.push(message.role === "user" ? ["You", message.text] : ["Answer", message.candidates[chosenOf(message)].text]);
  }
  return [`# ${titleOf(conversation)}`, ...said.map(([who, text]) => `## ${who}\n\n${text.trim()}`)].join("\n\n") + "\n";
}

/** The conversation for programs: the messages as the API takes them, and all that is kept of it. */
export function asRecord(conversation, model) {
  const { id: _, ...kept } = conversation;
  const form = { format: "shoal chat", version: 1, saved: new Date().toISOString(), model };
  return { ...form, messages: asMessages(conversation), conversation: { ...kept, title: titleOf(conversation) } };
}

/** The conversation as the API takes it: of each answer the candidate that was chosen, without its reasoning. Messages of one role that
 *  follow each other are one, as many templates take no others. */
export function asMessages({ system, messages }) {
  const said = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    const content = message.role === "user" ? message.text : message.candidates[chosenOf(message)].text;
    if (said.at(-1)?.role === message.role) said.at(-1).content += `\n\n${content}`;
    else said.push({ role: message.role, content });
  }
  return said;
}

// ── messages as elements ───────────────────────────────────────────────────────────────────────────────────────────

// The messages of a conversation as elements. What is pressed in them is told to `actions`:
// choose(message, candidate), edit(message, text), regenerate(); messages by their index.

function element(name, className, ...content) {
  const made = document.createElement(name);
  made.className = className;
  made.append(...content);
  return made;
}

function button(text, pressed) {
  const made = element("button", "", text);
  made.type = "button";
  made.addEventListener("click", pressed);
  return made;
}

/** The last answer's row of candidates and each of them: they scroll. */
function scrolled(container) {
  const row = container.querySelector(".message:last-child > .candidates");
  return row ? [row, ...row.children] : [];
}

/** Candidates beside each other: up to four in a line, more in two. */
function row(nodes) {
  const made = element("div", "candidates", ...nodes);
  made.style.setProperty("--columns", nodes.length <= 4 ? nodes.length : Math.ceil(nodes.length / 2));
  return made;
}

export class Thread {
  constructor(container, actions) {
    this.container = container;
    this.actions = actions;
    this.live = new Map(); // candidates of the answer that is being written -> what draws them
  }

  /** Draws a conversation. `busy`: its last answer is being written. */
  show({ messages }, busy) {
    this.container.classList.toggle("busy", busy);
    const last = messages.length - 1;
    this.live.clear();
    const drawn = messages.map((message, index) => (
      message.role === "user" ? this.question(message, index, index === last) : this.answer(message, index, index === last, busy)
    ));
    const places = scrolled(this.container).map(({ scrollLeft, scrollTop }) => [scrollLeft, scrollTop]);
    this.container.replaceChildren(...drawn);
    scrolled(this.container).forEach((node, index) => places[index] && node.scroll(...places[index]));
  }

  /** Draws what has come of a candidate of the answer that is being written; of others nothing. */
  grow(candidate) {
    this.live.get(candidate)?.update(candidate, true);
  }

  question({ text }, index, last) {
    const node = element("article", "message user", element("h2", "heard", "You"), element("div", "said", text));
    const tools = element("div", "tools", this.editing(node, index, text, "Send", last));
    tools.append(copyButton(() => text, "The question"));
    if (last) tools.append(idle(button("Try again", () => this.actions.regenerate())));
    node.append(tools);
    return node;
  }

  answer(message, index, last, busy) {
    const { candidates } = message;
    const live = last && busy;
    const node = element("article", "message assistant", element("h2", "heard", "Answer"));
    const chosen = live && message.chosen === null ? null : chosenOf(message);
    const shown = candidates.map((candidate, place) => {
      const choose = candidates.length > 1 ? () => this.actions.choose(index, place) : null;
      return new Candidate(candidate, { place, live, choose, chosen: place === chosen });
    });
    if (live) candidates.forEach((candidate, place) => this.live.set(candidate, shown[place]));
    const nodes = shown.map((one) => one.node);
    if (last) node.append(candidates.length > 1 ? row(nodes) : element("div", "single", ...nodes));
    else node.append(...folded(shown, chosen));
    const tools = element("div", "tools");
    if (last && !live) tools.append(idle(button("Regenerate", () => this.actions.regenerate())));
    if (!live) tools.append(this.editing(node, index, candidates[chosen].text, "Save", last));
    tools.append(copyButton(() => candidates[chosenOf(message)].text, "The answer"));
    node.append(tools);
    return node;
  }

  /** A button that puts a field in a message's place. */
  editing(node, index, text, done, last) {
    return idle(button("Edit", () => {
      const content = [...node.children];
      const form = editor(text, done, last, (written) => this.actions.edit(index, written), () => {
        node.replaceChildren(...content);
        content.at(-1).querySelector("button")?.focus();
      });
      node.replaceChildren(form);
      form.querySelector("textarea").focus();
    }));
  }
}

function idle(made) {
  made.classList.add("idle"); // there only while nothing is being written
  return made;
}

/** The chosen candidate, as if it were the only one, and the others to unfold. */
function folded(shown, chosen) {
  const others = shown.filter((_, index) => index !== chosen).map((one) => one.node);
  const single = element("div", "single", shown[chosen].node);
  if (!others.length) return [single];
  const more = element("summary", "", others.length === 1 ? "1 other candidate" : `${others.length} other candidates`);
  return [single, element("details", "others", more, row(others))];
}

function editor(text, done, last, save, cancel) {
  const field = element("textarea", "");
  Object.assign(field, { value: text, rows: 3, required: true });
  field.setAttribute("aria-label", "Edited message");
  const form = element("form", "editor", field);
  if (!last) form.append(element("small", "", "The messages after this one are deleted."));
  const submit = element("button", "primary", done);
  form.append(element("div", "tools", submit, button("Cancel", cancel)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    save(field.value);
  });
  form.addEventListener("keydown", (event) => {
    if (composes(event)) return;
    if (event.key === "Escape") cancel();
    else if (event.key === "Enter" && !event.shiftKey && done === "Send") form.requestSubmit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return form;
}

/** One answer, or one of several. */
class Candidate {
  constructor(candidate, { place, live, choose, chosen }) {
    this.node = element("section", chosen ? "candidate chosen" : "candidate");
    this.several = choose !== null;
    if (choose) this.node.append(this.head(place, choose, chosen));
    this.reasoning = element("div", "said");
    this.thought = element("details", "reasoning", element("summary", "", "Reasoning"), this.reasoning);
    this.text = element("div", "markdown");
    this.markdown = new Markdown(this.text);
    this.error = element("p", "failure");
    this.about = element("p", "about");
    this.node.append(this.thought, this.text, this.error, this.about);
    this.update(candidate, live);
  }

  head(place, choose, chosen) {
    const pick = button(chosen ? "Chosen" : "Choose", choose);
    pick.setAttribute("aria-pressed", chosen);
    this.node.setAttribute("aria-label", `Candidate ${place + 1}`);
    return element("header", "", element("h3", "", `Candidate ${place + 1}`), pick);
  }

  update(candidate, live) {
    const { text, reasoning, error } = candidate;
    this.thought.hidden = !reasoning;
    if (this.reasoning.textContent !== reasoning) this.reasoning.textContent = reasoning;
    this.markdown.update(text);
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    this.about.textContent = figures(candidate, live, this.several).join(" · ");
    this.node.classList.toggle("waiting", live && !text && !reasoning);
  }
}

/** What an answer took; of one of several also how probable the model finds it, which is how they are ranked. */
function figures({ stats, edited }, live, several) {
  if (edited) return ["edited"];
  if (!stats) return [];
  const { tokens, seconds, rounds, speculation, mean, ended } = stats;
  const told = [`${tokens} token${tokens === 1 ? "" : "s"} in ${seconds.toFixed(2)} s`];
  if (seconds) told.push(`${(tokens / seconds).toFixed(0)} a second`);
  if (speculation && rounds) told.push(`${(tokens / rounds).toFixed(2)} tokens per pass`);
  if (several && mean !== null) told.push(`mean probability ${(100 * Math.exp(mean)).toFixed(0)} %`);
  if (!live) told.push(ended ? ending(ended) : "not finished");
  return told.map((figure) => figure.replaceAll(" ", "\u00a0"));
}
