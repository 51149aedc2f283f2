// The Read view of a text: its turns, with Markdown rendered. The same text as the tokens, one click away.

import { resumeWriting, setFault } from "../actions.js";
import { copyText, html, useChanges, useEffect, useRef } from "../lib.js";
import { changed, currentBranch, isTemplate, on, promptLength, state } from "../state.js";
import { regenerate } from "./cursor.js";
import { editRange, isControl, tokenOf } from "./document.js";
import { renderMarkdown } from "./markdown.js";

const NEAR_END = 80; // px

/** The turns of a text: `{role, text, thought, first, last}`; the token positions of its words, and what they say. */
export function turnsOf(branch) {
  const shift = promptLength(branch);
  const { messages, spans, text } = branch.prompt;
  const turns = [];
  if (messages) {
    messages.forEach(({ role, content }, number) => {
      const span = spans[number];
      const place = span?.content ?? (content === "" && span ? [span.start, span.start] : null);
      turns.push({ role, text: typeof content === "string" ? content : "", thought: "", first: place?.[0] ?? null, last: place?.[1] ?? null });
    });
  } else turns.push({ role: "text", text, thought: "", first: 0, last: shift });
  const add = (role, first, last) => {
    let [thought, words] = ["", ""];
    for (let at = first; at < last; at += 1) {
      const step = branch.steps[at];
      if (step.thought) thought += step.text;
      else words += step.text;
    }
    let end = last;
    while (end > first && isControl(branch.steps[end - 1])) end -= 1;
    if (messages) turns.push({ role, text: words, thought, first: shift + first, last: shift + end });
    else Object.assign(turns[0], { text: turns[0].text + words, last: shift + end });
  };
  let at = 0;
  for (const { role, start, end, content } of branch.turns ?? []) {
    add("assistant", at, start);
    if (content) add(role, ...content);
    at = end;
  }
  if (at < branch.steps.length || !messages) add("assistant", at, branch.steps.length);
  return turns;
}

const ROLES = { user: "You", assistant: "Model", system: "System", tool: "Tool", text: "" };

export function Reader() {
  const box = useRef();
  useChanges("current", "writing");
  useEffect(() => mountReader(box.current), []);
  return html`<div class="text-box reader" id="text" ref=${box} tabindex="0" role="group" data-branch=${state.current ?? ""}
    aria-label="The text, rendered" aria-busy=${state.writing !== null}></div>`;
}

function mountReader(box) {
  let articles = []; // {turn, element, body, thought}
  let shownBranch = null;
  let follows = state.writing !== null;

  const draw = () => {
    const branch = currentBranch();
    if (!branch?.prompt) return box.replaceChildren();
    if (shownBranch !== branch.id) {
      shownBranch = branch.id;
      for (const article of articles) article.stopEditing();
    }
    const turns = turnsOf(branch);
    turns.forEach((turn, number) => {
      if (articles[number]?.turn.role !== turn.role) {
        for (const old of articles.splice(number)) old.element.remove();
        articles.push(newArticle(box, turn.role));
      }
      articles[number].update(turn, branch);
    });
    for (const old of articles.splice(turns.length)) old.element.remove();
    return follows && scrollToEnd();
  };
  const scrollToEnd = () => { box.scrollTop = box.scrollHeight; };
  const scrolled = () => { follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END; };
  box.addEventListener("scroll", scrolled, { passive: true });
  const onWriting = () => {
    if (state.writing) follows = true;
    draw();
  };
  const leave = [on("steps", draw), on("current", draw), on("writing", onWriting)];
  // Kept, because a press on a button ends the selection.
  let selected = null;
  const onSelection = () => {
    const selection = document.getSelection();
    const range = selection.rangeCount ? selection.getRangeAt(0) : null;
    if (range && !range.collapsed && box.contains(range.commonAncestorContainer)) selected = tokensOfRange(articles, range) ?? selected;
  };
  const forgetSelection = () => { selected = null; };
  document.addEventListener("selectionchange", onSelection);
  box.addEventListener("pointerdown", forgetSelection);
  draw();
  showSelected(articles);
  return () => {
    document.removeEventListener("selectionchange", onSelection);
    if (selected) {
      Object.assign(state, selected);
      changed("selection", "span");
    }
    leave.forEach((stop) => stop());
    box.removeEventListener("scroll", scrolled);
  };
}

// -- one turn -----------------------------------------------------------------------------------------

