// What can be taken along of the run that is shown: its request as a command of other clients, and its result as files.

import { copies, save } from "./clipboard.js";
import { picture } from "./picture.js";
import { record } from "./record.js";
import { asCurl, asPython } from "./snippets.js";

const at = (id) => document.getElementById(id);

let shown = null; // { path, body, run, columns, plain }

/** Offers the run that is shown; null: there is none. */
export function offerToShare(result) {
  shown = result;
}

/** Makes the buttons work. `server()`: the `model`, as the server describes it, and whether it is `keyed`; `look()`: as `picture` wants it. */
export function share({ server, look }) {
  const request = () => {
    const { model, keyed } = server();
    return { ...shown, model: model.id, keyed, origin: new URL(".", location.href).href };
  };
  copies(at("copy-curl"), () => asCurl(request()), "The command");
  copies(at("copy-python"), () => asPython(request()), "The program");
  at("save-json").addEventListener("click", () => {
    const { model } = server();
    save(new Blob([`${JSON.stringify(record(shown, model), null, 1)}\n`], { type: "application/json" }), name(model, "json"));
  });
  at("save-image").addEventListener("click", () => {
    const { model } = server();
    const called = name(model, "png");
    picture(record(shown, model), look()).toBlob((blob) => save(blob, called), "image/png");
  });
}

function name({ id }, ending) {
  const { seed } = shown.body;
  return `shoal-${id.replace(/[^\w.-]+/g, "-")}${seed === undefined ? "" : `-seed${seed}`}.${ending}`;
}
