// What markdown-it does not know by itself: boxes of task lists, and formulas, which stay text.

const TASK = /^\[([ xX])\]\s+/;

/** A list's item that begins with `[ ]` or `[x]` begins with a box. */
function tasks(state) {
  state.tokens.forEach((token, i, all) => {
    const [item, first] = [all[i - 2], token.children?.[0]];
    if (token.type !== "inline" || item?.type !== "list_item_open" || first?.type !== "text") return;
    const found = TASK.exec(first.content);
    if (!found) return;
    first.content = first.content.slice(found[0].length);
    const box = new state.Token("task", "", 0);
    box.meta = { done: found[1] !== " " };
    token.children.unshift(box);
    item.attrJoin("class", "task");
  });
}

const FORMULA = /\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$|\$(?![\s$])[^$\n]*?[^\s$\\]\$(?!\d)/sy;

/** Stars and underscores within a formula are the formula's. */
function formula(state, silent) {
  FORMULA.lastIndex = state.pos;
  const found = FORMULA.exec(state.src);
  if (!found) return false;
  if (!silent) state.push("formula", "", 0).content = found[0];
  state.pos += found[0].length;
  return true;
}

export function withOurRules(parser) {
  parser.core.ruler.push("tasks", tasks);
  parser.inline.ruler.before("escape", "formula", formula);
  return parser;
}
