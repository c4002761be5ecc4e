// The race: a run and plain decoding after it, once more side by side, both by the times at which their tokens arrived.

const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 200; // of the chart, in pixels
const [LEFT, BOTTOM, TOP, RIGHT] = [44, 24, 8, 12]; // its margins

/** What of a run had come by when: total tokens, and tokens and texts by sample. */
class Course {
  constructor(run, n) {
    this.n = n;
    this.events = run.trace;
    this.ends = Array.from({ length: n }, (_, index) => this.events.findLast((event) => event.index === index)?.seconds ?? 0);
    this.totals = Array.from({ length: n }, (_, index) => run.choices.get(index)?.committed ?? 0);
    this.rewind();
  }

  rewind() {
    this.read = 0;
    this.now = -1;
    this.tokens = Array(this.n).fill(0);
    this.texts = Array(this.n).fill("");
  }

  to(seconds) {
    if (seconds < this.now) this.rewind();
    this.now = seconds;
    for (; this.read < this.events.length && this.events[this.read].seconds <= seconds; this.read++) {
      const { index, committed, text } = this.events[this.read];
      this.tokens[index] = committed;
      this.texts[index] += text;
    }
  }

  /** Tokens so far, of one sample or of all (null). */
  count(sample) {
    return sample === null ? this.tokens.reduce((sum, one) => sum + one, 0) : this.tokens[sample];
  }

  end(sample) {
    return sample === null ? Math.max(...this.ends) : this.ends[sample];
  }

  /** Points [seconds, tokens] of the curve. */
  points(sample) {
    const counts = Array(this.n).fill(0);
    let sum = 0;
    const points = [[0, 0]];
    for (const { index, committed, seconds } of this.events) {
      if (sample !== null && index !== sample) continue;
      sum += committed - counts[index];
      counts[index] = committed;
      points.push([seconds, sum]);
    }
    return points;
  }
}

/** A track of the player over two runs of one request. */
export class Race {
  constructor(run, plain) {
    this.n = run.choices.size;
    this.courses = { mine: new Course(run, this.n), plain: new Course(plain, this.n) };
    const all = Object.values(this.courses);
    this.seconds = [0, ...new Set(all.flatMap(({ events }) => events.map((event) => event.seconds)))].sort((a, b) => a - b);
    this.length = this.seconds.length - 1;
    this.marks = [...this.seconds.keys()];
    this.choose = at("race-sample");
    this.choose.replaceChildren(new Option("all samples", ""));
    for (let index = 0; index < this.n; index++) this.choose.add(new Option(`sample ${index + 1}`, index));
    this.change = () => { this.dress(); this.show(this.position); };
    this.choose.addEventListener("change", this.change);
    at("race").hidden = false;
    this.dress();
  }

  /** A speed at which the slower run takes about as long as one looks. */
  get speed() {
    const last = this.seconds[this.length];
    return [...at("speed").options].map(({ value }) => value).findLast((value) => last / value <= 12) ?? "1";
  }

  get sample() {
    return this.choose.value === "" ? null : Number(this.choose.value);
  }

  time(position) {
    return this.seconds[position];
  }

  /** What the choice of a sample changes: the curves, and lanes or texts. */
  dress() {
    this.chart = null; // its width is known once it is shown
    const one = this.sample !== null;
    at("lanes").hidden = one;
    at("race-texts").hidden = !one;
    at("race-texts").replaceChildren(...(one ? Object.keys(NAMES).map(pane) : []));
    if (!one && at("lanes").children.length !== this.n) at("lanes").replaceChildren(...this.courses.mine.totals.map(lane));
  }

  show(position) {
    this.position = position;
    const seconds = this.seconds[position];
    for (const course of Object.values(this.courses)) course.to(seconds);
    this.chart ??= this.drawn();
    this.chart.show(seconds);
    if (this.sample === null) [...at("lanes").children].forEach((node, index) => this.showLane(node, index, seconds));
    else for (const [name, course] of Object.entries(this.courses)) at(`race-${name}`).textContent = course.texts[this.sample];
  }

  drawn() {
    const { mine, plain } = this.courses;
    const curves = { mine: mine.points(this.sample), plain: plain.points(this.sample) };
    const chart = new Chart(curves, this.seconds[this.length], at("race-chart").clientWidth);
    at("race-chart").replaceChildren(chart.node);
    return chart;
  }

