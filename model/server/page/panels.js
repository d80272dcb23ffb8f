// *Chats* and *Inside*: columns where there is room, else drawers over the messages.

import { at } from "./dom.js";
import * as store from "./store.js";

const narrow = matchMedia("(max-width: 860px)");
const NAMES = ["side", "insight"];

export class Panels {
  /** changed(): what is shown in them may have another size. */
  constructor(changed) {
    this.changed = changed;
    this.looked = store.inside() === true; // whether what happens inside is worth telling
    for (const name of NAMES) {
      at(`toggle-${name}`).addEventListener("click", () => {
        this.set(name, at(name).hidden);
        if (name === "insight" && !narrow.matches) store.keepInside(!at(name).hidden);
        if (at(name).hidden) return;
        this.looked ||= name === "insight";
        if (narrow.matches) at(name).focus();
      });
    }
    at("shade").addEventListener("click", () => this.closeDrawers());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.drawer) this.closeDrawers(event.preventDefault());
    });
    narrow.addEventListener("change", () => this.arrange());
    this.arrange();
  }

  /** As they are at first: both drawers closed; the column *Inside* folded until it has a use. */
  arrange() {
    this.set("side", !narrow.matches);
    this.set("insight", !narrow.matches && store.inside() === true);
  }

  /** The drawer that is open, by name. */
  get drawer() {
    return narrow.matches ? NAMES.find((name) => !at(name).hidden) : undefined;
  }

  open(name) {
    this.set(name, true);
    this.looked ||= name === "insight";
    if (narrow.matches) at(name).focus();
  }

  /** There is something to see in *Inside*: it opens where it hides nothing, unless it was closed. */
  unfold() {
    if (narrow.matches || store.inside() === false) return;
    this.set("insight", true);
    this.looked = true;
  }

  closeDrawers() {
    const name = this.drawer;
    if (!name) return;
    this.set(name, false);
    at(`toggle-${name}`).focus();
  }

  set(name, shown) {
    at(name).hidden = !shown;
    at(`toggle-${name}`).setAttribute("aria-expanded", shown);
    const other = NAMES.find((one) => one !== name);
    if (shown && narrow.matches && !at(other).hidden) this.set(other, false);
    at("shade").hidden = !this.drawer;
    document.querySelector("main").inert = Boolean(this.drawer);
    this.changed();
  }
}
