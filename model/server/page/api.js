// What the page asks the server.

import { key } from "./store.js";

function headers() {
  const found = { "Content-Type": "application/json" };
  if (key()) found.Authorization = `Bearer ${key()}`;
  return found;
}

async function failure(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // It has no JSON to say why.
  }
  if (response.status === 401) message += " Write it under Settings.";
  const error = new Error(message);
  error.status = response.status;
  return error;
}

export async function getJson(path) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await failure(response);
  return response.json();
}

export async function postJson(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** The events of a stream, parsed; one that tells of an error is thrown. */
export async function* streamed(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const events = held.split("\n\n");
      held = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment keeps the connection open
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new Error(parsed.error.message);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
