// What the server says of its models, in words for people.

/** Names, number format and device: `names` and `loaded` of a served model. */
export function about({ names, loaded }) {
  if (!names) return "";
  const { target, draft } = loaded ?? {};
  const drafter = names.drafter ? `drafter: ${names.drafter}${numbers(draft, target)}` : "no drafter";
  return [`target: ${names.target}${numbers(target)}`, drafter].join(" · ");
}

/** Of the target, and of a drafter only where it has others. */
function numbers(model, other) {
  if (!model?.dtype) return "";
  const told = ({ dtype, device, quantize }) => `${dtype}${quantize && quantize !== "off" ? ` ${quantize}` : ""} on ${device}`;
  return other && told(other) === told(model) ? "" : ` (${told(model)})`;
}

const ENDINGS = {
  eos: "stopped by itself", stop: "stopped at a stop string", length: "reached the limit of tokens", time: "ran out of time",
};

/** How a text ended: `ended_by` of the API in words that people know. */
export const ending = (reason) => ENDINGS[reason] ?? reason;

/** Makes a list of themes work; what is chosen is kept in this browser, for all pages. */
export function offerThemes(list) {
  const dress = (choice) => {
    list.value = choice;
    document.documentElement.dataset.theme = choice;
  };
  list.addEventListener("change", () => {
    localStorage.setItem("shoal-theme", list.value);
    dress(list.value);
  });
  dress(localStorage.getItem("shoal-theme") ?? "");
}
