// The page at /: what happens when something is pressed, and the figures above the columns.

import { ApiError, Run, about, ask, offerThemes, servedModel } from "./api.js";
import { adapt, allow, control, fromHash, offerExamples, offerLengths, request, toHash } from "./form.js";
import { copies, framed } from "./page.js";
import { offer } from "./replay.js";
import { Drafters, Samples, inspect } from "./samples.js";
import { offerToShare, share } from "./share.js";
import { coloursOf, paintSamples } from "./syntax.js";

const at = (id) => document.getElementById(id);

// ── figures and gauge ──────────────────────────────────────────────────────────────────────────────────────────────

// The figures above the columns, and the gauge: tokens per second, speculative and plain, on one scale.

function write(id, text) {
  at(id).textContent = text;
}

/** Nothing has come yet. `drafts`: whether the run may draft; `compared`: whether plain decoding comes after it; `pair`: whether there is
 *  a drafter at all. What has nothing to show is not there. */
function reset(seed, { drafts, compared, pair }) {
  at("figures").hidden = false;
  at("results").classList.toggle("undrafted", !drafts);
  at("results").classList.toggle("uncompared", !compared);
  for (const id of ["acceptance", "accepted", "tokens", "seconds", "times"]) write(id, "–");
  write("used-seed", seed ?? "none");
  at("used-seed").parentElement.hidden = seed === undefined;
  write("mine-label", drafts ? "speculative" : pair ? "plain" : "speed");
  if (drafts) showPlain("has not been");
  else write("gauge-note", pair ? "No drafts: this run is plain decoding itself." : "");
  for (const id of ["mine", "plain"]) bar(id, 0, 1);
}

/** Whether plain decoding "is being" or "has not been" measured. */
function showPlain(how) {
  write("gauge-note", `Plain decoding ${how} measured.`);
}

/** The counts and the speed of a run so far. */
function showFigures(run) {
  const counts = ["committed", "rounds", "drafted", "accepted"];
  const [committed, rounds, drafted, accepted] = counts.map((name) => run.sum(name));
  write("acceptance", rounds ? (committed / rounds).toFixed(2) : "–");
  write("accepted", drafted ? `${accepted} of ${drafted}` : "none drafted");
  write("tokens", committed);
  write("seconds", run.seconds.toFixed(2));
  bar("mine", run.rate, run.rate);
}

/** Both speeds on one scale, and what the texts prove. */
function showComparison(run, plain, seeded) {
  const most = Math.max(run.rate, plain.rate);
  bar("mine", run.rate, most);
  bar("plain", plain.rate, most);
  write("times", plain.rate ? `${(run.rate / plain.rate).toFixed(2)}×` : "–");
  const how = "Both measured just now in this browser, prompt and network included, one run each.";
  const same = `${run.agreeing(plain)} of ${run.choices.size} samples`;
  const texts = seeded
    ? `With the same seed plain decoding wrote the same text in ${same}.`
    : "This server keeps no seeds, so plain decoding drew other samples.";
  write("gauge-note", `${how} ${texts}`);
}

function bar(id, rate, most) {
  write(id, rate ? `${rate.toFixed(0)} tok/s` : "–");
  at(`${id}-bar`).style.setProperty("--share", rate ? rate / most : 0);
}

// ── the page ───────────────────────────────────────────────────────────────────────────────────────────────────────

// The page: what happens when something is pressed.

const form = at("form");
const [run, stop, key, error] = ["run", "stop-button", "key", "error"].map(at);
const NARROW = matchMedia("(width < 56rem)");
const RERUN = "run"; // in a link: draw at once

let current = null; // the AbortController of what is running
let shown = null; // the one whose samples are on the page
let link = null; // the hash that brings these samples back, with the seed that was drawn
let context = ""; // the text that these samples go on from
let served = null; // the model and its limits, once they are known

// ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────────

async function start() {
  current?.abort();
  const mine = (current = new AbortController());
  complain(null);
  stop.disabled = false;
  form.setAttribute("aria-busy", "true");
  try {
    if (!served) await learn();
    remember();
    await sample(mine);
  } catch (failure) {
    if (current === mine && shown !== mine) wipe(); // what is there is of another request
    if (!mine.signal.aborted) complain(failure);
    else if (current === mine) say("Stopped.");
  } finally {
    if (current === mine) rest();
  }
}

function rest() {
  current = null;
  form.removeAttribute("aria-busy");
  if (document.activeElement === stop) run.focus(); // a disabled button would lose the focus
  stop.disabled = true;
}

async function sample(controller) {
  const { signal } = controller;
  const [path, body] = request(form);
  const drafts = body.speculation !== "off" && !form.elements.speculation.disabled;
  say(`Asking for ${count(body.n, "sample")}…`);
  const hash = toHash(form, body.seed);
  const mine = new Run();
  const answer = await ask(path, body, key.value, signal);
  shown = controller;
  link = hash;
  const compared = drafts && form.elements.compare.checked;
  const columns = clear(body, { drafts, compared, pair: served.shoal.speculation });
  const result = { path, body, run: mine, columns, drafts };
  const draw = () => {
    if (shown !== controller) return; // a later run has the page
    columns.draw();
    showFigures(mine);
  };
  const redraw = framed(draw);
  try {
    await mine.follow(answer, (choice, tokens) => { columns.add(choice, tokens); redraw(); }, (usage) => columns.end(usage));
  } finally {
    draw();
    if (shown === controller) present(result); // also what was stopped, or broke off
  }
  const done = summary(mine, drafts);
  say(done);
  if (compared) await compare(result, done, signal);
}

/** Offers what can be done with the samples that are shown; null: there are none. */
function present(result) {
  at("tools").hidden = !result;
  offer(result);
  offerToShare(result);
}

