// A run as a picture: prompt, figures, and the samples as they are on the page, drawn on a canvas.

import { LINE, Pen } from "./picture_pen.js";
import { cells, lines } from "./picture_text.js";
import { ending } from "./served.js";

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
