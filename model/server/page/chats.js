// The list of conversations.

import { at, make } from "./dom.js";
import * as store from "./store.js";

function line(conversation, current, actions) {
  const found = make("li");
  const open = make("button", store.title(conversation), { type: "button", class: "open" });
  if (conversation === current) open.setAttribute("aria-current", "true");
  open.addEventListener("click", () => actions.open(conversation));
  const label = `Delete ${store.title(conversation)}`;
  const remove = make("button", "×", { type: "button", class: "small", "aria-label": label });
  remove.addEventListener("click", () => actions.remove(conversation));
  found.append(open, remove);
  return found;
}

/** actions: open(conversation), remove(conversation). */
export function listChats(current, actions) {
  at("conversations").replaceChildren(...store.all().map((one) => line(one, current, actions)));
}
