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
