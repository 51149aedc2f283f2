// Editing the text in place: typing, deleting, pasting and input methods, anywhere in prompt, turns and answer.
//
// What is typed is a draft: a range of tokens and the text that replaces it, shown without delay. After a pause it is sent;
// the server tokenizes what changed, in a new branch, and then scores what follows. A draft that cannot be sent stays
// on the page and in the browser's storage, and is sent when the server answers again.

import { attempt, pushUndo, redo, setCurrent, shorten, undo } from "../actions.js";
import { api } from "../api.js";
import { clamp, isNarrow, storage } from "../lib.js";
import { adopt, changed, currentBranch, isTemplate, on, promptLength, state, textLength } from "../state.js";
import { placeOf } from "./history.js";
import { endGhosts, hasGhosts, onGhostKey } from "./cursor.js";

const PAUSE_MS = 300; // without typing, before a draft is sent
const MAX_DRAFTS = 20;
const DRAFTS = "drafts"; // in the storage: drafts that were not sent, by branch

let pane = null; // what pane.js gives: {box, body, spans, tokens}
let draft = null; // {branch, first, last, text, caret, span, isSending, fails}
let timer = 0;
let isComposing = false;
let session = null; // {branch, before, end}: edits that continue the last one change the same branch
let scoring = null; // an AbortController

// -- the text as characters -------------------------------------------------------------------------

/** The prompt token or step at a position. */
export const tokenOf = (branch, at) => {
  const promptTokens = promptLength(branch);
  return at < promptTokens ? branch.prompt.tokens[at] : branch.steps[at - promptTokens];
};

export const isControl = (token) => token.text === "" && /^<.*>$/.test(token.piece ?? "");

/** The text of the tokens from `first` to before `last`, without those of the chat template; turns are paragraphs. */
export function readableText(branch, first, last) {
  let text = "";
  let isBreak = false;
  for (let at = first; at < last; at += 1) {
    const token = tokenOf(branch, at);
    if (isTemplate(branch, at) || isControl(token)) isBreak = true;
    else if (token.text) {
      text += (isBreak && text ? "\n\n" : "") + token.text;
      isBreak = false;
    }
  }
  return text;
}

export const textBetween = (branch, first, last) => {
  let text = "";
  for (let at = first; at < last; at += 1) text += tokenOf(branch, at).text;
  return text;
};

/** The token and the offset in it of a character of the text. */
function pointAtCharacter(branch, character) {
  let remaining = character;
  const length = textLength(branch);
  for (let at = 0; at < length; at += 1) {
    const size = tokenOf(branch, at).text.length;
    if (remaining <= size && size > 0) return { at, offset: remaining };
    remaining -= size;
  }
  return { at: length - 1, offset: tokenOf(branch, length - 1)?.text.length ?? 0 };
}

// -- points: {at, offset} in a token, or {draft: true, offset} ---------------------------------------

/** The point of a DOM position; null outside the text. */
function pointOf(node, offset) {
  if (!pane.body.contains(node)) return null;
  const element = node.nodeType === Node.TEXT_NODE ? node.parentElement : node;
  const token = element.closest(".draft, .t");
  if (token) {
    const numShown = token.textContent.length;
    const within = node.nodeType === Node.TEXT_NODE ? offset : offset && numShown;
    if (token.classList.contains("draft")) return { draft: true, offset: within };
    const at = Number(token.dataset.at);
    const { length } = pane.tokens[at].text;
    return { at, offset: numShown === length ? within : within && length }; // a mark in place of the text: whole or not
  }
  const children = [...element.childNodes];
  const after = children[offset];
  const next = after && (after.matches?.(".draft, .t") ? after : after.querySelector?.(".draft, .t"));
  if (next) return pointOf(next, 0);
  const inside = [...(children[offset - 1] ?? element).querySelectorAll?.(".draft, .t") ?? []];
  const last = inside.at(-1) ?? (children[offset - 1]?.matches?.(".draft, .t") ? children[offset - 1] : null);
  return last ? pointOf(last, last.childNodes.length) : null;
}

/** The selection as two points, in order; null if it is not in the text. */
export function selectedPoints() {
  const selection = document.getSelection();
  if (!pane || !selection.rangeCount) return null;
  const range = selection.getRangeAt(0);
  const [from, to] = [pointOf(range.startContainer, range.startOffset), pointOf(range.endContainer, range.endOffset)];
  return from && to ? { from, to, isCollapsed: range.collapsed } : null;
}

