// Markdown as DOM nodes. No HTML is ever parsed: the lexer's tokens become elements, and tags in a text stay text.
// A text that grows keeps the elements of the blocks that did not change.

import { copyText } from "../lib.js";
import { lexer } from "../vendor/marked.js";
import Prism from "../vendor/prism.js";

const SAFE_LINK = /^(https?:|mailto:)/i;
const LANGUAGES = { js: "javascript", ts: "typescript", py: "python", sh: "bash", shell: "bash", yml: "yaml", html: "markup", xml: "markup", "c++": "cpp", rs: "rust" };
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: "\"", "#39": "'", nbsp: "\u00a0" };

const decode = (text) => text.replace(/&(amp|lt|gt|quot|#39|nbsp);/g, (_, name) => ENTITIES[name]);

function element(name, children = [], properties = {}) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

/** Render a text into an element; blocks that are the same as before stay. */
export function renderMarkdown(box, text) {
  const blocks = lexer(text, { gfm: true }).filter(({ type }) => type !== "space" && type !== "def");
  const before = box.renderedBlocks ?? [];
  let numSame = 0;
  while (numSame < before.length && numSame < blocks.length && before[numSame] === blocks[numSame].raw) numSame += 1;
  while (box.children.length > numSame) box.lastElementChild.remove();
  for (const block of blocks.slice(numSame)) box.append(blockElement(block));
  box.renderedBlocks = blocks.map(({ raw }) => raw);
}

const withDirection = (node) => Object.assign(node, { dir: "auto" });

function blockElement(token) {
  const make = BLOCKS[token.type];
  return withDirection(make ? make(token) : element("p", [document.createTextNode(token.raw)]));
}

const blocks = (tokens) => tokens.filter(({ type }) => type !== "space").map(blockElement);
const inline = (tokens) => (tokens ?? []).map((token) => (INLINE[token.type] ?? plain)(token));
const plain = (token) => document.createTextNode(token.raw);

const BLOCKS = {
  heading: ({ depth, tokens }) => element(`h${Math.min(6, depth + 2)}`, inline(tokens)), // below those of the page
  paragraph: ({ tokens }) => element("p", inline(tokens)),
  text: (token) => element("p", token.tokens ? inline(token.tokens) : [document.createTextNode(decode(token.text))]),
  blockquote: ({ tokens }) => element("blockquote", blocks(tokens)),
  hr: () => element("hr"),
  html: ({ raw }) => element("p", [document.createTextNode(raw)]),
  code: codeBlock,
  list: ({ ordered, start, items }) => element(ordered ? "ol" : "ul", items.map(listItem), ordered && start !== 1 ? { start } : {}),
  table: ({ header, rows, align }) => {
    const row = (name) => (cells) => element("tr", cells.map((cell, at) => {
      const node = withDirection(element(name, inline(cell.tokens)));
      if (align[at]) node.style.textAlign = align[at];
      return node;
    }));
    return element("div", [element("table", [
      element("thead", [row("th")(header)]), element("tbody", rows.map(row("td")))])], { className: "md-table", tabIndex: 0 });
  },
};

function listItem({ tokens, loose, task, checked }) {
  const children = tokens.flatMap((token) => {
    if (token.type === "checkbox") return [];
    return token.type === "text" && !loose ? inline(token.tokens ?? [token]) : blocks([token]);
  });
  if (task) children.unshift(element("input", [], { type: "checkbox", checked, disabled: true, ariaLabel: checked ? "done" : "open" }));
  return withDirection(element("li", children));
}

const INLINE = {
  text: (token) => (token.tokens ? span(inline(token.tokens)) : document.createTextNode(decode(token.text))),
  escape: ({ text }) => document.createTextNode(decode(text)),
  strong: ({ tokens }) => element("strong", inline(tokens)),
  em: ({ tokens }) => element("em", inline(tokens)),
  del: ({ tokens }) => element("del", inline(tokens)),
  codespan: ({ text }) => element("code", [document.createTextNode(text)]),
  br: () => element("br"),
  link: (token) => (SAFE_LINK.test(token.href) ? outside(token.href, inline(token.tokens)) : plain(token)),
  // Not loaded: a request would tell its server that the text is read.
  image: ({ href, text }) => (SAFE_LINK.test(href) ? outside(href, [`Image: ${text || href}`]) : document.createTextNode(text)),
};

const span = (children) => element("span", children);
const outside = (href, children) => element("a", children, { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href });

function codeBlock({ text, lang }) {
  const name = (lang ?? "").trim().split(/\s/)[0].toLowerCase();
  const grammar = Prism.languages[LANGUAGES[name] ?? name];
  const code = element("code", typeof grammar === "object" ? colored(Prism.tokenize(text, grammar)) : [text]);
  const copy = element("button", ["Copy"], { type: "button", className: "button tiny", ariaLabel: "Copy the code" });
  copy.addEventListener("click", async () => {
    copy.textContent = (await copyText(text)) ? "Copied" : "Not allowed";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  return element("div", [
    element("div", [element("span", [name], { className: "quiet" }), copy], { className: "md-code-head" }),
    element("pre", [code], { tabIndex: 0, dir: "ltr" })], { className: "md-code" });
}

function colored(tokens) {
  return tokens.map((token) => {
    if (typeof token === "string") return document.createTextNode(token);
    const content = Array.isArray(token.content) ? token.content : [token.content];
    return element("span", colored(content), { className: `code-${token.type}` });
  });
}
