// What is known of one token, without a mouse too: a card beside it, by tap, click or keyboard. A sample is one stop of the Tab key;
// inside, the arrow keys go from token to token.

const number = (value, digits) => value.toFixed(digits).replace("-", "−");
const facts = new WeakMap(); // token element -> what is known of it
const card = document.createElement("div");
let shown = null; // the token whose card is open

/** Keeps what is known of a token for its card: `id`, `text`, `logprob`, `drafter` (null: the target's own), and `top`, its
 *  alternatives as [text, log-probability], if they were asked for. The round is the element's data-round. */
export function remember(node, token) {
  facts.set(node, token);
  node.tabIndex = -1;
}

/** Opens cards for the tokens in a container, now and later. */
export function inspect(container) {
  card.id = "token-card";
  card.className = "token-card";
  card.setAttribute("role", "tooltip");
  card.hidden = true;
  container.after(card);
  container.addEventListener("click", ({ target }) => toggle(tokenAt(target)));
  container.addEventListener("focusin", ({ target }) => {
    if (facts.has(target)) enter(target);
  });
  container.addEventListener("focusout", () => hide());
  container.addEventListener("keydown", press);
  document.addEventListener("keydown", escape, true);
  document.addEventListener("pointerdown", ({ target }) => {
    if (shown && !shown.contains(target) && !card.contains(target)) hide();
  });
  addEventListener("resize", hide);
  addEventListener("scroll", () => shown && place(), { passive: true, capture: true });
  new MutationObserver((changes) => settle(new Set(changes.map(({ target }) => target.closest(".text")))))
    .observe(container, { childList: true, subtree: true });
}

const tokenAt = (target) => target.closest?.(".token") ?? null;
const tokensOf = (node) => [...node.closest(".text").querySelectorAll(".token")].filter((token) => facts.has(token));

/** Every sample has one token that Tab reaches; a card whose token is gone closes. `texts`: those that changed, null for what is no text.
 *  What this changes are attributes, which are not observed. */
function settle(texts) {
  if (shown && !shown.isConnected) hide();
  for (const text of texts) {
    if (!text || text.querySelector('.token[tabindex="0"]')) continue;
    const first = text.querySelector(".token[tabindex]");
    if (first) first.tabIndex = 0;
  }
}

function enter(token) {
  for (const other of token.closest(".text").querySelectorAll('.token[tabindex="0"]')) other.tabIndex = -1;
  token.tabIndex = 0;
  if (token.matches(":focus-visible")) show(token);
}

function toggle(token) {
  if (!facts.has(token) || !getSelection().isCollapsed) return; // who selects text wants no card
  if (shown === token) hide();
  else show(token);
}

// ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────────

function press(event) {
  const token = document.activeElement;
  if (!facts.has(token) || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") toggle(token);
  else {
    const next = neighbour(token, event.key);
    if (next === undefined) return;
    next?.focus({ focusVisible: true });
    next?.scrollIntoView({ block: "nearest" });
  }
  event.preventDefault();
}

/** Where a key leads: null if there is nothing that way, undefined if the key leads nowhere. */
function neighbour(token, key) {
  const all = tokensOf(token);
  const at = all.indexOf(token);
  if (key === "ArrowRight") return all[at + 1] ?? null;
  if (key === "ArrowLeft") return all[at - 1] ?? null;
  if (key === "Home") return all[0];
  if (key === "End") return all.at(-1);
  if (key === "ArrowDown") return onLine(token, all.slice(at + 1));
  if (key === "ArrowUp") return onLine(token, all.slice(0, at).reverse());
  return undefined;
}

/** Where a token's first visible text stands: one that begins with a line break has an empty box on the line before. */
function boxOf(token) {
  return [...token.getClientRects()].find(({ width }) => width > 0) ?? token.getBoundingClientRect();
}

/** Of tokens in order of distance: the one on the next line that is nearest sideways. */
function onLine(token, others) {
  const { left, top, height } = boxOf(token);
  let line = null;
  let best = null;
  for (const other of others) {
    const there = boxOf(other);
    if (Math.abs(there.top - top) < height / 2) continue;
    line ??= there.top;
    if (Math.abs(there.top - line) >= height / 2) break;
    const distance = Math.abs(there.left - left);
    if (!best || distance < best.distance) best = { distance, other };
  }
  return best?.other ?? null;
}

/** Esc closes the card first, and stops a run only when none is open. */
function escape(event) {
  if (event.key !== "Escape" || !shown) return;
  hide();
  event.stopPropagation();
}

// ── the card ────────────────────────────────────────────────────────────────────────────────────────────────────────

function show(token) {
  hide();
  shown = token;
  card.replaceChildren(...content(facts.get(token), token.dataset.round));
  card.hidden = false;
  token.setAttribute("aria-describedby", card.id);
  token.classList.add("inspected");
  place();
}

function hide() {
  if (!shown) return;
  shown.removeAttribute("aria-describedby");
  shown.classList.remove("inspected");
  shown = null;
  card.hidden = true;
}

/** Below the token, above where there is no room below, and inside the window. */
function place() {
  const [at, own, gap] = [boxOf(shown), card.getBoundingClientRect(), 6];
  const left = Math.max(gap, Math.min(at.left, document.documentElement.clientWidth - own.width - gap));
  const below = at.bottom + gap;
  const top = below + own.height > innerHeight ? Math.max(gap, at.top - gap - own.height) : below;
  card.style.setProperty("left", `${left}px`);
  card.style.setProperty("top", `${top}px`);
}

function element(name, text, className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

/** A token's text with its blanks visible. */
const visible = (text) => (text === "" ? "no text" : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

function chance(logprob) {
  if (logprob === null) return "–";
  const percent = 100 * Math.exp(logprob);
  return percent < 0.01 ? "< 0.01 %" : `${number(percent, percent < 1 ? 2 : 1)} %`;
}

function content({ id, text, logprob, drafter, top = [] }, round) {
  const rows = [
    ...(drafter === null && round === undefined ? [] : [
      ["from", drafter === null ? "the target itself" : `accepted draft of ${drafter}`],
      ["round", round ?? "–"],
    ]),
    ["token id", id],
    ["log-probability", logprob === null ? "–" : logprob > -0.0005 ? "> −0.0005" : number(logprob, 3)],
    ["probability", chance(logprob)],
  ];
  const list = document.createElement("dl");
  for (const [name, value] of rows) list.append(element("dt", name), " ", element("dd", value), " ");
  return [element("p", visible(text), "token-text"), list, ...(top.length ? [alternatives(top, text)] : [])];
}

function alternatives(top, text) {
  const section = element("div", "", "alternatives");
  const list = document.createElement("ol");
  for (const [name, logprob] of top) {
    const item = element("li", "", name === text ? "drawn" : "");
    item.append(element("span", visible(name)), " ", element("b", chance(logprob)));
    item.style.setProperty("--share", Math.exp(logprob));
    list.append(item);
  }
  section.append(element("p", "most probable here"), list);
  return section;
}
