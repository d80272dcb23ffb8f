// The field in which a message is written.

import { at } from "./dom.js";

/** actions: send(text), stop(), busy(). */
export function composer(actions) {
  const field = at("prompt");
  const send = () => {
    const text = field.value;
    if (!text.trim() || actions.busy()) return;
    field.value = "";
    actions.send(text);
  };
  at("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  at("stop").addEventListener("click", () => {
    actions.stop();
    field.focus();
  });
  document.addEventListener("keydown", (event) => {
    const inside = event.target.closest?.("#insight");
    if (event.key === "Escape" && !event.defaultPrevented && !inside && actions.busy()) actions.stop();
  });
}
