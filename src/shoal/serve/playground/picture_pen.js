// The pen of a picture: it draws boxes, words and lines of tokens, in the colours and fonts of the page.

export const LINE = 20; // the height of a line of code
const COLOURS = {
  ground: "--ground", surface: "--surface", ink: "--ink", quiet: "--quiet", line: "--line", accent: "--accent", onAccent: "--on-accent",
  wrong: "--wrong",
};

export class Pen {
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
