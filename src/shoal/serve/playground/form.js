// The form of the page at /: its fields, the link that brings them back, the request they make, and examples for a first run.

// ── fields, link and request ───────────────────────────────────────────────────────────────────────────────────────

// The form: its fields, the link that brings them back, and the request they make.

const OWN = ["chat", "compare", "kind", "grammar"]; // fields of this page, not of the API
const PLACES = { response_format: "grammar", messages: "prompt", max_completion_tokens: "max_tokens", top_logprobs: "logprobs" }; // where a field is asked for
const EXAMPLES = {
  json_schema: '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
  regex: "[a-z]+(, [a-z]+)*",
  lark: 'start: word ("," word)*\nword: /[a-z]+/',
};
const MESSAGE = "Explain to a child why the sky is blue, in three sentences.";
const TEXTS = ["prompt", "suffix"];
const TASK = [...TEXTS, "chat", "stop", "kind", "grammar"]; // fields that say what is to be written

let given = new URLSearchParams(); // what the link names

const value = (field) => (field.type === "checkbox" ? String(field.checked) : field.value);

function preset(field) {
  if (field.type === "checkbox") return String(field.defaultChecked);
  return field.tagName === "SELECT" ? field.options[0].value : field.defaultValue;
}

function put(field, text) {
  if (field.type === "checkbox") field.checked = text === "true";
  else field.value = text;
  if (field.selectedIndex === -1) field.selectedIndex = 0; // a link may ask for what there is not
}

const named = (form) => [...form.elements].filter((field) => field.name);
const offered = (form) => named(form).filter((field) => !field.disabled);

/** Whatever differs from what a fresh page has, as a URL's hash; a text also with whether it is a message, whatever the model that the
 *  link is opened on. `drawn`: the seed that stands for an empty one, if one does. */
export function toHash(form, drawn) {
  const { chat, prompt } = form.elements;
  const differs = (field) => value(field) !== preset(field);
  const changed = named(form).filter((field) => differs(field) || (field === chat && chat.defaultChecked && differs(prompt)));
  const parameters = new URLSearchParams(changed.map((field) => [field.name, value(field)]));
  if (drawn !== undefined && !parameters.has("seed")) parameters.set("seed", drawn);
  return parameters.toString();
}

/** The inverse: fields that the hash does not name get what a fresh page has. A text without `chat` is no message. */
export function fromHash(form, hash) {
  given = new URLSearchParams(hash.replace(/^#/, ""));
  if (given.has("prompt") && !given.has("chat")) given.set("chat", "false");
  for (const field of named(form)) put(field, given.get(field.name) ?? preset(field));
  adapt(form);
}

/** Puts a task into the form: its fields that are not given get what a fresh page has; numbers and switches stay. */
function fill(form, given) {
  for (const name of TASK) put(form.elements[name], given[name] ?? preset(form.elements[name]));
  adapt(form);
}

/** Asks for a grammar's text where it needs one, and for JSON where that must be JSON. */
export function adapt(form) {
  const { kind, grammar } = form.elements;
  show(grammar, kind.value in EXAMPLES);
  grammar.placeholder = EXAMPLES[kind.value] ?? "";
  grammar.setCustomValidity(kind.value === "json_schema" ? mistake(grammar.value) : "");
}

function mistake(json) {
  try {
    JSON.parse(json || "0");
    return "";
  } catch (error) {
    return `This is no JSON: ${error.message}`;
  }
}

/** The control that asks for a field of the API, or for a part of one; undefined if none does. */
export function control(form, param) {
  const name = param?.split(".")[0];
  return form.elements[PLACES[name] ?? name];
}

/** Makes what a fresh page has fit a model: one with a chat template gets a message. What was written or linked to stays. */
function greet({ chat, prompt }) {
  const fresh = [[chat, () => { chat.defaultChecked = true; }], [prompt, () => { prompt.defaultValue = MESSAGE; }]];
  for (const [field, change] of fresh) {
    const untouched = value(field) === preset(field) && !given.has(field.name);
    change();
    if (untouched) put(field, preset(field));
  }
}

/** Shows what a model allows, and takes away what it does not. */
export function allow(form, { shoal: about }) {
  const { n, max_tokens, seed, speculation, compare, chat, suffix } = form.elements;
  n.max = about.max_n;
  max_tokens.max = about.max_tokens;
  if (about.chat) greet(form.elements);
  show(seed, about.seeds);
  for (const field of [speculation, compare]) show(field, about.speculation);
  show(chat, about.chat);
  show(suffix, about.fill_in_middle);
}

function show(field, offers) {
  field.disabled = !offers;
  field.parentElement.hidden = !offers;
}

/** Draft lengths to choose from, up to the longest. */
export function offerLengths(select, longest) {
  for (let k = 1; k <= longest; k++) select.add(new Option(`at most ${k}`, String(k)));
}

/** What to ask, and on which path. A seed is drawn here if none is given: then plain decoding can be asked for the same. */
export function request(form) {
  const fields = Object.fromEntries(offered(form).map((field) => [field.name, field]));
  const body = { stream: true, stream_options: { include_usage: true }, shoal: { rounds: true } };
  for (const [name, field] of Object.entries(fields)) {
    const text = field.value;
    if (OWN.includes(name) || text === "") continue;
    body[name] = TEXTS.includes(name) ? text : field.type === "number" ? Number(text) : choice(name, text);
  }
  Object.assign(body, constrained(form.elements));
  if (fields.seed) body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  return fields.chat?.checked ? conversation(body) : ["v1/completions", body];
}

function constrained({ kind: { value: type }, grammar: { value: text } }) {
  if (type === "json_object") return { response_format: { type } };
  if (type === "json_schema") return { response_format: { type, json_schema: { name: "playground", schema: JSON.parse(text) } } };
  return type ? { grammar: { type, text } } : {};
}

function choice(name, text) {
  if (name === "stop") return stops(text);
  return /^\d+$/.test(text) ? Number(text) : text;
}

/** Stop strings, one a line, with their escapes. */
export function stops(text) {
  const escapes = { n: "\n", t: "\t", "\\": "\\" };
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([nt\\])/g, (_, escaped) => escapes[escaped]));
}

