// The chat: a conversation with the served model, and those of before.

import * as store from "./conversation.js";
import { ApiError, Run, about, ask, offerThemes, servedModel } from "./api.js";
import { Thread } from "./conversation.js";
import { stops } from "./form.js";
import { composes, framed, save } from "./page.js";

const at = (id) => document.getElementById(id);
const [controls, composer, message, key, system, area] = ["controls", "composer", "message", "key", "system", "thread"].map(at);
const CONTROLS = ["n", "temperature", "max_tokens", "top_p", "seed", "stop_strings"]; // later ones last: they are kept in this order
const MOST = 8; // candidates
const MARGIN = 16; // pixels above a question
const QUESTION = 0.4; // of the thread that a long question takes above several candidates
const BELOW = 48; // pixels from the end of the thread within which it follows what is written
const WIDE = matchMedia("(width >= 56rem)");

let conversation; // the one that is shown
let current = null; // the AbortController of the answer that is being written
let renaming = false;
const deleted = new Set(); // ids; what ends in them later is not kept
let model = null; // its name, once it is known
let server = null; // what the model allows, once it is known
const thread = new Thread(at("messages"), { choose, edit, regenerate });

// ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────────

/** Sends the conversation, which ends with a message of the user. `before`: the answer to put back if the server refuses. */
async function answer(before = null) {
  const mine = (current = new AbortController());
  const talk = conversation;
  const body = request(talk);
  const written = { role: "assistant", candidates: Array.from({ length: body.n }, nothing), chosen: null };
  complain(null);
  keep(talk);
  draw();
  say("Asking…");
  try {
    if (!server) await learn();
    const run = new Run();
    const events = await ask("v1/chat/completions", body, key.value, mine.signal);
    talk.messages.push(written);
    if (conversation === talk) {
      draw();
      say("Answering…");
    }
    await follow(events, run, written);
    if (conversation === talk) say(summary(run));
  } catch (failure) {
    if (conversation === talk) tell(failure, mine);
  } finally {
    end(mine, talk, written, before);
  }
}

/** A stopped answer is kept as far as it came; one of which nothing came is not, and what was there before comes back. */
function end(mine, talk, written, before) {
  const came = written.candidates.some(({ text, reasoning, error }) => text || reasoning || error);
  if (!came) talk.messages = talk.messages.filter((one) => one !== written);
  if (!came && before) talk.messages.push(before);
  keep(talk);
  if (current === mine) current = null;
  if (conversation === talk) draw();
}

const nothing = () => ({ text: "", reasoning: "", stats: null, error: null });

function request(talk) {
  const given = [...controls.elements].filter((field) => field.type === "number" && field.value !== "" && !field.disabled);
  const numbers = Object.fromEntries(given.map(({ name, value }) => [name, Number(value)]));
  const stop = stops(at("stop_strings").value);
  const always = { stream: true, stream_options: { include_usage: true }, shoal: { details: true } };
  return { messages: store.asMessages(talk), ...numbers, ...(stop.length && { stop }), ...always };
}

async function follow(events, run, { candidates }) {
  const changed = new Set();
  const redraw = framed(() => {
    const below = atEnd();
    for (const candidate of changed) thread.grow(candidate);
    changed.clear();
    if (below) toEnd();
  });
  const take = (choice) => {
    add(candidates[choice.index], choice, run.seconds);
    changed.add(candidates[choice.index]);
    redraw();
  };
  await run.follow(events, take, ({ choices, prompt_tokens: prompt }) => {
    for (const took of choices) close(candidates[took.index], took, prompt);
  });
}

function add(candidate, { delta, shoal: details, error }, seconds) {
  candidate.text += delta.content ?? "";
  candidate.reasoning += delta.reasoning_content ?? "";
  candidate.error = error ?? null;
  if (!details) return; // the opening has nothing yet
  const { committed: tokens, rounds, mean_logprob: mean } = details;
  candidate.stats = { tokens, rounds, mean, seconds, speculation: Boolean(server?.speculation) };
}

function close({ stats }, { completion_tokens: tokens, ended_by: ended }, prompt) {
  if (stats) Object.assign(stats, { tokens, ended, context: prompt === undefined ? null : prompt + tokens });
}

function summary(run) {
  const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  const answers = run.choices.size > 1 ? `${run.choices.size} candidates, ` : "";
  return `${answers}${count(run.sum("committed"), "token")} in ${run.seconds.toFixed(2)} s.`;
}

// ── what is pressed in messages ─────────────────────────────────────────────────────────────────────────────────────

function send() {
  const text = message.value.trim();
  if (!text || current || !allowed()) return;
  message.value = "";
  open(null);
  conversation.messages.push({ role: "user", text });
  draw();
  toEnd();
  answer();
}

