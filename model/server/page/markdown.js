// Markdown as elements. Text never becomes HTML: whatever a model writes, nothing of it can run.

const INLINE = new RegExp(
  [
    "(`+)([\\s\\S]+?)\\1(?!`)", // 1, 2: code
    "\\*\\*(?=\\S)([\\s\\S]+?)\\*\\*", // 3: strong
    "(?<![\\w*])[*_](?=\\S)([^*_]+?)[*_](?![\\w*])", // 4: emphasis
    "~~(?=\\S)([\\s\\S]+?)~~", // 5: struck
    "\\[([^\\]]+)\\]\\((\\S+?)\\)", // 6, 7: link
    "(https?://[^\\s<>\"')\\]]+)", // 8: bare link
  ].join("|"),
);

export function make(name, text, attributes = {}) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function link(target, text) {
  if (!/^https?:\/\//i.test(target)) return document.createTextNode(text);
  return make("a", text, { href: target, rel: "noopener noreferrer nofollow", target: "_blank" });
}

function inline(parent, text) {
  let rest = text;
  for (let found; rest && (found = INLINE.exec(rest)); ) {
    if (found.index) parent.append(rest.slice(0, found.index));
    const [all, , code, strong, emphasis, struck, label, target, bare] = found;
    if (code !== undefined) parent.append(make("code", code.trim() || code));
    else if (label !== undefined) parent.append(link(target, label));
    else if (bare !== undefined) parent.append(link(bare, bare));
    else {
      const name = strong !== undefined ? "strong" : emphasis !== undefined ? "em" : "s";
      const element = make(name);
      inline(element, strong ?? emphasis ?? struck);
      parent.append(element);
    }
    rest = rest.slice(found.index + all.length);
  }
  if (rest) parent.append(rest);
}

function codeBlock(language, text) {
  const box = make("div", undefined, { class: "code" });
  const head = make("div", undefined, { class: "head" });
  const copy = make("button", "Copy", { type: "button", class: "small", "data-copy": "" });
  head.append(make("span", language || "code"), copy);
  const pre = make("pre", undefined, { tabindex: "0" });
  pre.append(make("code", text));
  box.append(head, pre);
  return box;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ROW = /^\s*\|.*\|\s*$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

const begins = (line) =>
  [FENCE, ITEM, HEADING, RULE, QUOTE].some((pattern) => pattern.test(line));

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function list(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const element = make(ordered ? "ol" : "ul");
  if (ordered && parseInt(mark, 10) !== 1) element.setAttribute("start", parseInt(mark, 10));
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length < indent.length) break;
    if (found[1].length > indent.length + 1) {
      const [inner, next] = list(lines, at);
      (element.lastElementChild ?? element).append(inner);
      at = next;
      continue;
    }
    if (/\d/.test(found[2]) !== ordered) break;
    const item = make("li");
    let text = found[3];
    for (at++; at < lines.length && lines[at].trim() && !begins(lines[at]); at++) {
      text += "\n" + lines[at].trim();
    }
    inline(item, text);
    element.append(item);
    if (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at++;
  }
  return [element, at];
}

function table(lines, at) {
  const element = make("table");
  const row = (name, texts, parent) => {
    const line = make("tr");
    for (const text of texts) {
      const cell = make(name);
      inline(cell, text);
      line.append(cell);
    }
    parent.append(line);
  };
  const head = make("thead");
  const body = make("tbody");
  row("th", cells(lines[at]), head);
  for (at += 2; at < lines.length && ROW.test(lines[at]); at++) row("td", cells(lines[at]), body);
  element.append(head, body);
  return [element, at];
}

/** The elements of a text; one that is cut anywhere is shown as far as it goes. */
export function markdown(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const found = document.createDocumentFragment();
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    let match;
    if (!line.trim()) at++;
    else if ((match = FENCE.exec(line))) {
      const code = [];
      for (at++; at < lines.length; at++) {
        if (lines[at].trim().startsWith(match[1]) && !lines[at].trim().replace(/^[`~]+/, "")) break;
        code.push(lines[at]);
      }
      at++;
      found.append(codeBlock(match[2], code.join("\n")));
    } else if ((match = HEADING.exec(line))) {
      const heading = make(`h${Math.min(6, match[1].length + 2)}`);
      inline(heading, match[2]);
      found.append(heading);
      at++;
    } else if (RULE.test(line)) {
      found.append(make("hr"));
      at++;
    } else if (QUOTE.test(line)) {
      const quoted = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at++) quoted.push(lines[at].replace(QUOTE, ""));
      const quote = make("blockquote");
      quote.append(markdown(quoted.join("\n")));
      found.append(quote);
    } else if (ITEM.test(line)) {
      const [element, next] = list(lines, at);
      found.append(element);
      at = next;
    } else if (ROW.test(line) && TABLE_RULE.test(lines[at + 1] ?? "")) {
      const [element, next] = table(lines, at);
      found.append(element);
      at = next;
    } else {
      const paragraph = [line];
      for (at++; at < lines.length && lines[at].trim() && !begins(lines[at]); at++) paragraph.push(lines[at]);
      const element = make("p");
      paragraph.forEach((part, i) => {
        if (i) element.append(make("br"));
        inline(element, part);
      });
      found.append(element);
    }
  }
  return found;
}
