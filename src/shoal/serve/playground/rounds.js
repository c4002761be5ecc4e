// The rounds of one sample: which drafts were rejected, and where each round begins among the sample's tokens.

/** Puts what rounds tell between the tokens of a sample. A round may come before its tokens, or its tokens before their round. */
export class Rounds {
  constructor(text, drafters) {
    this.text = text; // the element whose token nodes are the sample's
    this.drafters = drafters;
    this.tokens = [];
    this.waiting = [];
    this.done = [];
  }

  /** Takes token nodes, in order, and puts them at the end. */
  append(nodes) {
    this.tokens.push(...nodes);
    this.text.append(...nodes);
    this.settle(false);
  }

  /** Takes rounds, in order. */
  add(rounds) {
    this.waiting.push(...rounds);
    this.settle(false);
  }

  /** No more comes: what a stop string has cut away has no tokens. */
  end() {
    this.settle(true);
  }

  /** The nodes of each round: accepted drafts, rejected ones, the target's own token. */
  get parts() {
    return this.done.map(({ start, accepted, committed, struck }) => (
      { accepted: this.tokens.slice(start, start + accepted), struck, own: this.tokens.slice(start + accepted, start + committed) }
    ));
  }

  settle(ended) {
    while (this.waiting.length) {
      const [{ start, accepted, committed, rejected }] = this.waiting;
      const place = start + accepted; // of the target's own token, before which the rejected drafts stood
      if (this.tokens.length <= place && !ended) return;
      this.waiting.shift();
      const struck = rejected.map((draft) => rejectedNode(draft, this.drafters));
      this.done.push({ start, accepted, committed, struck });
      mark((accepted ? null : struck[0]) ?? this.tokens[start], this.done.length);
      for (const node of this.tokens.slice(start, place + 1)) node.dataset.round = this.done.length;
      if (place < this.tokens.length) this.tokens[place].before(...struck);
      else this.text.append(...struck);
    }
  }
}

/** Marks the node that a round begins with; what a stop string cut away has none. */
function mark(node, round) {
  if (!node) return;
  node.classList.add("begins");
  node.title = `round ${round}: ${node.title}`;
}

/** Its text is drawn by the style sheet, so that neither the element's text nor a selection has what the sample does not. */
function rejectedNode({ text, drafter }, drafters) {
  const node = document.createElement("s");
  node.className = `rejected ${drafters.style(drafter)}`;
  node.dataset.text = text.replaceAll("\n", "↵");
  node.title = `rejected draft of ${drafter}`;
  return node;
}