/** Whether settings are such as can be sent; where not, it shows which. */
function allowed() {
  if (controls.checkValidity()) return true;
  open("controls");
  return controls.reportValidity();
}

function regenerate() {
  if (current || !allowed()) return;
  const last = conversation.messages.at(-1);
  if (last.role === "assistant") conversation.messages.pop();
  answer(last.role === "assistant" ? last : null);
}

function choose(index, candidate) {
  const later = conversation.messages.length - 1 - index;
  if (later && (current || !confirm("The messages after this answer are deleted. Go on?"))) return;
  conversation.messages.splice(index + 1);
  conversation.messages[index].chosen = candidate;
  if (!current) keep(conversation);
  const place = area.scrollTop;
  draw();
  area.scrollTop = place; // who reads a long candidate to its end and takes it stays there
}

/** Puts a text in a message's place, and goes on from there. */
function edit(index, text) {
  if (current || (conversation.messages[index].role === "user" && !allowed())) return;
  conversation.messages.splice(index + 1);
  const edited = conversation.messages[index];
  if (edited.role === "user") {
    edited.text = text.trim();
    answer();
  } else {
    const place = store.chosenOf(edited);
    edited.chosen = place;
    edited.candidates[place] = { ...nothing(), text, edited: true };
    keep(conversation);
    draw();
  }
  message.focus();
}

// ── conversations ───────────────────────────────────────────────────────────────────────────────────────────────────

/** Shows a conversation; what is being written in another is stopped. */
function turn(to) {
  current?.abort();
  current = null;
  conversation = to;
  system.value = to.system;
  sessionStorage.setItem("shoal-chat", to.id);
  complain(null);
  say("");
  open(null);
  draw();
  toEnd();
  if (WIDE.matches) message.focus();
}

function keep(talk) {
  if (deleted.has(talk.id)) return;
  talk.changed = Date.now();
  try {
    if (talk.messages.length || store.read(talk.id)) store.save(talk);
  } catch (failure) {
    complain(new ApiError(0, { message: `This chat cannot be kept: ${failure.message} Delete chats to make room.` }));
  }
  list();
}

function list() {
  if (renaming) return; // drawn once that is done
  const kept = store.all();
  at("list").replaceChildren(...kept.map(entry));
  at("chats").hidden = at("show-chats").hidden = !kept.length;
  at("exports").hidden = !conversation.messages.length;
}

function entry(one) {
  const item = document.createElement("li");
  const title = button(store.titleOf(one), () => { if (one.id !== conversation.id) turn(one); });
  title.className = "title";
  const here = one.id === conversation.id;
  if (here) title.setAttribute("aria-current", "page");
  item.append(title, button("Rename", () => rename(item, here ? conversation : one)), button("Delete", () => forget(one)));
  return item;
}

function button(text, pressed) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", pressed);
  return made;
}

