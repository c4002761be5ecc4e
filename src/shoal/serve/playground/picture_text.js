// Text for a picture: which character stands on which line.

const graphemes = Intl.Segmenter && new Intl.Segmenter(undefined, { granularity: "grapheme" });
const BREAKS = ["\n", "\r\n"];
const split = (text) => (graphemes ? [...graphemes.segment(text)].map(({ segment }) => segment) : [...text]);

/** The characters of pieces (`text`, `rejected`, and what else the one who draws wants to know), as cells { char, piece, first, colour }.
 *  `places`: colours of the text that pieces which are not rejected make together. */
export function cells(pieces, places = []) {
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
export function lines(all, width, measure) {
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
