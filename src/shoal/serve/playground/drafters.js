// Which drafter proposed a token: each has a colour and a line of its own, and an entry in the legend.

const STYLES = 4; // of classes by-0, by-1, ...; more drafters than that share them

/** The drafters of a run, in the order in which their first tokens came. */
export class Drafters {
  constructor(legend) {
    this.legend = legend;
    this.entries = new Map();
    legend.replaceChildren();
  }

  /** The class of a drafter's tokens; its entry is there from its first token on. */
  style(name) {
    if (!this.entries.has(name)) this.enter(name);
    return this.entries.get(name).style;
  }

  /** Takes what the usage says of all samples. */
  count(byDrafter) {
    for (const [name, { drafted, accepted }] of Object.entries(byDrafter)) {
      this.style(name);
      this.entries.get(name).counts.textContent = `${accepted} of ${drafted} accepted`;
    }
  }

  enter(name) {
    const style = `by-${this.entries.size % STYLES}`;
    const [item, token, counts] = ["li", "span", "span"].map((tag) => document.createElement(tag));
    token.className = `token draft ${style}`;
    token.textContent = name;
    counts.textContent = "accepted";
    item.append(token, " ", counts);
    this.legend.append(item);
    this.entries.set(name, { style, counts });
  }
}
