// The messages of a conversation as elements.

import { button, make } from "./dom.js";
import { figures } from "./figures.js";
import { markdown } from "./markdown.js";

const CUT = ["length", "stopped"]; // ends that are not the model's own

export async function copy(text, element) {
  const before = element.textContent;
  try {
    await navigator.clipboard.writeText(text);
    element.textContent = "Copied";
  } catch {
    element.textContent = "The browser refuses";
  }
  setTimeout(() => (element.textContent = before), 1500);
}

/** Buttons behind one: it closes when one of them is pressed, by Escape, and when focus leaves. */
function menu(label, buttons) {
  const box = make("details", undefined, { class: "menu" });
  const list = make("div", undefined, { class: "choices" });
  list.append(...buttons);
  box.append(make("summary", "⋯", { "aria-label": label, title: label, role: "button" }), list);
  const close = () => (box.open = false);
  list.addEventListener("click", close);
  box.addEventListener("focusout", (event) => box.contains(event.relatedTarget) || close());
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !box.open) return;
    event.stopPropagation();
    close();
    box.firstElementChild.focus();
  });
  return box;
}

export class Messages {
  /**
   * actions: edit(index, text), regenerate(index), goOn(index), look(message),
   * hasRouting(message), first(): what an empty conversation shows.
   */
  constructor(box, actions) {
    this.box = box;
    this.actions = actions;
    this.noted = make("div", undefined, { class: "quiet" });
    this.parts = null; // of the message that grows
    this.waiting = false;
    this.plain = false; // of a model without a chat template, whose text is no markdown
    box.addEventListener("click", (event) => {
      const pressed = event.target.closest("[data-copy]");
      if (pressed) copy(pressed.closest(".code").querySelector("code").textContent, pressed);
    });
  }

  /** What stands above all messages; `again`: what a button there does. */
  note(text, { bad = false, again = null } = {}) {
    this.noted.replaceChildren(...(text ? [make("p", text)] : []));
    if (again) this.noted.append(button("Try again", again, "calm"));
    this.noted.className = bad ? "note error" : "note quiet";
  }

  /** All messages; `growing` is the one that `update` will be called with. */
  show(all, growing = null) {
    this.parts = null;
    const shown = all.length ? [] : [this.actions.first()].filter(Boolean);
    for (const [i, message] of all.entries()) {
      shown.push(this.article(message, i, message === growing, i === all.length - 1));
    }
    this.box.replaceChildren(this.noted, ...shown);
    this.box.scrollTop = all.length ? this.box.scrollHeight : 0;
  }

  /** The growing message has more text: it is drawn once before the next frame. */
  update(message) {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.parts?.message === message) this.fill(this.parts);
    });
  }

  article(message, index, growing, last) {
    const mine = message.role === "user";
    const element = make("article", undefined, {
      class: message.role,
      "aria-label": mine ? "You" : "The model",
      ...(growing ? { "aria-busy": "true" } : {}),
    });
    const body = make("div", mine ? message.content : undefined, { class: "body" });
    const foot = make("div", undefined, { class: "foot" });
    const copied = button("Copy", (pressed) => copy(message.content, pressed));
    if (mine) {
      element.append(body, foot);
      foot.append(copied, button("Edit", () => this.edit(element, message, index, last)));
      return element;
    }
    const thought = make("details", undefined, { class: "reasoning" });
    const summary = make("summary", "Reasoning");
    const thoughts = make("div");
    thought.append(summary, thoughts);
    const told = make("span", "", { class: "figures" });
    const error = make("div", undefined, { class: "broken", role: "alert" });
    element.append(thought, body, error, foot);
    foot.append(told);
    const parts = { message, body, thought, summary, thoughts, told, error };
    if (growing) this.parts = parts;
    else {
      this.tellError(parts, index, last);
      const more = [button("Regenerate", () => this.actions.regenerate(index))];
      if (last && message.content && CUT.includes(message.finish)) more.unshift(this.goOn(index));
      if (this.actions.hasRouting(message)) more.push(button("Experts", () => this.actions.look(message)));
      foot.append(...(message.content ? [copied] : []), menu("More", more));
    }
    this.fill(parts);
    return element;
  }

  goOn(index, look) {
    return button("Go on", () => this.actions.goOn(index), look);
  }

  /** Why an answer is not whole, and what can be done: what came is kept. */
  tellError({ message, error }, index, last) {
    if (!message.error) return;
    error.append(make("p", message.error, { class: "error" }));
    if (!last) return;
    const again = button("Try again", () => this.actions.regenerate(index), "calm");
    error.append(...(message.content ? [this.goOn(index, "calm")] : []), again);
  }

  fill({ message, body, thought, summary, thoughts, told }) {
    const near = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 80;
    body.classList.toggle("plain", this.plain);
    body.replaceChildren(this.plain ? message.content : markdown(message.content));
    thought.hidden = !message.reasoning;
    if (message.reasoning) {
      summary.textContent = message.thought ? `Reasoning, ${message.thought.toFixed(1)} s` : "Reasoning";
      thoughts.replaceChildren(markdown(message.reasoning));
    }
    told.replaceChildren(...figures(message));
    if (near) this.box.scrollTop = this.box.scrollHeight;
  }

  edit(element, message, index, last) {
    const field = make("textarea", undefined, { rows: "4", "aria-label": "Edit your message" });
    field.value = message.content;
    const foot = make("div", undefined, { class: "foot" });
    const back = () => element.replaceWith(this.article(message, index, false, last));
    foot.append(
      button("Send again", () => field.value.trim() && this.actions.edit(index, field.value), "calm"),
      button("Cancel", back, "calm"),
    );
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
    });
    element.replaceChildren(field, foot);
    field.focus();
  }
}
