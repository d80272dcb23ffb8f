// Markdown as elements. markdown-it parses, and what it finds becomes elements here, one by one:
// text never becomes HTML, so whatever a model writes, nothing of it can run.

import { make } from "./dom.js";
import { withOurRules } from "./rules.js";
import MarkdownIt from "./vendor/markdown-it.js";

const parser = withOurRules(new MarkdownIt({ html: false, linkify: true, breaks: true }));
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // main.py is no address

const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote hr strong em s thead tbody tr th td br".split(" "),
);
const heading = (tag) => (/^h[1-6]$/.test(tag) ? `h${Math.min(6, Number(tag[1]) + 2)}` : tag);

function link(token) {
  const target = token.attrGet("href") ?? token.attrGet("src") ?? "";
  if (!/^https?:\/\//i.test(target)) return make("span");
  const title = token.attrGet("title");
  const safe = { href: target, rel: "noopener noreferrer nofollow", target: "_blank" };
  return make("a", undefined, title ? { ...safe, title } : safe);
}

function codeBlock(token) {
  const box = make("div", undefined, { class: "code" });
  const head = make("div", undefined, { class: "head" });
  const language = /^[\w+#.-]*/.exec(token.info)[0];
  head.append(
    make("span", language || "code"),
    make("button", "Copy", { type: "button", class: "small", "data-copy": "" }),
  );
  const pre = make("pre", undefined, { tabindex: "0" });
  pre.append(make("code", token.content.replace(/\n$/, "")));
  box.append(head, pre);
  return box;
}

/** What a token is without what is inside it. */
function element(token) {
  if (token.type === "table_open") return make("table");
  if (token.type === "link_open") return link(token);
  if (!TAGS.has(token.tag)) return make("span");
  const found = make(heading(token.tag));
  const start = token.attrGet("start");
  if (start) found.setAttribute("start", start);
  if (token.attrGet("class") === "task") found.className = "task";
  const aligned = /text-align:(\w+)/.exec(token.attrGet("style") ?? "");
  if (aligned) found.classList.add(aligned[1]);
  return found;
}

function leaf(token) {
  switch (token.type) {
    case "fence":
    case "code_block":
      return codeBlock(token);
    case "code_inline":
      return make("code", token.content);
    case "formula":
      return make("span", token.content, { class: "formula" });
    case "image": {
      const shown = link(token);
      shown.textContent = token.content || token.attrGet("src");
      return shown;
    }
    case "task": {
      const box = make("input", undefined, { type: "checkbox", disabled: "" });
      box.checked = token.meta.done;
      return box;
    }
    case "softbreak":
    case "hardbreak":
      return make("br");
    case "hr":
      return make("hr");
    default:
      return document.createTextNode(token.content);
  }
}

function build(parent, tokens) {
  const open = [parent];
  for (const token of tokens) {
    if (token.hidden) continue; // the paragraph of a short item
    if (token.type === "inline") build(open.at(-1), token.children);
    else if (token.nesting === 1) {
      const made = element(token);
      if (token.type === "table_open") {
        const room = make("div", undefined, { class: "scroll", tabindex: "0" });
        room.append(made);
        open.at(-1).append(room);
      } else open.at(-1).append(made);
      open.push(made);
    } else if (token.nesting === -1) open.pop();
    else open.at(-1).append(leaf(token));
  }
}

/** The elements of a text; one that is cut anywhere is shown as far as it goes. */
export function markdown(text) {
  const found = document.createDocumentFragment();
  build(found, parser.parse(text, {}));
  return found;
}
