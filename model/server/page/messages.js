// The messages of a conversation as elements.

import { make, markdown } from "./markdown.js";

function button(text, action) {
  const element = make("button", text, { type: "button", class: "small" });
  element.addEventListener("click", () => action(element));
  return element;
}

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

const ENDS = { length: "ended at its limit", stopped: "stopped", tool_calls: "calls a tool" };

function figures(message) {
  const parts = [];
  const { tokens, firstToken, rate } = message.figures ?? {};
  if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
  if (firstToken != null) parts.push(`first after ${(1000 * firstToken).toFixed(0)} ms`);
  if (ENDS[message.finish]) parts.push(ENDS[message.finish]);
  return parts.join(" · ");
}

export class Messages {
  /** actions: edit(index, text), regenerate(index), look(message), hasRouting(message). */
  constructor(box, actions) {
    this.box = box;
    this.actions = actions;
    this.noted = make("p", "", { class: "quiet" });
    this.parts = null; // of the message that grows
    this.waiting = false;
    this.plain = false; // of a model without a chat template, whose text is no markdown
    box.addEventListener("click", (event) => {
      const pressed = event.target.closest("[data-copy]");
      if (pressed) copy(pressed.closest(".code").querySelector("code").textContent, pressed);
    });
  }

  note(text, bad = false) {
    this.noted.textContent = text;
    this.noted.className = bad ? "error" : "quiet";
  }

  /** All messages; `growing` is the one that `update` will be called with. */
  show(all, growing = null) {
    this.parts = null;
    this.box.replaceChildren(this.noted, ...all.map((message, i) => this.article(message, i, message === growing)));
    this.box.scrollTop = this.box.scrollHeight;
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

  article(message, index, growing) {
    const mine = message.role === "user";
    const element = make("article", undefined, {
      class: message.role,
      "aria-label": mine ? "You" : "The model",
      ...(growing ? { "aria-busy": "true" } : {}),
    });
    const body = make("div", mine ? message.content : undefined, { class: "body" });
    const foot = make("div", undefined, { class: "foot" });
    if (mine) {
      element.append(body, foot);
      foot.append(
        button("Copy", (pressed) => copy(message.content, pressed)),
        button("Edit", () => this.edit(element, message, index)),
      );
      return element;
    }
    const thought = make("details", undefined, { class: "reasoning" });
    const summary = make("summary", "Reasoning");
    const thoughts = make("div");
    thought.append(summary, thoughts);
    const told = make("span", "", { class: "figures" });
    const error = make("p", "", { class: "error" });
    element.append(thought, body, error, foot);
    const parts = { message, body, thought, summary, thoughts, told, error };
    if (growing) this.parts = parts;
    else {
      foot.append(
        button("Copy", (pressed) => copy(message.content, pressed)),
        button("Regenerate", () => this.actions.regenerate(index)),
      );
      if (this.actions.hasRouting(message)) foot.append(button("Experts", () => this.actions.look(message)));
    }
    foot.append(told);
    this.fill(parts);
    return element;
  }

  fill({ message, body, thought, summary, thoughts, told, error }) {
    const near = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 80;
    body.classList.toggle("plain", this.plain);
    body.replaceChildren(this.plain ? message.content : markdown(message.content));
    thought.hidden = !message.reasoning;
    if (message.reasoning) {
      summary.textContent = message.thought ? `Reasoning, ${message.thought.toFixed(1)} s` : "Reasoning";
      thoughts.replaceChildren(markdown(message.reasoning));
    }
    told.textContent = figures(message);
    error.textContent = message.error ?? "";
    error.hidden = !message.error;
    if (near) this.box.scrollTop = this.box.scrollHeight;
  }

  edit(element, message, index) {
    const field = make("textarea", undefined, { rows: "4", "aria-label": "Edit your message" });
    field.value = message.content;
    const foot = make("div", undefined, { class: "foot" });
    const back = () => element.replaceWith(this.article(message, index, false));
    foot.append(
      button("Send again", () => field.value.trim() && this.actions.edit(index, field.value)),
      button("Cancel", back),
    );
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
    });
    element.replaceChildren(field, foot);
    field.focus();
  }
}
