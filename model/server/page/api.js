// What the page asks the server, and what it says where the server does not answer.

import { key } from "./store.js";

const SILENT_SECONDS = 60; // the server sends a comment each 15

/** The server cannot be reached, or will not answer now: to ask again may help. */
export class Gone extends Error {}

/** An answer ended before its end. */
export class Broken extends Error {}

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
  const again = response.status === 429 || response.status >= 500;
  const error = again ? new Gone(message) : new Error(message);
  error.status = response.status;
  return error;
}

async function asked(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone("The server does not answer. It may have ended, or the network is gone.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

const posted = (path, body, signal) =>
  asked(path, { method: "POST", body: JSON.stringify(body), signal });

export const getJson = async (path, signal) => (await asked(path, { signal })).json();
export const postJson = async (path, body, signal) => (await posted(path, body, signal)).json();

/** The next piece of a stream; Broken if it fails, or nothing comes for too long. */
async function piece(reader) {
  let timer;
  const silence = new Promise((_, reject) => {
    const told = new Broken(`The answer broke off: nothing has come for ${SILENT_SECONDS} seconds.`);
    timer = setTimeout(() => reject(told), 1000 * SILENT_SECONDS);
  });
  try {
    return await Promise.race([reader.read(), silence]);
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Broken) throw error;
    throw new Broken("The answer broke off: the connection to the server is gone.");
  } finally {
    clearTimeout(timer);
  }
}

/** The events of a stream, parsed. Broken if it ends before its last one, or tells of an error. */
export async function* streamed(path, body, signal) {
  const response = await posted(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await piece(reader);
      if (done) throw new Broken("The answer broke off: the server has ended it without a word.");
      held += value;
      const events = held.split("\n\n");
      held = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment keeps the connection open
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new Broken(`The answer broke off: ${parsed.error.message}`);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