/** The tokens of a range of points: {first, last, head, tail}; head and tail are what stays of the outer tokens. */
function tokenRange(branch, from, to) {
  const start = tokenOf(branch, from.at)?.text ?? "";
  const end = tokenOf(branch, to.at)?.text ?? "";
  const [startsAfter, endsBefore] = [from.offset >= start.length && from.offset > 0, to.offset === 0];
  const first = startsAfter ? from.at + 1 : from.at;
  const last = Math.max(first, endsBefore ? to.at : to.at + 1);
  const range = { first, last, head: startsAfter ? "" : start.slice(0, from.offset), tail: endsBefore || last === first ? "" : end.slice(to.offset) };
  return keepCharacters(branch, range);
}

/** Move the ends of a range out of characters that several tokens make. */
function keepCharacters(branch, { first, last, head, tail }) {
  if (tail === "" && last > first && isUnfinished(branch, last - 1)) {
    while (last > first && isUnfinished(branch, last - 1) && tokenOf(branch, last - 1).text === "") last -= 1;
    if (last > first && isUnfinished(branch, last - 1)) [last, tail] = endOfCharacter(branch, last);
  }
  let start = first;
  while (start > 0 && isUnfinished(branch, start - 1)) start -= 1;
  if (start === first) return { first, last, head, tail };
  const { text } = tokenOf(branch, start);
  if (first === last) {
    if (text === "") return { first: start, last: start, head, tail };
    [last, tail] = endOfCharacter(branch, first);
  }
  return { first: start, last, head: text + head, tail };
}

/** The token after a character that continues at a position, and the text of its last token. */
function endOfCharacter(branch, position) {
  let at = position;
  while (at < textLength(branch) - 1 && isUnfinished(branch, at)) at += 1;
  return [at + 1, tokenOf(branch, at)?.text ?? ""];
}

/** Whether a token ends in the middle of a character. */
const isUnfinished = (branch, at) => /⟩$/.test(tokenOf(branch, at).piece ?? "") && !tokenOf(branch, at).text.endsWith("⟩");

/** Where the caret is: {position, isInside}, a token position to generate from; null without a caret in the text. */
export function caretPosition() {
  const points = selectedPoints();
  const branch = currentBranch();
  if (!points || !branch || points.to.draft) return null;
  const { first, head } = tokenRange(branch, points.to, points.to);
  return { position: first, head };
}

function placeCaret(node, offset) {
  const text = node.firstChild ?? node;
  document.getSelection().collapse(text, Math.min(offset, text.textContent.length));
}

function placeCaretAtCharacter(branch, character) {
  const { at, offset } = pointAtCharacter(branch, character);
  const span = pane.spans[at];
  if (span) placeCaret(span, offset);
}

// -- the draft ----------------------------------------------------------------------------------------

/** Show a draft in place of its tokens. */
function showDraft() {
  const span = document.createElement("span");
  span.className = "draft";
  span.textContent = draft.text;
  placeAt(draft.first, span);
  for (let at = draft.first; at < draft.last; at += 1) pane.spans[at].remove();
  const next = pane.spans[draft.last];
  if (draft.last > draft.first && next && next.parentNode !== span.parentNode && !draft.text.endsWith("\n")) {
    span.parentNode.append(...next.parentNode.childNodes); // the line break between them is gone
  }
  draft.span = span;
}

/** Put an element before the token at a position, or at the end of the line before. */
export function placeAt(position, element) {
  const [before, next] = [pane.spans[position - 1], pane.spans[position]];
  if (next && (next.previousSibling || !before || before.textContent.endsWith("\n"))) next.before(element);
  else if (before && !before.textContent.endsWith("\n")) before.after(element);
  else {
    const line = document.createElement("div");
    line.className = "line";
    line.append(element);
    pane.body.append(line);
  }
}

function newDraft(branch, { first, last, head, tail }, text) {
  const crosses = tail && Array.from({ length: last - first }, (_, n) => isTemplate(branch, first + n)).includes(true);
  if (crosses) [last, tail] = [last - 1, ""]; // over several turns: the last token stays whole
  draft = {
    branch: branch.id, first, last, text: head + text + tail, caret: head.length + text.length, span: null, isSending: false,
  };
  showDraft();
}

