// What can be taken along of the run that is shown: its request, as a command of other clients.

import { copies } from "./clipboard.js";
import { asCurl, asPython } from "./snippets.js";

const at = (id) => document.getElementById(id);

let shown = null; // { path, body }, of the samples that are shown

/** Offers the run that is shown; null: there is none. */
export function offerToShare(result) {
  shown = result;
}

/** Makes the buttons work. `server()`: its `model`'s name, and whether it is `keyed`. */
export function share(server) {
  const request = () => ({ ...shown, ...server(), origin: new URL(".", location.href).href });
  copies(at("copy-curl"), () => asCurl(request()), "The command");
  copies(at("copy-python"), () => asPython(request()), "The program");
}
