// Marks in the text: the span selected for rewriting, proposed edits, and doubt. A span is selected with the mouse, by
// touch, or with Shift and the arrow keys.

import { attempt } from "../actions.js";
import { api } from "../api.js";
import { changed, currentBranch, isTemplate, promptLength, state, textLength } from "../state.js";
import { tokenOf } from "./document.js";

let markedSpans = []; // elements that have a mark

/** Select the tokens from position `from` to before `to`, of one message: those of the chat template are left out. */
export function selectSpan(branch, from, to) {
  let [first, last] = [from, Math.min(to, textLength(branch))];
  while (first < last && isTemplate(branch, first)) first += 1;
  while (first < last && isTemplate(branch, last - 1)) last -= 1;
  for (let at = first; at < last; at += 1) if (isTemplate(branch, at)) last = first;
  const isSame = state.span?.branch === branch.id && state.span.first === first && state.span.last === last;
  if (isSame || state.writing || branch.recorded) return;
  state.span = first < last ? { branch: branch.id, first, last, isRequested: false } : null;
  changed("span");
}

export function clearSpan() {
  if (state.span === null) return false;
  state.span = null;
  changed("span");
  return true;
}

/** The tokens of the first gap, `___`: [first, last]; null if there is none. */
export function findGap(branch) {
  const texts = Array.from({ length: textLength(branch) }, (_, at) => (isTemplate(branch, at) ? "\n" : tokenOf(branch, at).text));
  const gap = /_{2,}/.exec(texts.join(""));
  if (!gap) return null;
  let end = 0;
  const ends = texts.map((text) => (end += text.length));
  return [ends.findIndex((at) => at > gap.index), ends.findIndex((at) => at >= gap.index + gap[0].length) + 1];
}

/** Ask for words for the first gap. */
export function fillGap() {
  const branch = currentBranch();
  state.span = { branch: branch.id, first: findGap(branch)[0], last: findGap(branch)[1], isRequested: true };
  changed("span");
}

let anchor = null; // position where the selection by keyboard started

/** Extend the span from its anchor to a position. */
export function extendSpan(branch, from, to) {
  if (state.span === null || anchor === null) anchor = from;
  selectSpan(branch, Math.min(anchor, to), Math.max(anchor, to) + 1);
}

/** Follow the browser's text selection. Returns the function that stops that. */
export function watchSelection(body) {
  const onSelectionChange = () => {
    const selection = document.getSelection();
    const branch = currentBranch();
    if (!branch || selection.isCollapsed || !selection.rangeCount) return;
    const range = selection.getRangeAt(0);
    if (!body.contains(range.startContainer) || !body.contains(range.endContainer)) return;
    const ends = [edgeToken(range, true), edgeToken(range, false)];
    if (ends[0] !== null && ends[1] !== null) selectSpan(branch, ends[0], ends[1] + 1);
  };
  const clearAll = () => {
    anchor = null;
    clearSpan();
  };
  document.addEventListener("selectionchange", onSelectionChange);
  body.addEventListener("pointerdown", clearAll);
  return () => {
    document.removeEventListener("selectionchange", onSelectionChange);
    body.removeEventListener("pointerdown", clearAll);
  };
}

/** The first or last token of which a visible character is selected, not only its edge or the space before it. */
function edgeToken(range, isFirst) {
  const common = range.commonAncestorContainer;
  const walker = document.createTreeWalker(common.nodeType === Node.TEXT_NODE ? common.parentNode : common, NodeFilter.SHOW_TEXT);
  const [edge, offset] = isFirst ? [range.startContainer, range.startOffset] : [range.endContainer, range.endOffset];
  walker.currentNode = edge.childNodes[offset] ?? edge;
  for (let node = walker.currentNode; node; node = isFirst ? walker.nextNode() : walker.previousNode()) {
    const token = node.nodeType === Node.TEXT_NODE ? node.parentElement.closest(".t") : null;
    if (!token) continue;
    if (!range.intersectsNode(node)) return null;
    const from = node === range.startContainer ? range.startOffset : 0;
    const to = node === range.endContainer ? range.endOffset : node.length;
    if (node.data.slice(from, to).trim()) return Number(token.dataset.at);
  }
  return null;
}

// -- drawing ----------------------------------------------------------------------------------

const pendingChanges = () => (
  state.revision?.branch === state.current ? state.revision.proposals : []);

/** Add the marks of a branch to its tokens, and remove old ones. */
export function applyMarks(spans, branch) {
  for (const span of markedSpans) {
    span.classList.remove("in-part", "struck", "current-change");
    delete span.dataset.new;
    delete span.dataset.part;
  }
  markedSpans = [];
  if (!branch) return;
  const promptTokens = promptLength(branch);
  const dress = (at, look) => {
    const span = spans[at];
    if (!span) return null;
    span.classList.add(look);
    markedSpans.push(span);
    return span;
  };
  if (state.placement?.branch === branch.id && !state.writing) {
    for (const { at, name, tokens } of state.placement.parts) {
      const span = spans[at];
      if (!span) continue; // at the end
      span.dataset.part = [span.dataset.part, `${name} · ${tokens}`].filter(Boolean).join("   ");
      markedSpans.push(span);
    }
  }
  if (state.span?.branch === branch.id) {
    for (let at = state.span.first; at < state.span.last; at += 1) dress(at, "in-part");
  }
  for (const change of pendingChanges()) {
    for (let at = change.first; at < change.last; at += 1) {
      dress(promptTokens + at, "struck");
      if (change === state.revision.current) dress(promptTokens + at, "current-change");
    }
    const last = spans[promptTokens + change.last - 1];
    if (last) last.dataset.new = change.new;
  }
}

/** Select the proposed edit at a position; false if there is none. */
export function selectChangeAt(position) {
  const branch = currentBranch();
  if (position === null || !branch) return false;
  const at = position - promptLength(branch);
  const change = pendingChanges().find(({ first, last }) => first <= at && at < last);
  if (!change) return false;
  state.revision.current = change;
  changed("revision");
  return true;
}

// -- doubt of each token, loaded when the colors show it --------------------------------------------

let pendingText = null; // branch and length of the request that is running

export async function loadDoubt() {
  const branch = currentBranch();
  if (state.tint !== "doubt" || !branch?.isLoaded || branch.recorded || state.writing) return;
  const { steps } = branch;
  const mark = `${branch.id} ${steps.length}`;
  if (steps.every((step) => step.doubt !== undefined) || pendingText === mark) return;
  pendingText = mark;
  await attempt(async () => {
    const { doubts } = await api.post(`/v1/tree/${branch.id}/doubt`);
    doubts.forEach((doubt, at) => { if (steps[at]) steps[at].doubt = doubt; });
    changed("tint");
  });
  pendingText = null;
}
