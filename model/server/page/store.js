// Conversations and settings, kept by the browser alone.

const CONVERSATIONS = "pykernels.conversations";
const SETTINGS = "pykernels.settings";
const INSIDE = "pykernels.inside";
const KEY = "pykernels.key";
const MOST = 100; // conversations

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or forbidden: the page goes on without
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const keepKey = (value) => sessionStorage.setItem(KEY, value.trim());

export const settings = () => read(SETTINGS, {});
export const keepSettings = (value) => write(SETTINGS, value);

/** Whether the reader wants *Inside* open: true, false, or null for "as it comes". */
export const inside = () => read(INSIDE, null);
export const keepInside = (value) => write(INSIDE, value);

let conversations = read(CONVERSATIONS, []);

export const all = () => conversations;

/** A conversation: {id, messages: [{role, content, reasoning, figures, finish, error}]}. */
export function create() {
  const empty = conversations.find((one) => !one.messages.length);
  if (empty) return empty;
  const made = { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), messages: [] };
  conversations.unshift(made);
  conversations.splice(MOST);
  return made;
}

/** Keeps them all; where there is no room, without the oldest ones. */
export function keep() {
  for (let size = conversations.length; size > 0; size = Math.floor(size / 2)) {
    if (write(CONVERSATIONS, conversations.slice(0, size))) return;
  }
}

export function remove(id) {
  conversations = conversations.filter((one) => one.id !== id);
  write(CONVERSATIONS, conversations);
}

export function title(conversation) {
  const first = conversation.messages.find((message) => message.role === "user");
  return first ? first.content.trim().split("\n")[0].slice(0, 60) || "New chat" : "New chat";
}