function newArticle(box, role) {
  const element = document.createElement("article");
  element.className = `turn turn-${role}`;
  const head = document.createElement("header");
  const name = document.createElement("h2");
  name.textContent = ROLES[role] ?? role;
  const thought = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "Reasoning";
  const thoughtBody = document.createElement("div");
  thought.append(summary, thoughtBody);
  const body = document.createElement("div");
  body.className = "md";
  let turn = { role, text: null };
  let form = null;
  const button = (label, act, title) => {
    const control = document.createElement("button");
    Object.assign(control, { type: "button", className: "button plain tiny", textContent: label, title });
    control.addEventListener("click", () => Promise.resolve(act(control)).catch(setFault));
    head.append(control);
    return control;
  };
  head.append(name);
  button("Copy", async (control) => {
    control.textContent = (await copyText(turn.text)) ? "Copied" : "Not allowed";
    setTimeout(() => { control.textContent = "Copy"; }, 1500);
  }, "Copy the text of this turn");
  const edit = button("Edit", () => startEdit(), "Edit this turn");
  const again = role === "assistant" && button("Regenerate", () => regenerate(turn.first - promptLength(currentBranch())), "Write this turn again; the old one stays as a branch");
  element.append(head, thought, body);
  box.append(element);

  const stopEditing = () => {
    form?.remove();
    form = null;
    body.hidden = false;
  };
  const startEdit = () => {
    if (form) return;
    const save = async (after) => {
      const words = form.querySelector("textarea").value;
      const branch = await editRange(currentBranch(), turn.first, turn.last, words, { after });
      if (!branch) return; // the words stay in the form
      stopEditing();
      if (after === "drop") await resumeWriting({ isPart: true });
    };
    form = editForm(turn, save, () => { stopEditing(); edit.focus(); });
    body.hidden = true;
    element.append(form);
    form.querySelector("textarea").focus();
  };
  return {
    get turn() { return turn; },
    element, body, stopEditing,
    update(next, branch) {
      const canChange = next.first !== null && !branch.recorded && state.writing === null;
      edit.disabled = !canChange;
      if (again) again.disabled = !canChange;
      thought.hidden = next.thought === "";
      if (next.thought !== turn.thought) renderMarkdown(thoughtBody, next.thought);
      if (next.text !== turn.text) renderMarkdown(body, next.text);
      turn = next;
    },
  };
}

function editForm(turn, save, cancel) {
  const form = document.createElement("form");
  form.className = "turn-form";
  const field = document.createElement("textarea");
  Object.assign(field, { className: "field", value: turn.text, dir: "auto", ariaLabel: "Text of this turn" });
  form.append(field);
  const row = document.createElement("div");
  row.className = "row";
  const add = (label, act, isMain = false) => {
    const control = document.createElement("button");
    Object.assign(control, { type: "button", className: `button tiny ${isMain ? "main" : ""}`, textContent: label });
    control.addEventListener("click", act);
    row.append(control);
  };
  const isUser = turn.role === "user" || turn.role === "system";
  if (isUser) add("Send again", () => save("drop"), true);
  add(isUser ? "Only change" : "Save", () => save("keep"), !isUser);
  add("Cancel", cancel);
  form.addEventListener("submit", (event) => event.preventDefault());
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save(isUser ? "drop" : "keep");
    else return;
    event.stopPropagation();
    event.preventDefault();
  });
  form.append(row);
  return form;
}

// -- the selection, carried over between the two views --------------------------------------------------

/** Scroll to the turn of the selected token, and select its words. */
function showSelected(articles) {
  const branch = currentBranch();
  if (!branch || (state.selected === null && state.span === null)) return;
  const [first, last] = state.span ? [state.span.first, state.span.last] : [state.selected, state.selected + 1];
  const article = articles.find(({ turn }) => turn.first !== null && turn.first <= first && first < turn.last);
  if (!article) return;
  let words = "";
  for (let at = first; at < last; at += 1) words += tokenOf(branch, at).text;
  let before = "";
  for (let at = article.turn.first; at < first; at += 1) before += tokenOf(branch, at).text;
  const count = before.split(words.trim()).length; // which occurrence it is
  const range = findText(article.body, words.trim(), count);
  if (range) {
    document.getSelection().removeAllRanges();
    document.getSelection().addRange(range);
    range.startContainer.parentElement.scrollIntoView({ block: "nearest" });
  } else article.element.scrollIntoView({ block: "nearest" });
}

/** The range of the n-th occurrence of some words, which may be over several text nodes; null if there is none. */
function findText(box, words, occurrence) {
  if (!words) return null;
  const nodes = [];
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  let text = "";
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    nodes.push({ node, start: text.length });
    text += node.data;
  }
  let place = -1;
  for (let number = 0; number < occurrence; number += 1) {
    const next = text.indexOf(words, place + 1);
    if (next < 0) break;
    place = next;
  }
  if (place < 0) return null;
  const nodeAt = (character) => nodes.findLast(({ start }) => start <= character);
  const [from, to] = [nodeAt(place), nodeAt(place + words.length - 1)];
  const range = document.createRange();
  range.setStart(from.node, place - from.start);
  range.setEnd(to.node, place + words.length - to.start);
  return range;
}

/** The tokens of the words that are selected here, as `{selected, span}`; null if they are not found. */
function tokensOfRange(articles, range) {
  const branch = currentBranch();
  if (!branch) return null;
  const article = articles.find(({ body }) => body.contains(range.startContainer));
  if (!article || article.turn.first === null) return null;
  const words = range.toString().split("\n")[0].trim();
  if (!words) return null;
  const lead = document.createRange();
  lead.setStart(article.body, 0);
  lead.setEnd(range.startContainer, range.startOffset);
  const occurrence = lead.toString().split(words).length;
  let text = "";
  const starts = [];
  for (let at = article.turn.first; at < article.turn.last; at += 1) {
    starts.push(text.length);
    text += isTemplate(branch, at) ? "" : tokenOf(branch, at).text;
  }
  let place = -1;
  for (let number = 0; number < occurrence; number += 1) {
    const next = text.indexOf(words, place + 1);
    if (next < 0) break;
    place = next;
  }
  if (place < 0) return null;
  const tokenAtCharacter = (character) => article.turn.first + starts.findLastIndex((start) => start <= character);
  const [first, last] = [tokenAtCharacter(place), tokenAtCharacter(place + words.length - 1) + 1];
  return { selected: first, span: last - first > 1 ? { branch: branch.id, first, last, isRequested: false } : null };
}
