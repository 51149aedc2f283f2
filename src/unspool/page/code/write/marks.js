// What is marked in the text: words that a person chose, to have them written anew, and changes that are proposed.
// Words are chosen with the mouse, by touch (as text is selected everywhere), or with Shift and the arrow keys.

import { branchNow, changed, promptLength, state } from "../state.js";

let dressed = []; // the tokens that have a mark now

/** Mark some steps, from `first` to before `last`; positions of the prompt are left out. */
export function markPart(branch, from, to) {
  const own = promptLength(branch);
  const [first, last] = [Math.max(0, from - own), Math.min(to - own, branch.steps.length)];
  const isSame = state.part?.branch === branch.id && state.part.first === first && state.part.last === last;
  if (isSame || state.writing || branch.recorded) return;
  state.part = first < last ? { branch: branch.id, first, last, asked: false } : null;
  changed("part");
}

export function clearPart() {
  if (state.part === null) return false;
  state.part = null;
  changed("part");
  return true;
}

let anchor = null; // where Shift and an arrow key began

/** From the token where it began to the one that is gone to. */
export function extendPart(branch, from, to) {
  if (state.part === null || anchor === null) anchor = from;
  markPart(branch, Math.min(anchor, to), Math.max(anchor, to) + 1);
}

/** Follow the browser's own selection; gives the function that ends it. */
export function watchSelection(body) {
  const heard = () => {
    const selection = document.getSelection();
    const branch = branchNow();
    if (!branch || selection.isCollapsed || !selection.rangeCount) return;
    const range = selection.getRangeAt(0);
    if (!body.contains(range.startContainer) || !body.contains(range.endContainer)) return;
    const inside = [...body.querySelectorAll(".t")].filter((token) => touches(range, token));
    if (inside.length) markPart(branch, Number(inside[0].dataset.at), Number(inside.at(-1).dataset.at) + 1);
  };
  const let_go = () => {
    anchor = null;
    clearPart();
  };
  document.addEventListener("selectionchange", heard);
  body.addEventListener("pointerdown", let_go);
  return () => {
    document.removeEventListener("selectionchange", heard);
    body.removeEventListener("pointerdown", let_go);
  };
}

/** Whether some of a token's letters are selected, not only its edge or the space before it. */
function touches(range, token) {
  if (!range.intersectsNode(token)) return false;
  const common = document.createRange();
  common.selectNodeContents(token);
  if (range.compareBoundaryPoints(Range.START_TO_START, common) > 0) common.setStart(range.startContainer, range.startOffset);
  if (range.compareBoundaryPoints(Range.END_TO_END, common) < 0) common.setEnd(range.endContainer, range.endOffset);
  return common.toString().trim() !== "";
}

// -- drawing ----------------------------------------------------------------------------------

export const openChanges = () => (
  state.revision?.branch === state.current ? state.revision.proposals : []);

/** Dress the tokens of a text that has marks, and undress those that had. */
export function applyMarks(spans, branch) {
  for (const span of dressed) {
    span.classList.remove("in-part", "struck", "current-change");
    delete span.dataset.new;
  }
  dressed = [];
  if (!branch) return;
  const own = promptLength(branch);
  const dress = (step, look) => {
    const span = spans[own + step];
    if (!span) return null;
    span.classList.add(look);
    dressed.push(span);
    return span;
  };
  if (state.part?.branch === branch.id) {
    for (let at = state.part.first; at < state.part.last; at += 1) dress(at, "in-part");
  }
  for (const change of openChanges()) {
    for (let at = change.first; at < change.last; at += 1) {
      dress(at, "struck");
      if (change === state.revision.current) dress(at, "current-change");
    }
    const last = spans[own + change.last - 1];
    if (last) last.dataset.new = change.new;
  }
}

/** A tap on a proposed change is about that change; false: it is a token like all others. */
export function markedChange(position) {
  const branch = branchNow();
  if (position === null || !branch) return false;
  const at = position - promptLength(branch);
  const change = openChanges().find(({ first, last }) => first <= at && at < last);
  if (!change) return false;
  state.revision.current = change;
  changed("revision");
  return true;
}
