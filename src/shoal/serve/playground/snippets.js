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
export function asCurl({ origin, path, body, model, keyed }) {
  const parts = [`curl ${quoted(origin + path)}`, "-H 'content-type: application/json'"];
  if (keyed) parts.push('-H "authorization: Bearer $OPENAI_API_KEY"');
  parts.push(`-d ${quoted(JSON.stringify(plainBody(model, body), null, 2))}`);
  return `${parts.join(" \\\n  ")}\n`;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A program of Python with the package openai. `request`: as for asCurl. */
export function asPython({ origin, path, body, model, keyed }) {
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