/** Take the draft off the page. Returns where its tokens have to be drawn again. */
function endDraft() {
  const { first, span } = draft;
  draft = null;
  clearTimeout(timer);
  span?.remove();
  return first;
}

/** Take the draft off the page; the tokens are drawn again. */
function hideDraft() {
  if (draft) pane?.redraw(endDraft());
}

/** Drop what was typed since the last commit. */
function discardDraft() {
  if (!draft) return;
  const branch = currentBranch();
  const character = textBetween(branch, 0, draft.first).length;
  forgetDraft(draft.branch);
  hideDraft();
  placeCaretAtCharacter(branch, character);
  changed("draft-edit");
}

/** Replace what is between two points by a text. */
async function applyInput(from, to, text) {
  const branch = currentBranch();
  if (!branch || branch.recorded) return;
  if (hasGhosts() && endGhosts()) from = to = { draft: true, offset: draft.caret };
  if (!draft) newDraft(branch, tokenRange(branch, from, to), text);
  else {
    const isFar = (point) => !point.draft && (point.at < draft.first - 1 || point.at > draft.last);
    if (isFar(from) || isFar(to)) {
      const marks = [from, to].map((point) => characterOf(branch, point));
      if (!(await commit())) return;
      const now = currentBranch();
      const [start, end] = marks.map((character) => pointAtCharacter(now, character));
      newDraft(now, tokenRange(now, start, end), text);
    } else {
      const marks = [characterOf(branch, from), characterOf(branch, to)];
      include(branch, from);
      include(branch, to);
      const shift = textBetween(branch, 0, draft.first).length;
      const [start, end] = marks.map((character) => clamp(character - shift, 0, draft.text.length));
      draft.text = draft.text.slice(0, start) + text + draft.text.slice(end);
      draft.caret = start + text.length;
      draft.span.textContent = draft.text;
    }
  }
  placeCaret(draft.span, draft.caret);
  touched();
}

/** The draft was changed: keep it, and send it after a pause. */
function touched() {
  saveDraft();
  clearTimeout(timer);
  timer = setTimeout(commit, PAUSE_MS);
  changed("draft-edit");
}

/** Characters before a point, with the draft in place. */
function characterOf(branch, point) {
  const before = textBetween(branch, 0, draft.first).length;
  if (point.draft) return before + point.offset;
  if (point.at < draft.first) return textBetween(branch, 0, point.at).length + point.offset;
  return before + draft.text.length + textBetween(branch, draft.last, point.at).length + point.offset;
}

/** Extend the draft by the token next to it that a point is in. */
function include(branch, point) {
  if (point.draft) return;
  if (point.at < draft.first && point.offset < tokenOf(branch, point.at).text.length) {
    draft.first = point.at;
    draft.text = tokenOf(branch, point.at).text + draft.text;
    pane.spans[point.at].remove();
  } else if (point.at >= draft.last && point.offset > 0) {
    draft.last = point.at + 1;
    draft.text += tokenOf(branch, point.at).text;
    pane.spans[point.at].remove();
  }
}

// -- sending ------------------------------------------------------------------------------------------

const savedDrafts = () => storage.get(DRAFTS, {});

function saveDraft() {
  const { branch, first, last, text } = draft;
  const others = Object.entries(savedDrafts()).filter(([id]) => id !== branch).slice(1 - MAX_DRAFTS);
  storage.set(DRAFTS, Object.fromEntries([...others, [branch, { first, last, text }]]));
}

function forgetDraft(branch) {
  const drafts = savedDrafts();
  if (!(branch in drafts)) return;
  delete drafts[branch];
  storage.set(DRAFTS, drafts);
}

/** Show the draft that was not sent of the branch that is shown now. */
export function restoreDraft() {
  const branch = currentBranch();
  if (draft && draft.branch !== branch?.id) hideDraft();
  const saved = branch && savedDrafts()[branch.id];
  if (!saved || draft || !branch.isLoaded || saved.last > textLength(branch)) return;
  newDraft(branch, { ...saved, head: "", tail: "" }, saved.text);
  touched();
}

export const draftStatus = () => (draft ? draft.fails || (draft.isSending ? "sending" : "typing") : session ? "edited" : null);

/** Send the draft. Returns whether nothing is left to send. */
export async function commit() {
  clearTimeout(timer);
  if (!draft) return true;
  if (draft.isSending) return draft.sent;
  if (isComposing) return false;
  const current = draft;
  current.sent = send();
  return current.sent;
}

