// The editor: what fits between the text before the cursor and the text behind it, shown in place.

import { ApiError, Run, ask, ending, offerThemes, servedModel } from "./api.js";

const at = (id) => document.getElementById(id);
const [form, key, text, pane, ghost, list] = ["form", "key", "text", "pane", "ghost", "suggestions"].map(at);
const PAUSE = 400; // milliseconds without a key before the server is asked
const FIELDS = ["n", "max_tokens", "temperature", "time_budget"];

let current = null; // the AbortController of what is running
let timer; // of the pause
let place = 0; // the cursor that the suggestions are for
let found = []; // suggestions, best first, equal texts once
let chosen = 0;
let context = 2048; // tokens

// ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────────

async function suggest() {
  drop();
  const mine = (current = new AbortController());
  place = text.selectionStart;
  complain(null);
  say("Asking…");
  try {
    const run = new Run();
    const answer = await ask("v1/completions", body(), key.value, mine.signal);
    await run.follow(answer, () => show(ranked(run.choices)), (usage) => show(ranked(run.choices, usage)));
    say(`${found.length} different texts of ${run.choices.size} in ${run.seconds.toFixed(2)} s.`);
  } catch (failure) {
    if (!mine.signal.aborted) complain(failure);
  } finally {
    if (current === mine) current = null;
  }
}

/** What to ask: as much text on each side as surely fits the context. */
function body() {
  const numbers = Object.fromEntries(FIELDS.map((name) => [name, Number(at(name).value)]));
  const sides = {
    prompt: text.value.slice(Math.max(0, place - 2 * context), place), suffix: text.value.slice(place, place + context / 2),
  };
  const { value: language } = at("syntax");
  const syntax = language === "filename" ? { filename: at("filename").value } : language ? { syntax: language } : {};
  const members = at("members").checked ? { members: true } : {};
  return { ...sides, ...numbers, ...syntax, ...members, stream: true, stream_options: { include_usage: true }, shoal: { details: true } };
}

/** Those that the model ended, or that parse, before the others, then by mean log-probability; the usage says how they ended. */
function ranked(choices, usage) {
  const took = new Map(usage?.choices.map((one) => [one.index, one]));
  const all = [...choices].map(([index, { text, mean_logprob }]) => (
    { text, mean: mean_logprob, end: took.get(index)?.ended_by, syntax: took.get(index)?.syntax, times: 1 }
  ));
  all.sort((a, b) => kind(a) - kind(b) || (b.mean ?? -Infinity) - (a.mean ?? -Infinity));
  const different = new Map();
  for (const one of all) {
    if (different.has(one.text)) different.get(one.text).times += 1;
    else different.set(one.text, one);
  }
  return [...different.values()];
}

const PARSES = { complete: "the file parses", cut: "cut where the file parses", incomplete: "the file does not parse yet" };
const ended = ({ end }) => end === "eos" || end === "stop";
const kind = (one) => (one.syntax ? Object.keys(PARSES).indexOf(one.syntax) : ended(one) ? 0 : 3);

// ── showing ─────────────────────────────────────────────────────────────────────────────────────────────────────────

function show(suggestions) {
  found = suggestions;
  chosen = Math.min(chosen, Math.max(found.length - 1, 0));
  list.replaceChildren(...found.map(entry));
  haunt();
}

function entry(suggestion, index) {
  const item = document.createElement("li");
  const button = document.createElement("button");
  button.type = "button";
  button.setAttribute("aria-pressed", index === chosen);
  button.append(element("p", "about", about(suggestion, index)), element("pre", "text", suggestion.text || "nothing"));
  const parses = suggestion.syntax === "incomplete" ? "" : "parses";
  if (suggestion.syntax) button.firstChild.append(" · ", element("span", parses, PARSES[suggestion.syntax]));
  button.addEventListener("click", () => { chosen = index; accept(); });
  item.append(button);
  return item;
}

function about({ mean, end, times }, index) {
  const figures = [`#${index + 1}`, mean === null ? "–" : `mean log-prob ${mean.toFixed(3).replace("-", "−")}`];
  if (times > 1) figures.push(`${times} times`);
  if (end) figures.push(ending(end));
  return figures.join(" · ");
}

function element(name, className, content) {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = content;
  return made;
}

/** Draws the whole text with the suggestion in it over the text that is edited, which is hidden but for its caret. */
function haunt() {
  const one = found[chosen]?.text;
  ghost.hidden = !one;
  pane.classList.toggle("ghosted", Boolean(one));
  if (!one) return;
  ghost.replaceChildren(text.value.slice(0, place), element("span", "ghost", one), `${text.value.slice(place)}\n`);
  ghost.scrollTop = text.scrollTop;
}

function drop() {
  clearTimeout(timer);
  current?.abort();
  chosen = 0;
  show([]);
}

function accept() {
  const one = found[chosen]?.text;
  drop();
  if (!one) return;
  text.focus();
  text.setRangeText(one, place, place, "end");
  say("Taken.");
}

function turn(step) {
  chosen = (chosen + step + found.length) % found.length;
  show(found);
}

function say(words) {
  at("status").textContent = words;
}

function complain(failure) {
  at("error").hidden = failure === null;
  at("error").textContent = failure instanceof ApiError ? failure.message : failure ? `The server cannot be reached (${failure.message}).` : "";
  if (failure?.status === 401) at("key-field").hidden = false;
  if (failure) say("");
}

// ── wiring ──────────────────────────────────────────────────────────────────────────────────────────────────────────

form.addEventListener("submit", (event) => {
  event.preventDefault();
  suggest();
});
text.addEventListener("input", () => {
  drop();
  if (at("typing").checked && form.checkValidity()) timer = setTimeout(suggest, PAUSE);
});
text.addEventListener("scroll", () => { ghost.scrollTop = text.scrollTop; });
document.addEventListener("selectionchange", () => {
  if (document.activeElement === text && text.selectionStart !== place && (found.length || current)) drop();
});
text.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (event.key === "Tab" && !ghost.hidden) accept();
  else if (event.altKey && step && found.length) turn(step);
  else return;
  event.preventDefault();
});
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  if (event.key === "Escape") drop();
});
key.value = sessionStorage.getItem("shoal-key") ?? "";
key.addEventListener("input", () => sessionStorage.setItem("shoal-key", key.value));
offerThemes(at("theme"));

async function learn() {
  const { id, shoal: about } = await servedModel(key.value);
  at("model").textContent = id;
  context = about.context;
  at("n").max = about.max_n;
  at("max_tokens").max = about.max_tokens;
  for (const name of about.syntax ?? []) at("syntax").add(new Option(name, name));
  for (const name of ["filename", "syntax"]) at(name).disabled = at(name).parentElement.hidden = !about.syntax?.length;
  at("members").disabled = at("members").parentElement.hidden = !about.members;
  at("ask").disabled = !about.fill_in_middle;
  if (!about.fill_in_middle) say("This model was not trained to fill in.");
}

const start = text.value.indexOf("retu") + 4;
text.setSelectionRange(start, start);
text.focus();
learn().catch(complain);
