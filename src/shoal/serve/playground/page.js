// What all pages need: buttons that copy, files to save, keys, and drawing at most once a frame.

// ── keys ───────────────────────────────────────────────────────────────────────────────────────────────────────────

/** Whether a key belongs to an input method, which writes Japanese, Chinese or Korean with several keys: Safari tells the last by its code alone. */
export const composes = (event) => event.isComposing || event.keyCode === 229;

// ── copies and files ───────────────────────────────────────────────────────────────────────────────────────────────

// What is taken along: buttons that copy, and files. What came of it is said in the button for a moment, and to the page by an event.

const MOMENT = 1500; // milliseconds
const KEPT = 60_000; // milliseconds that a browser has to take a file

/** Copies `text()` whenever a button is pressed. `what`: what that is, "The link". */
export function copies(button, text, what) {
  const name = button.textContent;
  let timer;
  button.addEventListener("click", async () => {
    const failure = await write(text()).then(() => null, ({ message }) => message);
    tell(button, failure === null ? `${what} is copied.` : `Nothing was copied: ${failure}`);
    if (failure !== null) return;
    button.textContent = "Copied";
    clearTimeout(timer);
    timer = setTimeout(() => { button.textContent = name; }, MOMENT);
  });
}

/** A button that copies what `text` gives. */
export function copyButton(text, what) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = "Copy";
  copies(made, text, what);
  return made;
}

/** Tells the page something: an event "told" on the window, with the sentence as its detail. */
function tell(element, sentence) {
  element.dispatchEvent(new CustomEvent("told", { bubbles: true, detail: sentence }));
}

/** Saves a file. `blob`: null where the browser could not make it. */
export function save(blob, called) {
  if (!blob) return tell(document.body, "This browser could not draw the image.");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = called;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), KEPT);
  return tell(document.body, `Saved ${called}.`);
}

/** Browsers have a clipboard only for secure and local pages; over plain HTTP what is selected can be copied. */
async function write(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!done) throw new Error("this browser does not let the page copy.");
}

// ── frames ─────────────────────────────────────────────────────────────────────────────────────────────────────────

// Drawing what streams: at most once a frame, so that reading the stream, and with it the clock of a run, does not wait for drawing.

const REST = 4; // after drawing, so many times as long is left to everything else

/** Calls `what` at most once a frame, and less often where that and the browser's own layout and paint take long. Each call that comes
 *  meanwhile is done with the next. */
export function framed(what) {
  let asked = false;
  let drawing = false;
  const work = () => {
    asked = false;
    const begun = performance.now();
    try {
      what();
    } finally { // also after an error: what comes later is drawn
      setTimeout(() => setTimeout(rest, REST * (performance.now() - begun))); // the outer one comes after the frame is painted
    }
  };
  const rest = () => {
    drawing = false;
    if (asked) schedule();
  };
  const schedule = () => {
    drawing = true;
    requestAnimationFrame(work);
  };
  return () => {
    asked = true;
    if (!drawing) schedule();
  };
}