async function send() {
  const base = state.branches.get(draft.branch);
  const { first, last, text } = draft;
  if (text === textBetween(base, first, last)) {
    const [branch, character] = [base, textBetween(base, 0, first).length + draft.caret];
    const isFocused = pane.body.contains(document.getSelection().anchorNode);
    forgetDraft(base.id);
    hideDraft();
    if (isFocused) placeCaretAtCharacter(branch, character);
    changed("draft-edit");
    return true;
  }
  Object.assign(draft, { isSending: true, fails: null });
  changed("draft-edit");
  const start = textBetween(base, 0, first).length;
  const isSame = session?.branch === base.id && start <= session.end + 1 && start + text.length >= session.start - 1;
  let target = base;
  try {
    for (const [number, part] of splitAtTemplate(base, first, last, text).entries()) {
      const fork = number === 0 && !isSame;
      const before = target;
      const answer = await api.post(`/v1/tree/${target.id}/edit`, { ...part, score: false, fork });
      target = adoptEdit(before, answer);
    }
  } catch (error) {
    if (draft) Object.assign(draft, { isSending: false, fails: error.isOffline ? "unsent" : "refused" });
    changed("draft-edit");
    if (error.isOffline) timer = setTimeout(commit, 2000); // the page tries again by itself
    await attempt(() => { throw error; });
    return false;
  }
  forgetDraft(base.id);
  showEdited(base, target, { start, text, isSame });
  return true;
}

/** The edits of a draft: one for each turn, as tokens of the chat template stay. From the last to the first. */
function splitAtTemplate(branch, first, last, text) {
  const runs = [];
  for (let at = first; at < last; at += 1) {
    if (isTemplate(branch, at)) continue;
    if (runs.at(-1)?.last === at) runs.at(-1).last = at + 1;
    else runs.push({ first: at, last: at + 1, text: "" });
  }
  if (!runs.length) return [{ first, last: first, text }];
  runs[0].text = text;
  return runs.reverse();
}

/** Take over the branch that an edit made; in place, only its end changes. */
function adoptEdit(base, answer) {
  const branch = adopt(answer);
  if (branch !== base) branch.runs = [...base.runs];
  branch.remaining = null;
  return branch;
}

/** Show the edited branch, with the caret where it is, and score it. */
function showEdited(base, branch, { start, text, isSame }) {
  const typed = draft;
  const isFocused = pane?.body.contains(document.getSelection().anchorNode);
  const later = typed && typed.text !== text ? { text: typed.text, caret: typed.caret } : null;
  const caret = start + (typed?.caret ?? text.length);
  const first = typed ? endDraft() : Infinity;
  if (isSame) session.end = Math.max(session.end, start + text.length);
  else {
    session = { branch: branch.id, before: base.id, start, end: start + text.length };
    pushUndo({ label: text ? `edit “${shorten(text)}”` : "delete words", before: placeOf(base), after: { id: branch.id, length: null } });
  }
  if (state.current !== base.id && state.current !== branch.id) return; // another text is shown meanwhile
  if (state.afterEdit !== "keep") scoreBranch(branch); // before drawing: both take their time
  setCurrent(branch.id);
  pane?.redraw(first);
  if (later) {
    const [from, to] = [pointAtCharacter(branch, start), pointAtCharacter(branch, start + text.length)];
    newDraft(branch, tokenRange(branch, from, to), later.text);
    draft.caret += later.caret - later.text.length;
    if (isFocused) placeCaret(draft.span, draft.caret);
    touched();
  } else if (isFocused) placeCaretAtCharacter(branch, caret);
  changed("draft-edit");
}

/** Score the steps that have no score; colors appear as parts arrive. */
export async function scoreBranch(branch) {
  scoring?.abort();
  const control = new AbortController();
  scoring = control;
  try {
    for await (const { event, data } of api.stream(`/v1/tree/${branch.id}/score`, { stream: true }, { signal: control.signal })) {
      if (event !== "scores") continue;
      data.logprob.forEach((logprob, number) => {
        const step = branch.steps[data.first + number];
        if (step) Object.assign(step, { logprob, rank: data.rank[number], entropy: data.entropy[number] });
      });
      if (state.current === branch.id) pane?.restyle(promptLength(branch) + data.first, data.logprob.length);
      changed("selection");
    }
  } catch (error) {
    if (error.name !== "AbortError") await attempt(() => { throw error; });
  } finally {
    if (scoring === control) scoring = null;
  }
}

