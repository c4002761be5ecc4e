// A run as a picture: prompt, figures, and the samples as they are on the page, drawn on a canvas.

import { ending } from "./api.js";

// ── characters and lines ───────────────────────────────────────────────────────────────────────────────────────────

// Text for a picture: which character stands on which line.

const graphemes = Intl.Segmenter && new Intl.Segmenter(undefined, { granularity: "grapheme" });
const BREAKS = ["\n", "\r\n"];
const split = (text) => (graphemes ? [...graphemes.segment(text)].map(({ segment }) => segment) : [...text]);

/** The characters of pieces (`text`, `rejected`, and what else the one who draws wants to know), as cells { char, piece, first, colour }.
 *  `places`: colours of the text that pieces which are not rejected make together. */
function cells(pieces, places = []) {
  const found = [];
  let at = 0;
  let next = 0;
  for (const piece of pieces) {
    let first = true; // of those that are drawn
    for (const char of split(piece.text)) {
      while (next < places.length && places[next].end <= at) next += 1;
      const colour = !piece.rejected && places[next]?.start <= at ? places[next].name : null;
      found.push({ char, piece, first: first && !BREAKS.includes(char), colour });
      first &&= BREAKS.includes(char);
      if (!piece.rejected) at += char.length;
    }
  }
  return found;
}

/** Lines of at most `width`, broken behind blanks if there are any, as lists of cells that have their `width`. */
function lines(all, width, measure) {
  const found = [[]];
  let used = 0;
  for (const cell of all) {
    if (BREAKS.includes(cell.char)) {
      found.push([]);
      used = 0;
      continue;
    }
    const char = cell.char === "\t" ? "    " : cell.char;
    const own = measure(char);
    if (used + own > width && used) {
      const kept = found.at(-1);
      const moved = kept.splice(wordBegin(kept));
      found.push(moved);
      used = moved.reduce((sum, one) => sum + one.width, 0);
    }
    found.at(-1).push({ ...cell, char, width: own });
    used += own;
  }
  return found;
}

/** Behind the last blank of a full line; its end if it has none, or begins with the word. */
function wordBegin(line) {
  const blank = line.findLastIndex(({ char }) => char.trim() === "");
  return blank < 0 ? line.length : blank + 1;
}

// ── the pen ────────────────────────────────────────────────────────────────────────────────────────────────────────

// The pen of a picture: it draws boxes, words and lines of tokens, in the colours and fonts of the page.

const LINE = 20; // the height of a line of code
const COLOURS = {
  ground: "--ground", surface: "--surface", ink: "--ink", quiet: "--quiet", line: "--line", accent: "--accent", onAccent: "--on-accent",
  wrong: "--wrong",
};

class Pen {
  constructor(context) {
    this.context = context;
    const probe = document.createElement("span");
    probe.className = "probe";
    document.body.append(probe);
    const made = getComputedStyle(probe);
    const colour = (name) => {
      probe.style.setProperty("color", `var(${name})`);
      return made.color;
    };
    this.fonts = { mono: made.fontFamily, sans: getComputedStyle(document.body).fontFamily };
    this.colours = Object.fromEntries(Object.entries(COLOURS).map(([name, variable]) => [name, colour(variable)]));
    this.fills = [0, 1, 2, 3].map((style) => colour(`--draft-${style}`));
    this.strokes = [0, 1, 2, 3].map((style) => colour(`--draft-line-${style}`));
    this.code = Object.fromEntries(["keyword", "string", "comment", "number", "title", "type"].map((name) => (
      [`code-${name}`, colour(`--code-${name}`)]
    )));
    probe.remove();
    this.widths = new Map();
    this.measure = (char) => this.width(char);
  }

  /** Of a character of code. */
  width(char) {
    if (!this.widths.has(char)) {
      this.context.font = `13px ${this.fonts.mono}`;
      this.widths.set(char, this.context.measureText(char).width);
    }
    return this.widths.get(char);
  }

  box(x, y, width, height, fill, stroke = null, thick = 1) {
    const { context } = this;
    context.beginPath();
    context.roundRect(x, y, width, height, stroke ? 10 : 0);
    context.fillStyle = fill;
    context.fill();
    if (!stroke) return;
    context.strokeStyle = stroke;
    context.lineWidth = thick;
    context.setLineDash([]);
    context.stroke();
  }