function conversation({ prompt, suffix: _, logprobs, ...body }) {
  if (logprobs !== undefined) Object.assign(body, { logprobs: true, top_logprobs: logprobs });
  return ["v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }] }];
}

// ── examples ───────────────────────────────────────────────────────────────────────────────────────────────────────

// Examples for a first run by one click: messages for a model with a chat template, else functions to go on with.

const definition = (head, says, call, result) => `def ${head}:\n    """${says}\n\n    >>> ${call}\n    ${result}\n    """\n`;

const FUNCTIONS = {
  "Count vowels": {
    prompt: definition("count_vowels(text)", "Return how many vowels text has.", 'count_vowels("banana")', "3"),
  },
  "Longest word": {
    prompt: definition("longest_word(words)", "Return the longest of words.", 'longest_word(["a", "abc", "ab"])', "'abc'"),
  },
  "Largest even": {
    prompt: definition("largest_even(numbers)", "Return the largest even number of numbers, or None.", "largest_even([3, 8, 5, 2])", "8"),
  },
  "One line, by a regex": {
    prompt: definition("sum_of_squares(values)", "Return the sum of the squares of values.", "sum_of_squares([1, 2, 3])", "14"),
    kind: "regex",
    grammar: "    return [^\\n]+\\n",
  },
};

const RECIPE = {
  type: "object", required: ["dish", "ingredients"], additionalProperties: false,
  properties: { dish: { type: "string" }, ingredients: { type: "array", items: { type: "string" }, maxItems: 8 } },
};

const MESSAGES = {
  "A short story": { prompt: "Tell a story about a lighthouse keeper and a whale, in five sentences." },
  "A function": { prompt: "Write a Python function that counts the vowels of a text." },
  "JSON, by a schema": {
    prompt: "Name a dish and its ingredients, as JSON.", kind: "json_schema", grammar: JSON.stringify(RECIPE, null, 1),
  },
  "One word, by a regex": {
    prompt: "Is a tomato a fruit or a vegetable? Answer with one word.", kind: "regex", grammar: "fruit|vegetable|neither",
  },
};

/** Offers examples in a container; a click puts one into the form and runs it. `chat`: whether the model has a chat template. */
export function offerExamples(container, form, chat) {
  for (const button of container.querySelectorAll("button")) button.remove();
  for (const [name, fields] of Object.entries(chat ? MESSAGES : FUNCTIONS)) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => {
      fill(form, fields);
      form.requestSubmit();
    });
    container.append(button);
  }
}
