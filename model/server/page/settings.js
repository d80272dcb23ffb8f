// The settings of sampling and of the page.

import { at } from "./dom.js";
import * as store from "./store.js";

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
  "frequency_penalty", "max_tokens", "seed",
];

export class Settings {
  /** actions: recoloured(), keyed(): the key is another one. */
  constructor(actions) {
    this.form = at("settings");
    this.actions = actions;
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", () => this.keep());
    this.form.addEventListener("change", (event) => {
      if (event.target.name !== "key") return;
      store.keepKey(event.target.value);
      actions.keyed();
    });
    this.form.addEventListener("reset", () => setTimeout(() => (store.keepKey(""), this.keep())));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", actions.recoloured);
    this.read();
  }

  /** What a request has of them. */
  chosen() {
    const fields = this.form.elements;
    const found = {};
    for (const name of NUMBERS) {
      const field = fields[name];
      if (field.value !== "" && field.validity.valid) found[name] = Number(field.value);
    }
    if (fields.stop.value) found.stop = fields.stop.value;
    if (fields.reasoning_effort.value) found.reasoning_effort = fields.reasoning_effort.value;
    return found;
  }

  get system() {
    return this.form.elements.system.value.trim();
  }

  askForKey() {
    this.form.querySelector("details").open = true;
    this.form.elements.key.focus();
  }

  kept() {
    return [...this.form.elements].filter((field) => field.name && field.name !== "key");
  }

  read() {
    const kept = store.settings();
    for (const field of this.kept()) {
      if (kept[field.name] !== undefined) field.value = kept[field.name];
    }
    this.form.elements.key.value = store.key();
    this.useTheme();
  }

  keep() {
    const filled = this.kept().filter((field) => field.value);
    store.keepSettings(Object.fromEntries(filled.map((field) => [field.name, field.value])));
    this.useTheme();
  }

  useTheme() {
    const theme = this.form.elements.theme.value;
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    this.actions.recoloured();
  }
}