  showLane(node, index, seconds) {
    const most = Math.max(...Object.values(this.courses).map(({ totals }) => totals[index]), 1);
    for (const [name, course] of Object.entries(this.courses)) {
      const ended = seconds >= course.ends[index];
      const row = node.querySelector(`.${name}`);
      row.querySelector(".meter").style.setProperty("--share", course.tokens[index] / most);
      row.querySelector("b").textContent = `${course.tokens[index]} tokens${ended ? ` in ${time(course.ends[index])}` : ""}`;
      row.classList.toggle("ended", ended);
    }
  }

  describe(position) {
    const seconds = this.seconds[position];
    const told = Object.entries(this.courses).map(([name, course]) => {
      const end = course.end(this.sample);
      const ended = seconds >= end ? `, ended at ${time(end)}` : "";
      return `${NAMES[name]} ${course.count(this.sample)} tokens${ended}`;
    });
    return `After ${time(seconds)}: ${told.join("; ")}.`;
  }

  close() {
    this.choose.removeEventListener("change", this.change);
    at("race").hidden = true;
    at("lanes").replaceChildren();
    at("race-texts").replaceChildren();
  }
}

const NAMES = { mine: "speculative", plain: "plain" };
const time = (seconds) => `${seconds.toFixed(seconds < 10 ? 3 : 1)} s`;

function lane(_, index) {
  const node = document.createElement("li");
  const name = document.createElement("span");
  name.textContent = `Sample ${index + 1}`;
  const rows = Object.entries(NAMES).map(([kind, title]) => {
    const [row, label, bar, count] = ["div", "span", "i", "b"].map((tag) => document.createElement(tag));
    row.className = `lane ${kind}`;
    label.textContent = title;
    bar.className = `meter ${kind}`;
    row.append(label, bar, count);
    return row;
  });
  node.append(name, ...rows);
  return node;
}

/** Where the text of one run grows. */
function pane(kind) {
  const [node, title, text] = ["div", "h3", "pre"].map((tag) => document.createElement(tag));
  title.textContent = text.ariaLabel = NAMES[kind];
  text.className = "text";
  text.id = `race-${kind}`;
  text.tabIndex = 0; // it scrolls
  node.append(title, text);
  return node;
}

// ── the chart: tokens over time ─────────────────────────────────────────────────────────────────────────────────────

class Chart {
  constructor(curves, last, width) {
    this.width = width;
    this.last = last || 1;
    this.most = Math.max(1, ...Object.values(curves).flat().map(([, tokens]) => tokens));
    this.node = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": "Tokens over time, speculative and plain" });
    this.past = svg("rect", { x: 0, y: 0, width: 0, height: HEIGHT });
    const clip = svg("clipPath", { id: "past" });
    clip.append(this.past);
    this.now = svg("line", { class: "now", y1: TOP, y2: HEIGHT - BOTTOM });
    this.node.append(clip, ...this.axes());
    for (const [name, points] of Object.entries(curves)) {
      const line = { points: this.stairs(points), class: `curve ${name}` };
      this.node.append(svg("polyline", { ...line, class: `${line.class} ahead` }), svg("polyline", { ...line, "clip-path": "url(#past)" }));
    }
    this.node.append(this.now);
  }

  x(seconds) {
    return LEFT + (seconds / this.last) * (this.width - LEFT - RIGHT);
  }

  y(tokens) {
    return HEIGHT - BOTTOM - (tokens / this.most) * (HEIGHT - BOTTOM - TOP);
  }

  /** A count keeps its value until the next one comes. */
  stairs(points) {
    return points.flatMap(([seconds, tokens], place) => {
      const before = points[place - 1]?.[1] ?? tokens;
      return [`${this.x(seconds)},${this.y(before)}`, `${this.x(seconds)},${this.y(tokens)}`];
    }).join(" ");
  }

  axes() {
    const [x, y] = [this.x(0), this.y(0)];
    const text = (x, y, anchor, content) => {
      const node = svg("text", { x, y, "text-anchor": anchor });
      node.textContent = content;
      return node;
    };
    return [
      svg("line", { class: "axis", x1: x, y1: TOP, x2: x, y2: y }), svg("line", { class: "axis", x1: x, y1: y, x2: this.width - RIGHT, y2: y }),
      text(x - 6, TOP + 10, "end", this.most), text(x - 6, y, "end", 0), text(x, HEIGHT - 6, "start", "0 s"),
      text(this.width - RIGHT, HEIGHT - 6, "end", time(this.last)), text((x + this.width) / 2, HEIGHT - 6, "middle", "tokens over time"),
    ];
  }

  show(seconds) {
    const x = this.x(seconds);
    this.past.setAttribute("width", x);
    this.now.setAttribute("x1", x);
    this.now.setAttribute("x2", x);
  }
}

function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
