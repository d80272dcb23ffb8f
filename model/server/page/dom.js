// Elements, made and found.

export const at = (id) => document.getElementById(id);

export function make(name, text, attributes = {}) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** A button that looks like text until it is needed; `action` is given the button. */
export function button(text, action, look = "small") {
  const element = make("button", text, { type: "button", class: look });
  element.addEventListener("click", () => action(element));
  return element;
}