/** Puts a field in a title's place; an empty one brings the first message's back. */
function rename(item, one) {
  const field = document.createElement("input");
  field.value = store.titleOf(one);
  field.setAttribute("aria-label", "Title");
  item.replaceChildren(field);
  field.select();
  renaming = true;
  const done = (title) => {
    if (!renaming) return; // taking the field away blurs it
    renaming = false;
    if (title !== undefined) one.title = title || null;
    if (title === undefined) list();
    else keep(one);
  };
  field.addEventListener("blur", () => done(field.value.trim()));
  field.addEventListener("keydown", (event) => {
    if (composes(event)) return;
    if (event.key === "Enter") done(field.value.trim());
    else if (event.key === "Escape") done();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

function forget(one) {
  if (!confirm(`Delete the chat “${store.titleOf(one)}”?`)) return;
  deleted.add(one.id);
  if (one.id === conversation.id) turn(store.fresh(conversation.system));
  store.remove(one.id);
  list();
}

function forgetAll() {
  if (!confirm("Delete all chats that are kept in this browser?")) return;
  for (const { id } of [conversation, ...store.all()]) deleted.add(id);
  turn(store.fresh(conversation.system));
  store.removeAll();
  list();
}

// ── showing ─────────────────────────────────────────────────────────────────────────────────────────────────────────

function draw() {
  const below = atEnd();
  thread.show(conversation, current !== null);
  at("empty").hidden = conversation.messages.length > 0;
  const busy = current !== null;
  at("send").hidden = busy;
  at("stop").hidden = !busy;
  showRoom();
  list();
  if (below) toEnd();
}

const atEnd = () => area.scrollHeight - area.scrollTop - area.clientHeight < BELOW;

/** To the end of what is written; of several candidates to where they begin, with their question above them: they differ in length. */
function toEnd() {
  const row = at("messages").querySelector(".message:last-child > .candidates");
  const place = (node) => node.getBoundingClientRect().top - area.getBoundingClientRect().top + area.scrollTop;
  area.scrollTop = row
    ? Math.max(place(row.parentElement.previousElementSibling) - MARGIN, place(row) - area.clientHeight * QUESTION)
    : area.scrollHeight;
}

/** How full the context was when the last answer ended. */
function showRoom() {
  const used = store.contextOf(conversation);
  at("room").hidden = used === null || !server;
  if (at("room").hidden) return;
  const { context } = server;
  Object.assign(at("context"), { max: context, low: 0.75 * context, high: 0.9 * context, optimum: 0, value: used });
  at("used").textContent = `${used.toLocaleString("en")} of ${context.toLocaleString("en")} tokens`;
}

/** Saves the open chat as a file. */
function take(ending, type, text) {
  const called = store.titleOf(conversation).replace(/[^\p{L}\p{N}.-]+/gu, "-").replace(/^-+|-+$/g, "") || "chat";
  save(new Blob([text], { type }), `${called}.${ending}`);
}

/** Unfolds a panel on narrow screens, or folds all. */
function open(name) {
  for (const panel of ["chats", "controls"]) {
    at(panel).classList.toggle("open", panel === name);
    at(`show-${panel}`).setAttribute("aria-expanded", panel === name);
  }
}

function say(words) {
  at("status").textContent = words;
}

function tell(failure, { signal }) {
  if (signal.aborted) say("Stopped.");
  else complain(failure);
}

/** Shows an error; null takes the last one away. */
function complain(failure) {
  at("error").hidden = failure === null;
  at("error").textContent = failure instanceof ApiError ? failure.message : failure ? `The server cannot be reached (${failure.message}).` : "";
  if (failure) say("");
  if (failure?.status !== 401) return;
  at("key-field").hidden = false;
  open("controls");
  key.focus();
}

// ── wiring ──────────────────────────────────────────────────────────────────────────────────────────────────────────

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
controls.addEventListener("submit", (event) => event.preventDefault());
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || composes(event)) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !composes(event)) current?.abort();
});
at("stop").addEventListener("click", () => {
  current?.abort();
  message.focus();
});
at("new").addEventListener("click", () => turn(store.fresh(conversation.system)));
at("clear").addEventListener("click", forgetAll);
at("save-markdown").addEventListener("click", () => take("md", "text/markdown", store.asMarkdown(conversation)));
at("save-json").addEventListener("click", () => {
  take("json", "application/json", `${JSON.stringify(store.asRecord(conversation, model), null, 1)}\n`);
});
for (const panel of ["chats", "controls"]) {
  at(`show-${panel}`).addEventListener("click", () => open(at(panel).classList.contains("open") ? null : panel));
}
system.addEventListener("change", () => {
  conversation.system = system.value;
  if (conversation.messages.length) keep(conversation);
});
controls.addEventListener("change", () => {
  localStorage.setItem("shoal-chat-controls", JSON.stringify(CONTROLS.map((name) => at(name).value)));
});
key.value = sessionStorage.getItem("shoal-key") ?? "";
key.addEventListener("input", () => sessionStorage.setItem("shoal-key", key.value));
offerThemes(at("theme"));
addEventListener("told", ({ detail }) => say(detail));
addEventListener("pagehide", () => { if (current) keep(conversation); });
store.onChange((id) => {
  const other = store.read(conversation.id);
  if (other && !current && (id === null || id === conversation.id)) turn(other);
  list();
});

async function learn() {
  const { id, shoal } = await servedModel(key.value);
  server = shoal;
  model = id;
  at("model").textContent = id;
  at("pair").textContent = at("pair").title = about(shoal, id);
  document.title = `${id} · shoal chat`;
  at("editor").hidden = !shoal.fill_in_middle;
  at("n").max = Math.min(MOST, shoal.max_n);
  at("max_tokens").max = shoal.max_tokens;
  if (shoal.max_tokens < Number(at("max_tokens").value)) at("max_tokens").value = shoal.max_tokens;
  at("seed").disabled = at("seed").parentElement.hidden = !shoal.seeds;
  showRoom();
  at("unable").hidden = shoal.chat;
  message.disabled = at("send").disabled = !shoal.chat;
}

function recall() {
  try {
    JSON.parse(localStorage.getItem("shoal-chat-controls"))?.forEach((value, index) => { at(CONTROLS[index]).value = value; });
  } catch {
    localStorage.removeItem("shoal-chat-controls");
  }
}

recall();
turn(store.read(sessionStorage.getItem("shoal-chat")) ?? store.fresh());
learn().catch(complain);
