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