  /** Writes on a middle line; returns where it ends. What is wider than `width` is narrowed. */
  text(words, x, y, { size = 13, bold = false, colour = "ink", right = false, width } = {}) {
    const { context } = this;
    context.font = `${bold ? "600 " : ""}${size}px ${this.fonts.sans}`;
    context.fillStyle = this.colours[colour];
    context.textAlign = right ? "right" : "left";
    context.textBaseline = "middle";
    context.fillText(words, x, y, width);
    return x + Math.min(context.measureText(words).width, width ?? Infinity);
  }

  /** Draws a line of cells, piece by piece; returns where it ends. */
  row(row, x, y) {
    for (let first = 0; first < row.length;) {
      let end = first;
      while (end < row.length && row[end].piece === row[first].piece) end += 1;
      x = this.piece(row.slice(first, end), x, y);
      first = end;
    }
    return x;
  }

  /** The cells of one piece that stand on one line. */
  piece(part, x, y) {
    const { context } = this;
    const { style, rejected, begins } = part[0].piece;
    const width = part.reduce((sum, cell) => sum + cell.width, 0);
    if (style !== undefined) this.tint(style, x, y, width);
    context.font = `13px ${this.fonts.mono}`;
    context.textAlign = "left";
    context.textBaseline = "middle";
    let at = x;
    for (const [colour, words, own] of byColour(part)) {
      context.fillStyle = rejected ? this.colours.quiet : this.code[colour] ?? this.colours.ink;
      context.fillText(words, at, y + LINE / 2);
      at += own;
    }
    if (rejected) this.rule(x, at, y + LINE / 2 + 1, this.colours.wrong, 1.5);
    if (begins && part[0].first) this.edge(x, y);
    return at;
  }

  /** A line too, not colour alone, as on the page: solid, dashed, dotted, double. */
  tint(style, x, y, width) {
    this.context.fillStyle = this.fills[style];
    this.context.fillRect(x, y + 2, width, LINE - 4);
    const stroke = this.strokes[style];
    if (style === 3) for (const at of [1.5, 4.5]) this.rule(x, x + width, y + at, stroke, 1);
    else this.rule(x, x + width, y + 2, stroke, 2, [[], [5, 3], [2, 2]][style]);
  }

  rule(from, to, y, stroke, thick, dash = []) {
    const { context } = this;
    context.beginPath();
    context.moveTo(from, y);
    context.lineTo(to, y);
    context.strokeStyle = stroke;
    context.lineWidth = thick;
    context.setLineDash(dash);
    context.stroke();
  }

  edge(x, y) {
    this.context.fillStyle = this.colours.ink;
    this.context.fillRect(x - 1, y + 1, 2, LINE - 2);
  }
}

/** Stretches of one colour: the colour, the text, its width. */
function byColour(part) {
  const found = [];
  for (const { char, width, colour } of part) {
    const last = found.at(-1);
    if (last && last[0] === colour) [last[1], last[2]] = [last[1] + char, last[2] + width];
    else found.push([colour, char, width]);
  }
  return found;
}

// ── the picture ────────────────────────────────────────────────────────────────────────────────────────────────────

const [MARGIN, GAP, PAD] = [32, 20, 16];
const WIDTH = 1204; // pixels of a style sheet, as all lengths here
const [MOST_HEIGHT, MOST_PROMPT, MOST_LINES] = [12_000, 40, 300]; // the last two in lines
const MOST_PIXELS = 16e6; // of the canvas: phones draw no larger ones

/** Draws a run. `saved`: as `record` makes it; `look`: `marked`, whether rejected drafts and rounds are shown, and `coloured(text)`: places
 *  in a text that have a colour of code, as { name, start, end }. Returns a canvas. */
