// The transport of a replay: play, pause, step, scrub and speed, over positions that a track shows.
//
// A track has: `length`, its last position (0 is before anything came); `time(position)`, seconds on its clock; `show(position)`;
// `describe(position)`, a sentence; `marks`, the positions that the scrubber stops at; `close()`.

const at = (id) => document.getElementById(id);
const panel = at("replay");
const [play, scrubber, speed, sentence] = ["play", "scrubber", "speed", "frame"].map(at);
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const STILL_PAUSE = 500; // least milliseconds between two pictures then

let track = null;
let position = 0;
let clock = null; // while it plays: { started, frame, drawn }
let opener = null; // what the focus goes back to

/** Shows a track from its start, paused. */
export function open(next, { speed: wanted = "1" } = {}) {
  if (track) leave();
  else opener = document.activeElement;
  track = next;
  speed.value = wanted;
  scrubber.max = track.marks.length - 1;
  panel.hidden = false;
  go(0);
  panel.scrollIntoView(); // to the top: what is watched is below it
  play.focus({ preventScroll: true });
}

/** Ends the replay, if there is one: all is shown as it came. */
export function close() {
  if (!track) return;
  const inside = panel.contains(document.activeElement);
  leave();
  track = null;
  panel.hidden = true;
  if (inside) opener?.focus();
}

/** The clock of the track has changed: playing goes on from where it is. */
export function retime() {
  if (clock) start();
}

function leave() {
  pause();
  track.close();
}

// ── moving ──────────────────────────────────────────────────────────────────────────────────────────────────────────

function go(to) {
  position = Math.min(Math.max(to, 0), track.length);
  track.show(position);
  const mark = track.marks.findLastIndex((mark) => mark <= position);
  scrubber.value = mark;
  sentence.textContent = track.describe(position);
  scrubber.setAttribute("aria-valuetext", sentence.textContent);
  at("to-start").disabled = at("step-back").disabled = position === 0;
  at("step-on").disabled = position === track.length;
}

function step(by) {
  pause();
  const focused = document.activeElement;
  go(position + by);
  if (focused.disabled) play.focus(); // a disabled button would lose the focus, and with it the keys
}

function start() {
  pause();
  if (position === track.length) go(0);
  const rate = 1000 / Number(speed.value); // milliseconds per second of the track
  clock = { started: performance.now() - track.time(position) * rate, rate, drawn: -Infinity };
  dress(true);
  clock.frame = requestAnimationFrame(tick);
}

function tick(now) {
  const passed = (performance.now() - clock.started) / clock.rate;
  let next = position;
  while (next < track.length && track.time(next + 1) <= passed) next += 1;
  const late = !STILL.matches || now - clock.drawn >= STILL_PAUSE || next === track.length;
  if (next !== position && late) {
    clock.drawn = now;
    go(next);
  }
  if (position === track.length) pause();
  else clock.frame = requestAnimationFrame(tick);
}

function pause() {
  if (!clock) return;
  cancelAnimationFrame(clock.frame);
  clock = null;
  dress(false);
}

/** What is heard while it plays would never end, so it is only heard when it pauses. */
function dress(playing) {
  play.setAttribute("aria-label", playing ? "Pause" : "Play");
  play.title = playing ? "Pause" : "Play";
  panel.classList.toggle("playing", playing);
  sentence.setAttribute("aria-live", playing ? "off" : "polite");
}

const toggle = () => (clock ? pause() : start());

// ── wiring ──────────────────────────────────────────────────────────────────────────────────────────────────────────

const KEYS = {
  " ": toggle, ArrowLeft: () => step(-1), ArrowRight: () => step(1), Home: () => step(-Infinity), End: () => step(Infinity),
};

play.addEventListener("click", toggle);
at("to-start").addEventListener("click", () => step(-Infinity));
at("step-back").addEventListener("click", () => step(-1));
at("step-on").addEventListener("click", () => step(1));
at("close-replay").addEventListener("click", close);
scrubber.addEventListener("input", () => {
  pause();
  go(track.marks[scrubber.value]);
});
speed.addEventListener("change", retime);
panel.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    event.stopPropagation();
    close();
    return;
  }
  const { target } = event;
  const own = target.matches("select") || (event.key === " " ? target.matches("button") : target.matches("input"));
  if (own || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
