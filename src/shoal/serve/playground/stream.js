// The API from a browser: what a server allows, and a request's answer as it comes.

/** A request that was refused, or that broke off. `param` names the field at fault, if one is. */
export class ApiError extends Error {
  constructor(status, { message, param }) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

const headers = (key) => ({ "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) });

/** The served model: its `id`, and what it allows. */
export async function servedModel(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data[0];
}

/** Asks, and returns the events of the answer once the server has taken the request. Aborting `signal` closes the
 *  connection, and the server drops its rows. */
export async function ask(path, body, key, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  return events(response);
}

async function* events(response) {
  for await (const data of messages(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(response.status, event.error);
    yield event;
  }
  throw new ApiError(response.status, { message: "the answer broke off before its end" });
}

async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const whole = (rest + part.value).split("\n\n");
    rest = whole.pop();
    for (const message of whole) if (!message.startsWith(":")) yield message.replace(/^data: /, ""); // a comment keeps the connection alive
  }
}

async function refusal(response) {
  const answer = await response.json().catch(() => null);
  return new ApiError(response.status, answer?.error ?? { message: `${response.status} ${response.statusText}` });
}
