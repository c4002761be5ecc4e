// Colours of code, across the tokens of a sample: ranges of the CSS Custom Highlight API. Nothing in the page's elements changes, so
// tints, selections and log-probabilities stay. Browsers without the API, or a library that does not load, leave code uncoloured.

import { framed } from "./page.js";

const SUBSET = ["python", "javascript", "typescript", "java", "c", "cpp", "go", "rust", "bash", "json", "sql", "css", "xml"];
const COLOURS = {
  keyword: "keyword", literal: "keyword", "selector-tag": "keyword", name: "keyword", tag: "keyword",
  string: "string", regexp: "string", link: "string", symbol: "string", addition: "string",
  comment: "comment", quote: "comment", doctag: "comment", deletion: "comment",
  number: "number", meta: "number", bullet: "number",
  title: "title", section: "title", attr: "title", attribute: "title", property: "title",
  built_in: "type", type: "type", variable: "type", "template-variable": "type",
}; // of highlight.js's classes; the style sheet has one ::highlight() of each colour
const FENCED = "fenced"; // of a text: code stands between fences, and says of which language it is
const FENCES = /^ {0,3}(`{3,}|~{3,}) *([\w+#.-]*)[^\n`]*\n([^]*?)(?:^ {0,3}\1|$(?![^]))/dgm;
const MILLISECONDS = 8; // of a frame that colouring may take; what is left waits for a later one

const supported = typeof CSS !== "undefined" && "highlights" in CSS;
const painted = new Map(); // element -> its ranges, by colour
const waiting = new Map(); // element -> what to colour it by
const schedule = framed(work);
let library = null;

/** Colours the text of an element, once there is time. `language`: highlight.js's name, "auto", "fenced", or "" for none; `before`: text that comes
 *  before it without being in it; the rest of what is called twice is done once. */
export function paint(element, language, before = "") {
  if (!supported || !element) return;
  waiting.set(element, { language, before });
  schedule();
}

/** Whether highlight.js has a language of this name, once it is loaded. */
const known = (language) => Boolean(library?.getLanguage(language));

async function work() {
  try {
    library ??= (await import("./vendor/highlight.min.js")).default;
  } catch {
    waiting.clear();
  }
  const begun = performance.now();
  for (const [element, how] of waiting) {
    waiting.delete(element);
    clear(element);
    if (element.isConnected && how.language) colour(element, how);
    if (performance.now() - begun > MILLISECONDS) break;
  }
  for (const element of painted.keys()) if (!element.isConnected) clear(element);
  if (waiting.size) schedule();
}

function clear(element) {
  for (const [name, range] of painted.get(element) ?? []) CSS.highlights.get(name)?.delete(range);
  painted.delete(element);
}

function colour(element, { language, before }) {
  const ranges = [];
  const nodes = textNodes(element);
  let from = 0; // the node that the next place begins in, or one before it: places come in order
  for (const { name, start, end } of coloursOf(element.textContent, language, before)) {
    while (from < nodes.length && nodes[from].end <= start) from += 1;
    const range = rangeOf(nodes, from, start, end);
    if (!range) break;
    if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
    CSS.highlights.get(name).add(range);
    ranges.push([name, range]);
  }
  painted.set(element, ranges);
}

/** Where a text has which colour, as { name, start, end } in order; nowhere before the library is loaded. As for `paint`. */
export function coloursOf(text, language, before = "") {
  if (!library || !language) return [];
  if (language === FENCED) return [...text.matchAll(FENCES)].flatMap(inFences);
  const from = before.length;
  const places = spans(highlighted(before + text, language)).filter(({ end }) => end > from);
  return places.map(({ name, start, end }) => ({ name, start: Math.max(start - from, 0), end: end - from }));
}

function inFences({ 2: language, 3: code, indices }) {
  const [from] = indices[3];
  return coloursOf(code, language.toLowerCase() || "auto").map(({ name, start, end }) => ({ name, start: start + from, end: end + from }));
}

/** highlight.js's answer: text in which &, < and the like are escaped, and span elements. */
function highlighted(code, language) {
  if (language === "auto") return library.highlightAuto(code, SUBSET).value;
  return library.getLanguage(language) ? library.highlight(code, { language, ignoreIllegals: true }).value : "";
}

/** Where which colour stands in the text; the innermost span that has one counts. */
function spans(markup) {
  const open = [null];
  const found = [];
  let at = 0;
  for (const [part, classes] of markup.matchAll(/<span class="([^"]*)">|<\/span>|&[^;]+;|[^<&]+/g)) {
    if (classes !== undefined) open.push(colourOf(classes, open.at(-1)));
    else if (part === "</span>") open.pop();
    else {
      const end = at + (part[0] === "&" ? 1 : part.length);
      const name = open.at(-1);
      const last = found.at(-1);
      if (name && last?.name === name && last.end === at) last.end = end;
      else if (name) found.push({ name, start: at, end });
      at = end;
    }
  }
  return found;
}

function colourOf(classes, outer) {
  const [first, ...more] = classes.split(" ").map((name) => name.replace(/^hljs-/, ""));
  if (first === "subst" || first === "params") return null; // code again, inside a string
  if (more.includes("class_")) return "code-type";
  return first in COLOURS ? `code-${COLOURS[first]}` : outer;
}

function textNodes(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let start = 0; walker.nextNode(); start = found.at(-1).end) {
    found.push({ node: walker.currentNode, start, end: start + walker.currentNode.length });
  }
  return found;
}

/** The range from `start`, which is in the node at `from`, to `end`. */
function rangeOf(nodes, from, start, end) {
  let to = from;
  while (to < nodes.length && nodes[to].end < end) to += 1;
  const [first, last] = [nodes[from], nodes[to]];
  if (!first || !last) return null;
  const ends = { startContainer: first.node, startOffset: start - first.start, endContainer: last.node, endOffset: end - last.start };
  return new StaticRange(ends);
}

/** Colours the samples in a container whenever they change. `how`: gives language and text before, as `paint` takes them. */
export function paintSamples(container, how) {
  const all = () => container.querySelectorAll(".text");
  const repaint = (elements) => {
    const [language, before] = how();
    for (const element of elements) paint(element, language, before);
  };
  new MutationObserver((changes) => {
    const changed = changes.map(({ target }) => (target.nodeType === Node.TEXT_NODE ? target.parentElement : target));
    repaint(new Set(changed.map((node) => node?.closest(".text")).filter(Boolean)));
  }).observe(container, { childList: true, characterData: true, subtree: true });
  return () => repaint(all());
}
