// Markdown to DOM nodes. Text of the model becomes text nodes and nothing else; links must be http, https or mailto.

const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([^*\s][\s\S]*?)\*\*|\*([^*\s][^*]*?)\*|~~([^~]+)~~|\[([^\]]+)\]\(([^()\s]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/;

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function inline(text, depth = 0) {
  const nodes = [];
  while (text) {
    const found = depth < 8 ? INLINE.exec(text) : null;
    if (!found) break;
    if (found.index) nodes.push(text.slice(0, found.index));
    const [whole, , code, bold, italic, struck, label, target, bare] = found;
    if (code !== undefined) nodes.push(element("code", {}, code.replace(/^ (.*) $/s, "$1")));
    else if (bold !== undefined) nodes.push(element("strong", {}, ...inline(bold, depth + 1)));
    else if (italic !== undefined) nodes.push(element("em", {}, ...inline(italic, depth + 1)));
    else if (struck !== undefined) nodes.push(element("s", {}, ...inline(struck, depth + 1)));
    else nodes.push(link(bare ?? target, bare ? [bare] : inline(label, depth + 1), whole));
    text = text.slice(found.index + whole.length);
  }
  if (text) nodes.push(text);
  return nodes;
}

function link(target, children, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return whole;
  return element("a", { href: target, rel: "noopener noreferrer nofollow", target: "_blank" }, ...children);
}

function codeBlock(lines, language) {
  const text = lines.join("\n");
  const copy = element("button", { type: "button", className: "quiet copy" }, "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  const head = element("div", { className: "code-head" }, element("span", {}, language || "text"), copy);
  return element("div", { className: "code" }, head, element("pre", {}, element("code", {}, text)));
}

export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = label; }, 1200);
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const ROW = /^\s*\|(.+)\|\s*$/;
const RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// Blocks of a list of lines, as nodes.
function blocks(lines, depth = 0) {
  const nodes = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (fence) {
      const body = [];
      i += 1;
      while (i < lines.length && !(lines[i].trim().startsWith(fence[1]) && !lines[i].trim().slice(fence[1].length).trim())) {
        body.push(lines[i]);
        i += 1;
      }
      i += 1;
      nodes.push(codeBlock(body, fence[2]));
    } else if (!line.trim()) {
      i += 1;
    } else if (/^#{1,6}\s/.test(line)) {
      const level = Math.min(6, line.indexOf(" ") + 1);
      nodes.push(element(`h${level}`, {}, ...inline(line.replace(/^#+\s+|\s+#+$/g, ""))));
      i += 1;
    } else if (/^ {0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      nodes.push(element("hr"));
      i += 1;
    } else if (/^\s*>/.test(line) && depth < 6) {
      const body = [];
      while (i < lines.length && /^\s*>/.test(lines[i])) body.push(lines[i++].replace(/^\s*> ?/, ""));
      nodes.push(element("blockquote", {}, ...blocks(body, depth + 1)));
    } else if (ITEM.test(line) && depth < 6) {
      i = list(lines, i, nodes, depth);
    } else if (ROW.test(line) && i + 1 < lines.length && RULE.test(lines[i + 1])) {
      i = table(lines, i, nodes);
    } else {
      const body = [line];
      i += 1;
      while (i < lines.length && lines[i].trim() && !FENCE.test(lines[i]) && !/^#{1,6}\s|^\s*>/.test(lines[i]) && !ITEM.test(lines[i])) body.push(lines[i++]);
      nodes.push(element("p", {}, ...withBreaks(body)));
    }
  }
  return nodes;
}

function withBreaks(lines) {
  const nodes = [];
  for (const [n, piece] of inline(lines.join("\n")).entries()) {
    if (typeof piece !== "string") nodes.push(piece);
    else piece.split("\n").forEach((part, k) => nodes.push(...(k ? [element("br"), part] : [part])));
  }
  return nodes;
}

function list(lines, start, nodes, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const ordered = /\d/.test(mark);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(mark, 10);
  let i = start;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length !== indent.length || /\d/.test(item[2]) !== ordered) break;
    const body = [item[3]];
    i += 1;
    const deeper = (line) => line.trim() === "" || line.length - line.trimStart().length > indent.length;
    while (i < lines.length && deeper(lines[i]) && !(lines[i].trim() === "" && !(i + 1 < lines.length && lines[i + 1].trim() && deeper(lines[i + 1])))) {
      body.push(lines[i].slice(Math.min(indent.length + 2, lines[i].length - lines[i].trimStart().length)));
      i += 1;
    }
    const [first, ...rest] = blocks(body, depth + 1);
    const plain = first && first.tagName === "P" ? [...first.childNodes] : first ? [first] : [];
    made.append(element("li", {}, ...plain, ...rest));
    while (i < lines.length && !lines[i].trim() && i + 1 < lines.length && ITEM.test(lines[i + 1])) i += 1;
  }
  nodes.push(made);
  return i;
}

function table(lines, start, nodes) {
  const cells = (line, kind) => element("tr", {}, ...ROW.exec(line)[1].split("|").map((cell) => element(kind, {}, ...inline(cell.trim()))));
  const body = element("tbody");
  let i = start + 2;
  while (i < lines.length && ROW.test(lines[i])) body.append(cells(lines[i++], "td"));
  nodes.push(element("div", { className: "scroll" }, element("table", {}, element("thead", {}, cells(lines[start], "th")), body)));
  return i;
}

export function render(target, text) {
  target.replaceChildren(...blocks(text.replace(/\r\n?/g, "\n").split("\n")));
}
