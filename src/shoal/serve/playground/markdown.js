// Markdown as elements: marked reads it, and each of its tokens becomes an element or text here. HTML stays text, and only links of
// some schemes are links, so nothing a model writes can become markup or a script.

import { lexer } from "./vendor/marked.esm.js";
import { copyButton } from "./page.js";
import { paint } from "./syntax.js";

const SCHEMES = ["http:", "https:", "mailto:"];
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** The elements of one text, which may grow: blocks that are as they were keep their elements, and with them selections and colours. */
export class Markdown {
  constructor(container) {
    this.container = container;
    this.blocks = []; // { raw, node }
    this.definitions = 0;
  }

  update(text) {
    const tokens = tokensOf(text);
    const definitions = Object.keys(tokens.links).length;
    const same = this.definitions === definitions ? this.unchanged(tokens) : 0; // a definition may make links anywhere
    for (const { node } of this.blocks.splice(same)) node?.remove();
    for (const token of tokens.slice(same)) {
      const node = block(token);
      if (node) this.container.append(node);
      this.blocks.push({ raw: token.raw, node });
    }
    this.definitions = definitions;
  }

  /** How many of the first blocks are those of before. */
  unchanged(tokens) {
    const different = this.blocks.findIndex(({ raw }, index) => raw !== tokens[index]?.raw);
    return different === -1 ? this.blocks.length : different;
  }
}

/** marked recurses: a text that nests too deeply for it is shown as it is. */
function tokensOf(text) {
  try {
    return lexer(text, { gfm: true, breaks: true }); // a line break of the model's is one
  } catch {
    return Object.assign([{ type: "html", raw: text }], { links: {} });
  }
}

function element(name, ...content) {
  const made = document.createElement(name);
  made.append(...content);
  return made;
}

// ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

const BLOCKS = {
  paragraph: (token) => element("p", ...inlines(token.tokens)),
  heading: (token) => element(`h${Math.min(token.depth + 2, 6)}`, ...inlines(token.tokens)), // the page has h1 and h2
  blockquote: (token) => element("blockquote", ...blocks(token.tokens)),
  list,
  table,
  code,
  hr: () => element("hr"),
  html: (token) => element("p", token.raw.trimEnd()),
  space: () => null,
  def: () => null,
};

const blocks = (tokens) => tokens.map(block).filter(Boolean);

/** The element of a block; null for what shows nothing. What stands in tight items of lists is no block of its own. */
function block(token) {
  if (token.type in BLOCKS) return BLOCKS[token.type](token);
  return element("span", ...inlines(token.tokens ?? [token]));
}

function list({ ordered, start, items }) {
  const made = element(ordered ? "ol" : "ul", ...items.map((item) => element("li", ...blocks(item.tokens))));
  if (ordered && start !== 1) made.start = start;
  return made;
}

function table({ header, rows }) {
  const row = (cells, name) => element("tr", ...cells.map((cell) => aligned(element(name, ...inlines(cell.tokens)), cell.align)));
  const made = element("table", element("thead", row(header, "th")), element("tbody", ...rows.map((cells) => row(cells, "td"))));
  const scrolled = element("div", made);
  scrolled.className = "scrolled";
  return scrolled;
}

function aligned(cell, align) {
  if (align) cell.style.textAlign = align;
  return cell;
}

function code({ text, lang }) {
  const written = element("code", text);
  const language = lang?.match(/^[\w+#.-]*/)[0].toLowerCase() ?? "";
  paint(written, language);
  const head = element("figcaption", element("span", language));
  head.append(copyButton(() => text, "The code"));
  const scrolled = element("pre", written);
  scrolled.tabIndex = 0; // long lines scroll by keys too
  const made = element("figure", head, scrolled);
  made.className = "code";
  return made;
}

// ── inside of blocks ────────────────────────────────────────────────────────────────────────────────────────────────

const INLINES = {
  strong: (token) => element("strong", ...inlines(token.tokens)),
  em: (token) => element("em", ...inlines(token.tokens)),
  del: (token) => element("del", ...inlines(token.tokens)),
  codespan: (token) => element("code", token.text),
  br: () => element("br"),
  escape: (token) => token.text,
  html: (token) => token.raw,
  link: (token) => link(token, token.autolink ? [token.text] : inlines(token.tokens)),
  image: (token) => link(token, [token.text || token.href]), // the page loads nothing from elsewhere
  checkbox,
  text: (token) => (token.tokens ? element("span", ...inlines(token.tokens)) : token.escaped ? token.text : resolved(token.text)),
};

const inlines = (tokens) => tokens.map((token) => (INLINES[token.type] ?? (({ raw }) => raw))(token));

/** A link, or its text as it was written where its scheme is none of those that are safe. */
function link({ href, title, raw }, content) {
  if (!URL.canParse(href) || !SCHEMES.includes(new URL(href).protocol)) return raw;
  const made = element("a", ...content);
  Object.assign(made, { href, rel: "noopener noreferrer", target: "_blank", title: title ?? "" });
  return made;
}

function checkbox({ checked }) {
  const made = element("input");
  Object.assign(made, { type: "checkbox", checked, disabled: true });
  return made;
}

/** Character references as the characters they stand for; without a parser of HTML, so only the common names. */
function resolved(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w+));/g, (whole, decimal, hexadecimal, name) => {
    if (name) return NAMED[name] ?? whole;
    const code = decimal ? Number(decimal) : parseInt(hexadecimal, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}