/** Drop what follows the last edit, and write it again. */
export async function rewriteAfterEdit(resume) {
  if (!(await commit()) || !session) return;
  const branch = state.branches.get(session.branch);
  scoring?.abort();
  const { at, offset } = pointAtCharacter(branch, session.end);
  const position = offset > 0 ? at + 1 : at;
  session = null;
  const goes = await attempt(async () => {
    const fork = adopt(await api.post(`/v1/tree/${branch.id}/fork`, { at: afterTurn(branch, position) }));
    setCurrent(fork.id);
    pushUndo({ label: "rewrite", before: placeOf(branch), after: { id: fork.id, length: null } });
  });
  changed("draft-edit");
  if (goes) await resume({ isPart: true });
}

/** The number of steps up to a position, with the end of the turn it is in. */
export function afterTurn(branch, position) {
  const step = Math.max(0, position - promptLength(branch));
  const turn = (branch.turns ?? []).find(({ start, end }) => start < step && step <= end);
  return turn ? turn.end : step;
}

export function forgetEdit() {
  if (session === null) return;
  session = null;
  changed("draft-edit");
}

// -- events -------------------------------------------------------------------------------------------

const clean = (text) => text.replace(/\r\n?/g, "\n");

function onBeforeInput(event) {
  if (isComposing || event.inputType === "insertCompositionText") return; // the browser changes the draft itself
  event.preventDefault();
  if (event.inputType === "historyUndo") return draft ? discardDraft() : undo();
  if (event.inputType === "historyRedo") return redo();
  const kind = event.inputType;
  if (kind.startsWith("delete")) extendOver(kind);
  const points = selectedPoints();
  if (!points) return;
  let { from, to } = points;
  if (kind.startsWith("delete")) {
    if (isEmpty(from, to)) [from, to] = neighbor(from, kind.endsWith("Forward"));
    if (from && to) applyInput(from, to, "");
  } else if (kind === "insertLineBreak" || kind === "insertParagraph") applyInput(from, to, "\n");
  else if (kind.startsWith("insert")) {
    const text = event.data ?? event.dataTransfer?.getData("text/plain");
    if (text) applyInput(from, to, clean(text));
  }
}

const UNITS = { Word: "word", SoftLine: "lineboundary", HardLine: "paragraphboundary" };

/** Select what a deletion of a word or a line removes. */
function extendOver(kind) {
  const selection = document.getSelection();
  const [, unit, direction] = /^delete(Word|SoftLine|HardLine)(Backward|Forward)$/.exec(kind) ?? [];
  if (unit && selection.isCollapsed) selection.modify("extend", direction.toLowerCase(), UNITS[unit]);
}

const isEmpty = (from, to) => {
  const branch = currentBranch();
  const marks = [from, to].map((point) => (draft ? characterOf(branch, point) : textBetween(branch, 0, point.at).length + point.offset));
  return marks[0] === marks[1];
};

const clusters = new Intl.Segmenter(undefined, { granularity: "grapheme" });

/** The character before or after a point, as two points: one that several code points, or tokens, make is one. */
function neighbor(point, isForward) {
  const branch = currentBranch();
  const length = textLength(branch);
  const text = draft
    ? textBetween(branch, 0, draft.first) + draft.text + textBetween(branch, draft.last, length) : textBetween(branch, 0, length);
  const here = draft ? characterOf(branch, point) : textBetween(branch, 0, point.at).length + point.offset;
  const part = isForward ? text.slice(here, here + 64) : text.slice(Math.max(0, here - 64), here);
  if (!part) return [];
  const all = [...clusters.segment(part)];
  const size = (isForward ? all[0] : all.at(-1)).segment.length;
  const points = (isForward ? [here, here + size] : [here - size, here]).map((character) => pointInText(branch, character));
  const outer = points[isForward ? 1 : 0];
  const at = outer.draft || isForward || outer.offset < tokenOf(branch, outer.at).text.length ? outer.at : outer.at + 1;
  return outer.draft || !isTemplate(branch, at) ? points : []; // the edge of a turn
}