export function picture(saved, { marked, coloured }) {
  const canvas = document.createElement("canvas");
  const pen = new Pen(canvas.getContext("2d"));
  const sheet = layOut(pen, saved, marked, coloured);
  const scale = Math.min(2, Math.sqrt(MOST_PIXELS / (sheet.width * sheet.height)));
  canvas.width = Math.floor(sheet.width * scale);
  canvas.height = Math.floor(sheet.height * scale);
  pen.context.scale(scale, scale);
  pen.box(0, 0, sheet.width, sheet.height, pen.colours.ground);
  for (const draw of sheet.drawn) draw();
  return canvas;
}

// ── where things stand ──────────────────────────────────────────────────────────────────────────────────────────────

function layOut(pen, saved, marked, coloured) {
  const across = saved.samples.length === 1 ? 1 : 2;
  const inner = WIDTH - 2 * MARGIN;
  const wide = (inner - (across - 1) * GAP) / across; // of a column
  const drawn = [];
  let y = MARGIN;
  const put = (height, draw) => {
    const top = y;
    drawn.push(() => draw(top));
    y += height;
  };
  put(34, (top) => heading(pen, saved.model, top, inner));
  put(36, (top) => pen.text(summary(saved), MARGIN, top + 14, { colour: "quiet", size: 14, width: inner }));
  const prompt = fold(pen, [{ text: promptOf(saved.request.body) }], inner, [], MOST_PROMPT);
  put(prompt.length * LINE + 2 * PAD + GAP, (top) => card(pen, MARGIN, top, inner, prompt));
  const styles = stylesOf(saved);
  let left = saved.samples;
  while (left.length) {
    const row = left.slice(0, across).map((sample) => (
      { sample, rows: fold(pen, textOf(sample, styles, marked), wide, coloured(sample.text)) }
    ));
    const height = Math.max(...row.map(({ rows }) => rows.length)) * LINE + 2 * PAD + 62;
    if (left.length < saved.samples.length && y + height > MOST_HEIGHT) break;
    put(height + GAP, (top) => row.forEach(({ sample, rows }, place) => (
      column(pen, sample, rows, { x: MARGIN + place * (wide + GAP), top, width: wide, height })
    )));
    left = left.slice(across);
  }
  if (left.length) put(LINE + 8, (top) => pen.text(`and ${left.length} more samples`, MARGIN, top + 12, { colour: "quiet", size: 14 }));
  const entries = legend(saved.usage?.by_drafter ?? {}, styles, marked);
  put(Math.ceil(entries.length / 4) * (LINE + 8), (top) => entries.forEach((entry, place) => explain(pen, entry, place, top, inner / 4)));
  return { width: WIDTH, height: y + MARGIN - 16, drawn };
}

/** Lines of pieces in a box. */
function fold(pen, pieces, width, places, most = MOST_LINES) {
  const all = lines(cells(pieces, places), width - 2 * PAD, pen.measure);
  if (all.length > 1 && !all.at(-1).length) all.pop(); // behind the line break at the end
  return all.length > most ? [...all.slice(0, most), ...lines(cells([{ text: "…" }]), width, pen.measure)] : all;
}

const promptOf = ({ prompt, messages }) => prompt ?? messages.map(({ content }) => content).join("\n\n");

function summary({ samples, usage, seconds, plain, tokens_per_second: rate, request }) {
  const sum = (name) => samples.reduce((total, sample) => total + (sample[name] ?? 0), 0);
  const [committed, rounds, drafted, accepted] = ["committed", "rounds", "drafted", "accepted"].map(sum);
  return [
    `${samples.length} sample${samples.length === 1 ? "" : "s"}`, `${committed} tokens in ${seconds.toFixed(2)} s`,
    ...(rounds && drafted ? [`acceptance length ${(committed / rounds).toFixed(2)}`] : []),
    ...(drafted ? [`${accepted} of ${drafted} drafts accepted`] : []),
    ...(plain?.tokens_per_second ? [`${(rate / plain.tokens_per_second).toFixed(2)}× plain decoding`] : []),
    ...(request.body.seed === undefined ? [] : [`seed ${request.body.seed}`]), ...(usage ? [] : ["stopped"]),
  ].join("  ·  ");
}

/** Which of the four styles a drafter has: in the order in which their first tokens came, as on the page. */
function stylesOf({ samples, usage }) {
  const names = new Set();
  for (const { tokens } of samples) for (const { drafter } of tokens) if (drafter !== null) names.add(drafter);
  for (const name of Object.keys(usage?.by_drafter ?? {})) names.add(name);
  return new Map([...names].map((name, place) => [name, place % 4]));
}

