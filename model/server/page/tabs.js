// Views of which one is shown at a time.

import { at } from "./dom.js";

/**
 * Views by their ids, each with a tab `tab-ID`; opened(name): another one is shown.
 * Returns what opens one of them.
 */
export function tabs(names, opened) {
  const open = (name) => {
    for (const one of names) {
      at(`tab-${one}`).setAttribute("aria-selected", one === name);
      at(`tab-${one}`).tabIndex = one === name ? 0 : -1;
      at(one).hidden = one !== name;
    }
    opened(name);
  };
  names.forEach((name, i) => {
    at(`tab-${name}`).addEventListener("click", () => open(name));
    at(`tab-${name}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: names.length - 1 }[event.key];
      if (!step) return;
      const next = names[(i + step) % names.length];
      open(next);
      at(`tab-${next}`).focus();
    });
  });
  return open;
}