/** The point of a character, with the draft in place. */
function pointInText(branch, character) {
  if (!draft) return pointAtCharacter(branch, character);
  const start = textBetween(branch, 0, draft.first).length;
  if (character < start) return pointAtCharacter(branch, character);
  if (character <= start + draft.text.length) return { draft: true, offset: character - start };
  const replaced = textBetween(branch, draft.first, draft.last).length;
  return pointAtCharacter(branch, character - draft.text.length + replaced);
}

/** An input method starts: until its end the browser changes the text itself. */
function onCompositionStart() {
  const points = selectedPoints();
  if (points && !points.isCollapsed) applyInput(points.from, points.to, "");
  isComposing = true;
  clearTimeout(timer);
}

/** What it changed, a token, the draft or a place between them, becomes the draft. */
function onCompositionEnd() {
  isComposing = false;
  const branch = currentBranch();
  const { anchorNode, anchorOffset } = document.getSelection();
  if (!branch || !pane.body.contains(anchorNode)) return;
  const element = anchorNode.nodeType === Node.TEXT_NODE ? anchorNode.parentElement : anchorNode;
  const span = element.closest(".draft, .t");
  const text = clean(span ? span.textContent : anchorNode.textContent);
  if (draft && span !== draft.span) return discardStray(span, anchorNode);
  if (draft) draft.text = text;
  else if (span) {
    const at = Number(span.dataset.at);
    newDraft(branch, { first: at, last: at + 1, head: "", tail: "" }, text);
  } else {
    const before = anchorNode.previousSibling?.dataset?.at;
    const next = anchorNode.nextSibling?.dataset?.at;
    const at = before !== undefined ? Number(before) + 1 : Number(next ?? textLength(branch));
    anchorNode.remove();
    newDraft(branch, { first: at, last: at, head: "", tail: "" }, text);
  }
  draft.caret = Math.min(anchorOffset, draft.text.length);
  placeCaret(draft.span, draft.caret);
  touched();
}

/** Beside a draft that is not sent: the words become part of it, at its nearer end. */
function discardStray(span, node) {
  const original = span ? pane.tokens[Number(span.dataset.at)].text : "";
  const words = span ? differing(original, span.textContent) : node.textContent;
  if (span) span.textContent = original;
  else node.remove();
  draft.text += clean(words);
  draft.span.textContent = draft.text;
  draft.caret = draft.text.length;
  placeCaret(draft.span, draft.caret);
  touched();
}

/** What was inserted into a text. */
function differing(before, after) {
  let start = 0;
  while (start < before.length && before[start] === after[start]) start += 1;
  return after.slice(start, after.length - (before.length - start));
}

function onCopy(event) {
  const points = selectedPoints();
  const branch = currentBranch();
  if (!points || points.isCollapsed || !branch) return;
  event.clipboardData.setData("text/plain", selectionText(branch, points));
  event.preventDefault();
  if (event.type === "cut" && pane.body.isContentEditable) applyInput(points.from, points.to, "");
}

/** The readable text of a selection, without tokens of the chat template. */
function selectionText(branch, { from, to }) {
  if (draft) return document.getSelection().toString();
  const first = tokenOf(branch, from.at);
  const text = readableText(branch, from.at, to.at + 1);
  const skip = isTemplate(branch, from.at) ? 0 : Math.min(from.offset, first.text.length);
  const last = tokenOf(branch, to.at);
  const over = isTemplate(branch, to.at) ? 0 : last.text.length - to.offset;
  return text.slice(skip, text.length - over);
}

function onKey(event) {
  if (isComposing) return;
  if (hasGhosts() && onGhostKey(event)) return;
  const isCommand = event.ctrlKey || event.metaKey;
  if (event.key === "Escape") {
    const isTyping = draft !== null;
    commit();
    pane.box.focus({ preventScroll: true });
    event.stopPropagation();
    // Nothing was typed: it clears the selection, as it does outside of the text.
    if (!isTyping) pane.box.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
  } else if (isCommand && event.key.toLowerCase() === "z") {
    if (event.shiftKey) redo();
    else if (draft && !draft.isSending) discardDraft();
    else undo();
  } else return;
  event.preventDefault();
}

/** Whether a click only selects a token, as with a finger or on a narrow screen; there, `Edit` starts editing. */
export const needsEditButton = () => isNarrow() || matchMedia("(pointer: coarse)").matches;

export function canEdit() {
  const branch = currentBranch();
  return Boolean(branch?.prompt) && !branch.recorded && state.writing?.branch !== branch.id;
}