/** The tokens of a sample, and the drafts that were rejected, in the order of the page. */
function textOf({ tokens, by_round: rounds }, styles, marked) {
  const pieces = tokens.map((token) => ({ text: token.text, style: styles.get(token.drafter) }));
  const before = new Map(); // place of a token -> the rejected drafts before it
  for (const { start, accepted, rejected } of marked ? rounds : []) {
    const struck = rejected.map((draft) => ({ text: draft.text.replaceAll("\n", "↵"), rejected: true }));
    const first = (accepted ? null : struck[0]) ?? pieces[start];
    if (first) first.begins = true;
    before.set(start + accepted, struck);
  }
  const last = [...before].filter(([place]) => place >= pieces.length).flatMap(([, struck]) => struck);
  return [...pieces.flatMap((piece, place) => [...(before.get(place) ?? []), piece]), ...last];
}

// ── parts of the picture ────────────────────────────────────────────────────────────────────────────────────────────

function heading(pen, { id, names }, top, width) {
  const end = pen.text("shoal", MARGIN, top + 12, { size: 22, bold: true, colour: "accent" });
  const models = names ? `target: ${names.target}  ·  ${names.drafter ? `drafter: ${names.drafter}` : "no drafter"}` : "";
  const after = pen.text(id, end + 14, top + 13, { size: 16, bold: true });
  pen.text(models, after + 14, top + 13, { size: 14, colour: "quiet", width: MARGIN + width - after - 14 });
}

function card(pen, x, top, width, rows) {
  pen.box(x, top, width, rows.length * LINE + 2 * PAD, pen.colours.surface, pen.colours.line);
  rows.forEach((row, number) => pen.row(row, x + PAD, top + PAD + number * LINE));
}

function column(pen, sample, rows, { x, top, width, height }) {
  const best = sample.rank === 1;
  pen.box(x, top, width, height, pen.colours.surface, best ? pen.colours.accent : pen.colours.line, best ? 2 : 1);
  pen.text(`Sample ${sample.index + 1}`, x + PAD, top + 22, { size: 15, bold: true });
  const rank = { size: 15, bold: true, colour: best ? "accent" : "quiet", right: true };
  if (sample.rank) pen.text(`#${sample.rank}`, x + width - PAD, top + 22, rank);
  const mean = sample.mean_logprob === null ? "–" : sample.mean_logprob.toFixed(3).replace("-", "−");
  const end = sample.error ?? (sample.ended_by ? ending(sample.ended_by) : "stopped");
  const about = [`mean log-prob ${mean}`, `${sample.committed ?? 0} tokens`, end].join(" · ");
  pen.text(about, x + PAD, top + 44, { size: 13, colour: sample.error ? "wrong" : "quiet", width: width - 2 * PAD });
  pen.box(x, top + 61, width, 1, pen.colours.line);
  rows.forEach((row, number) => pen.row(row, x + PAD, top + 62 + PAD + number * LINE));
}

/** What tints and marks mean: pieces, and words for each. */
function legend(byDrafter, styles, marked) {
  const drafters = [...styles].map(([name, style]) => {
    const { drafted, accepted } = byDrafter[name] ?? {};
    return [{ text: ` ${name} `, style }, drafted === undefined ? "accepted" : `${accepted} of ${drafted} accepted`];
  });
  const marks = [[{ text: "struck", rejected: true }, "rejected draft"], [{ text: "edge", begins: true }, "a round begins"]];
  return styles.size ? [...drafters, [{ text: "plain" }, "the target's own"], ...(marked ? marks : [])] : [];
}

/** Draws an entry of the legend, four in a line. */
function explain(pen, [piece, words], place, top, width) {
  const [x, y] = [MARGIN + (place % 4) * width, top + Math.floor(place / 4) * (LINE + 8)];
  const [row] = lines(cells([piece]), width, pen.measure);
  const end = pen.row(row, x, y);
  pen.text(words, end + 8, y + LINE / 2, { colour: "quiet", width: Math.max(x + width - end - 16, 1) });
}
