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
