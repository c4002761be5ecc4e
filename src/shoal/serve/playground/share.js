// What can be taken along of the run that is shown: its request as commands of other clients, and its result as files.

import { copies, save } from "./page.js";
import { picture } from "./picture.js";

const at = (id) => document.getElementById(id);

// ── commands ───────────────────────────────────────────────────────────────────────────────────────────────────────

// A request of this page as commands of other clients: curl in a shell, and OpenAI's package in Python.

const OURS = ["stream", "stream_options", "shoal"]; // what only this page wants of an answer
const KNOWN = [
  "model", "prompt", "suffix", "messages", "n", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs", "top_logprobs",
]; // arguments of openai's functions; what else a body has goes into extra_body

/** The body that draws the same samples in one answer. */
function plainBody(model, body) {
  const rest = Object.entries(body).filter(([name]) => !OURS.includes(name));
  return { model, ...Object.fromEntries(rest) };
}

/** A command for a POSIX shell. `request`: `origin` (a URL that ends in "/"), `path`, `body`, `model`, and `keyed`: whether the server
 *  wants a key, which the command takes from the environment. */
function asCurl({ origin, path, body, model, keyed }) {
  const parts = [`curl ${quoted(origin + path)}`, "-H 'content-type: application/json'"];
  if (keyed) parts.push('-H "authorization: Bearer $OPENAI_API_KEY"');
  parts.push(`-d ${quoted(JSON.stringify(plainBody(model, body), null, 2))}`);
  return `${parts.join(" \\\n  ")}\n`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A program of Python with the package openai. `request`: as for asCurl. */
function asPython({ origin, path, body, model, keyed }) {
  const chat = "messages" in body;
  const fields = Object.entries(plainBody(model, body));
  const own = fields.filter(([name]) => KNOWN.includes(name));
  const extra = fields.filter(([name]) => !KNOWN.includes(name));
  const given = extra.length ? [...own, ["extra_body", Object.fromEntries(extra)]] : own;
  const address = `base_url=${literal(`${origin}v1`)}`;
  return [
    "from openai import OpenAI",
    "",
    keyed ? `client = OpenAI(${address})  # the key is that of OPENAI_API_KEY` : `client = OpenAI(${address}, api_key="none")`,
    `completion = client.${chat ? "chat." : ""}completions.create(`,
    ...given.map(([name, value]) => `    ${name}=${literal(value, "    ")},`),
    ")",
    "for choice in completion.choices:",
    '    print(f"# sample {choice.index + 1}")',
    `    print(choice.${chat ? "message.content" : "text"})`,
    "",
  ].join("\n");
}

/** A value of JSON as Python writes it. `indent`: of the line that it stands on. */
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return text(value, indent);
  if (Array.isArray(value)) return `[${value.map((one) => literal(one, indent)).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  const members = Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, indent)}`);
  return `{${members.join(", ")}}`;
}

/** Python reads JSON's strings as they are; those of several lines are shown line by line. */
function text(value, indent) {
  const lines = value.split(/(?<=\n)/);
  if (lines.length < 2) return JSON.stringify(value);
  return ["(", ...lines.map((line) => `${indent}    ${JSON.stringify(line)}`), `${indent})`].join("\n");
}

// ── the record ─────────────────────────────────────────────────────────────────────────────────────────────────────

// A run as one JSON object: what was asked, what came, round by round, and of which models.

const FIGURES = ["mean_logprob", "committed", "drafted", "accepted", "rounds"];

/** `result`: a run that is shown, with its `path`, `body`, `run`, `columns`, and `plain`, the run without drafts, if there was one;
 *  `model`: as the server describes it. Log-probabilities are natural, of the target's own distribution. */
function record({ path, body, run, columns, plain }, model) {
  const { names = null, loaded = null } = model.shoal;
  return {
    format: "shoal playground run",
    version: 1,
    saved: new Date().toISOString(),
    page: new URL(".", location.href).href,
    model: { id: model.id, names, loaded },
    request: { path, body },
    samples: columns.all.map((column, index) => sample(run, index, column.place)),
    usage: run.usage,
    ...speed(run),
    plain: plain ? { ...speed(plain), same_texts: run.agreeing(plain) } : null,
  };
}

function sample(run, index, rank) {
  const { text = "", tokens = [], by_round = [], ...rest } = run.choices.get(index) ?? {};
  const { ended_by = null, error = null } = run.usage?.choices.find((took) => took.index === index) ?? {};
  const figures = FIGURES.map((name) => [name, rest[name] ?? null]);
  return { index, rank, text, ended_by, error, ...Object.fromEntries(figures), tokens, by_round };
}

/** By the clock of this browser, prompt and network included. */
const speed = (run) => ({ seconds: run.seconds, tokens_per_second: run.rate });

// ── what is offered ────────────────────────────────────────────────────────────────────────────────────────────────

// What can be taken along of the run that is shown: its request as a command of other clients, and its result as files.

let shown = null; // { path, body, run, columns, plain }

/** Offers the run that is shown; null: there is none. */
export function offerToShare(result) {
  shown = result;
}

/** Makes the buttons work. `server()`: the `model`, as the server describes it, and whether it is `keyed`; `look()`: as `picture` wants it. */
export function share({ server, look }) {
  const request = () => {
    const { model, keyed } = server();
    return { ...shown, model: model.id, keyed, origin: new URL(".", location.href).href };
  };
  copies(at("copy-curl"), () => asCurl(request()), "The command");
  copies(at("copy-python"), () => asPython(request()), "The program");
  at("save-json").addEventListener("click", () => {
    const { model } = server();
    save(new Blob([`${JSON.stringify(record(shown, model), null, 1)}\n`], { type: "application/json" }), name(model, "json"));
  });
  at("save-image").addEventListener("click", () => {
    const { model } = server();
    const called = name(model, "png");
    picture(record(shown, model), look()).toBlob((blob) => save(blob, called), "image/png");
  });
}

function name({ id }, ending) {
  const { seed } = shown.body;
  return `shoal-${id.replace(/[^\w.-]+/g, "-")}${seed === undefined ? "" : `-seed${seed}`}.${ending}`;
}
