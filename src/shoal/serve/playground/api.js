// The server from a browser: what it allows, a request's answer as it comes, and its words for people.

// ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

// The API from a browser: what a server allows, and a request's answer as it comes.

/** A request that was refused, or that broke off. `param` names the field at fault, if one is. */
export class ApiError extends Error {
  constructor(status, { message, param }) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

const headers = (key) => ({ "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) });

/** The served model: its `id`, and what it allows. */
export async function servedModel(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data[0];
}

/** Asks, and returns the events of the answer once the server has taken the request. Aborting `signal` closes the
 *  connection, and the server drops its rows. */
export async function ask(path, body, key, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  return events(response);
}

async function* events(response) {
  for await (const data of messages(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(response.status, event.error);
    yield event;
  }
  throw new ApiError(response.status, { message: "the answer broke off before its end" });
}

async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const whole = (rest + part.value).split("\n\n");
    rest = whole.pop();
    for (const message of whole) if (!message.startsWith(":")) yield message.replace(/^data: /, ""); // a comment keeps the connection alive
  }
}

async function refusal(response) {
  const answer = await response.json().catch(() => null);
  return new ApiError(response.status, answer?.error ?? { message: `${response.status} ${response.statusText}` });
}

// ── alternatives of tokens ─────────────────────────────────────────────────────────────────────────────────────────

// The alternatives of tokens, as both APIs tell them.

/** The tokens of a chunk's choice; those that came with alternatives have them in `top`, as [text, log-probability], best first. */
function withAlternatives({ shoal: { tokens = [] } = {}, logprobs }) {
  const lists = logprobs?.content?.map(({ top_logprobs: top }) => top.map(({ token, logprob }) => [token, logprob]))
    ?? logprobs?.top_logprobs?.map((top) => Object.entries(top ?? {})) ?? [];
  return tokens.map((token, place) => (lists[place]?.length ? { ...token, top: lists[place].sort((a, b) => b[1] - a[1]) } : token));
}

// ── one answer as it comes ─────────────────────────────────────────────────────────────────────────────────────────

// One answer as it comes: its texts, its counts, and the time it took in this browser.

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

// ── in words ───────────────────────────────────────────────────────────────────────────────────────────────────────

// What the server says of its models, in words for people.

/** Names, number format and device: `names` and `loaded` of a served model. Its `id` stands beside them, and is not said again. */
export function about({ names, loaded }, id) {
  if (!names) return "";
  const { target, draft } = loaded ?? {};
  const drafter = names.drafter ? `drafter: ${names.drafter}${numbers(draft, target)}` : "no drafter";
  const own = names.target === id ? numbers(target).slice(2, -1) : `target: ${names.target}${numbers(target)}`;
  return [own, drafter].filter(Boolean).join(" · ");
}

/** Of the target, and of a drafter only where it has others. */
function numbers(model, other) {
  if (!model?.dtype) return "";
  const told = ({ dtype, device, quantize }) => `${dtype}${quantize && quantize !== "off" ? ` ${quantize}` : ""} on ${device}`;
  return other && told(other) === told(model) ? "" : ` (${told(model)})`;
}

const ENDINGS = {
  eos: "stopped by itself", stop: "stopped at a stop string", length: "reached the limit of tokens", time: "ran out of time",
};

/** How a text ended: `ended_by` of the API in words that people know. */
export const ending = (reason) => ENDINGS[reason] ?? reason;

/** Makes a list of themes work; what is chosen is kept in this browser, for all pages. */
export function offerThemes(list) {
  const dress = (choice) => {
    list.value = choice;
    document.documentElement.dataset.theme = choice;
  };
  list.addEventListener("change", () => {
    localStorage.setItem("shoal-theme", list.value);
    dress(list.value);
  });
  dress(localStorage.getItem("shoal-theme") ?? "");
}