function updateEditable() {
  if (!pane) return;
  const { body } = pane;
  const editable = canEdit() && (!needsEditButton() || state.editing);
  if (body.isContentEditable === editable) return;
  if (editable) body.setAttribute("contenteditable", "plaintext-only");
  else body.removeAttribute("contenteditable");
}

/** Start editing at a token, or at the end. */
export function startEditing(position = state.selected) {
  const branch = currentBranch();
  if (!canEdit()) return;
  state.editing = true;
  updateEditable();
  pane.body.focus({ preventScroll: true });
  const at = position ?? textLength(branch) - 1;
  if (pane.spans[at]) placeCaret(pane.spans[at], tokenOf(branch, at).text.length);
  changed("draft-edit");
}

/** The token at the caret is the selected one, so that the panel follows it. */
function onSelectionChange() {
  if (!pane || document.activeElement !== pane.body || draft) return;
  const points = selectedPoints();
  if (!points?.isCollapsed || points.from.draft) return;
  changed("draft-edit");
  if (state.selected === points.from.at) return;
  state.selected = points.from.at;
  changed("selection");
}

let lastCurrent = null;

/** Called by the pane: `{box, body, spans, tokens, redraw, restyle}`. Returns the function that ends editing. */
export function mountDocument(mounted) {
  pane = mounted;
  const { body } = pane;
  body.tabIndex = -1; // reached from the box around it with Enter
  const handlers = {
    beforeinput: onBeforeInput, compositionstart: onCompositionStart, compositionend: onCompositionEnd, keydown: onKey,
    copy: onCopy, cut: onCopy, drop: (event) => event.dataTransfer.types.includes("Files") || event.stopPropagation(),
    blur: () => commit(),
  };
  for (const [name, handler] of Object.entries(handlers)) body.addEventListener(name, handler);
  const onCurrent = () => {
    if (state.current !== lastCurrent && draft && draft.branch !== state.current) commit();
    if (session && session.branch !== state.current) forgetEdit();
    lastCurrent = state.current;
    updateEditable();
    restoreDraft();
  };
  const onServer = () => { if (state.server.ready && draft?.fails) commit(); };
  const leave = [
    on("current", onCurrent), on("writing", () => { updateEditable(); if (state.writing) forgetEdit(); }), on("steps", updateEditable),
    on("server", onServer), 
    () => document.removeEventListener("selectionchange", onSelectionChange), () => removeEventListener("resize", updateEditable), () => { commit(); scoring?.abort(); pane = null; },
  ];
  document.addEventListener("selectionchange", onSelectionChange);
  addEventListener("resize", updateEditable);
  updateEditable();
  restoreDraft();
  return () => leave.forEach((stop) => stop());
}

/** Insert a text at a caret, as typing does. */
export function typeText(position, head, text) {
  const branch = currentBranch();
  const point = { at: position, offset: head.length };
  if (head) newDraft(branch, tokenRange(branch, point, point), text);
  else newDraft(branch, { first: position, last: position, head: "", tail: "" }, text);
  placeCaret(draft.span, draft.caret);
  touched();
}

/**
 * Give the tokens from `first` to before `last` a new text, without the pane; tokens at both ends that stay are left
 * out. Returns the new branch, or null. `after`: "keep" or "drop" the text after it.
 */
export async function editRange(base, first, last, text, { after = "keep", label = `edit “${shorten(text)}”` } = {}) {
  let [from, to, words] = [first, last, text];
  while (from < to && tokenOf(base, from).text && words.startsWith(tokenOf(base, from).text)) {
    words = words.slice(tokenOf(base, from).text.length);
    from += 1;
  }
  while (to > from && tokenOf(base, to - 1).text && words.endsWith(tokenOf(base, to - 1).text)) {
    words = words.slice(0, words.length - tokenOf(base, to - 1).text.length);
    to -= 1;
  }
  if (from === to && !words && after === "keep") return base;
  let branch = null;
  const goes = await attempt(async () => {
    const body = { first: from, last: to, text: words, after, score: false };
    branch = adoptEdit(base, await api.post(`/v1/tree/${base.id}/edit`, body));
    setCurrent(branch.id);
    pushUndo({ label, before: placeOf(base), after: { id: branch.id, length: null } });
  });
  if (goes && after === "keep" && state.afterEdit !== "keep") scoreBranch(branch);
  return goes ? branch : null;
}