/** Makes room for the samples of a request that the server has taken. */
function clear(body, how) {
  at("empty").hidden = true;
  present(null);
  reset(body.seed, how);
  context = body.prompt ?? "";
  const columns = new Samples(at("samples"), body.n, how.drafts ? new Drafters(at("drafters")) : null);
  say(`Drawing ${count(body.n, "sample")}…`);
  if (NARROW.matches) at("results").scrollIntoView();
  return columns;
}

/** The page as it was before the first run. */
function wipe() {
  link = null;
  present(null);
  at("samples").replaceChildren();
  at("figures").hidden = true;
  welcome();
}

/** What a page without samples says: of drafts only where there is a drafter. */
function welcome() {
  at("results").classList.toggle("undrafted", served?.shoal.speculation === false);
  at("empty").hidden = false;
}

/** Asks for the same once more without drafts, out of sight. */
async function compare(result, done, signal) {
  const { run: mine, path, body } = result;
  say(`${done} Now decoding plainly, to compare…`);
  showPlain("is being");
  const plain = new Run();
  try {
    await plain.follow(await ask(path, { ...body, speculation: "off" }, key.value, signal));
  } catch (failure) {
    if (shown?.signal === signal) showPlain("has not been");
    throw failure;
  }
  showComparison(mine, plain, body.seed !== undefined);
  if (shown?.signal === signal) present({ ...result, plain });
  say(`${done} ${at("times").textContent} the speed of plain decoding.`);
}

const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

function summary(mine, drafts) {
  const length = (mine.sum("committed") / Math.max(mine.sum("rounds"), 1)).toFixed(2);
  const samples = count(mine.choices.size, "sample");
  const tokens = count(mine.sum("committed"), "token");
  return `${samples}, ${tokens} in ${mine.seconds.toFixed(2)} s${drafts ? `, acceptance length ${length}` : ""}.`;
}

// ── saying ──────────────────────────────────────────────────────────────────────────────────────────────────────────

function say(text) {
  at("status").textContent = text;
}

/** Shows an error, at the field that caused it if one did; null takes the last one away. */
function complain(failure) {
  for (const field of form.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  error.hidden = failure === null;
  error.textContent = failure === null ? "" : reason(failure);
  if (failure === null) return;
  say("");
  if (failure.status === 401) at("key-field").hidden = false;
  const field = failure.status === 401 ? key : control(form, failure.param);
  field?.setAttribute("aria-invalid", "true");
  reveal(field);
  field?.focus();
}

/** A field that is folded away can neither be focused nor corrected. */
function reveal(field) {
  field?.closest("details")?.setAttribute("open", "");
}

function reason(failure) {
  return failure instanceof ApiError ? failure.message : `The server cannot be reached (${failure.message}).`;
}

/** An answer to a message has its code in fences, and may be in any language; what goes on from a text is as the text. */
function colourAsSent() {
  at("colours").value = form.elements.chat.checked ? "fenced" : "python";
}

/** What the samples are coloured as: what a grammar makes JSON is JSON. */
function language() {
  const json = ["json_object", "json_schema"].includes(form.elements.kind.value);
  return at("colours").value && json ? "json" : at("colours").value;
}

// ── what the server is, what the link says ──────────────────────────────────────────────────────────────────────────

async function learn() {
  const model = await servedModel(key.value);
  allow(form, model);
  offerExamples(at("examples"), form, model.shoal.chat);
  colourAsSent();
  at("model").textContent = model.id;
  at("pair").textContent = at("pair").title = about(model.shoal, model.id);
  at("editor").hidden = !model.shoal.fill_in_middle;
  document.title = `${model.id} · shoal playground`;
  served = model;
  if (!at("empty").hidden) welcome();
}

function remember() {
  const hash = toHash(form);
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname);
}

/** A link to the samples that are shown, which draws them again when it is opened; without samples, to the form. */
function linkToThis() {
  const made = new URL(location.href);
  made.hash = link === null ? toHash(form) : [link, RERUN].filter(Boolean).join("&");
  return made.href;
}

/** Draws what a copied link asks for, once: `remember` takes the word out of the address before anything runs. */
function rerun() {
  if (!new URLSearchParams(location.hash.slice(1)).has(RERUN)) return;
  remember();
  form.requestSubmit();
}

// ── wiring ──────────────────────────────────────────────────────────────────────────────────────────────────────────

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
form.addEventListener("input", () => adapt(form));
form.elements.chat.addEventListener("change", colourAsSent);
form.addEventListener("change", remember);
form.addEventListener("invalid", (event) => reveal(event.target), true);
stop.addEventListener("click", () => current?.abort());
addEventListener("hashchange", () => {
  fromHash(form, location.hash);
  colourAsSent();
  rerun();
});
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  if (event.key === "Escape") current?.abort();
});

key.value = sessionStorage.getItem("shoal-key") ?? "";
key.addEventListener("input", () => sessionStorage.setItem("shoal-key", key.value));
at("show-rejected").addEventListener("change", ({ target }) => at("samples").classList.toggle("unmarked", !target.checked));
offerThemes(at("theme"));
copies(at("link"), linkToThis, "The link");
share({
  server: () => ({ model: served, keyed: key.value !== "" }),
  look: () => ({ marked: at("show-rejected").checked && !at("results").classList.contains("undrafted"), coloured: (text) => coloursOf(text, language(), context) }),
});
addEventListener("told", ({ detail }) => say(detail));

inspect(at("samples"));
const repaint = paintSamples(at("samples"), () => [language(), context]);
at("colours").addEventListener("change", repaint);

offerLengths(form.elements.speculation, 16);
offerExamples(at("examples"), form, false);
fromHash(form, location.hash);
learn().then(rerun, complain);
