// Keys that work wherever no field has the focus, and the list of them.

import { html, useEffect, useRef } from "./lib.js";
import { branchNow, changed, state } from "./state.js";
import { clearPart, markPart } from "./write/marks.js";
import { closeSheet, goOn, open, pause, redo, select, show, stepOnce, stop, undo } from "./actions.js";

const KEYS = [
  ["Enter", "in the prompt: write; Shift+Enter makes a new line"],
  ["Space", "pause and go on; at speed “one step”: one token"],
  [".", "one token"],
  ["s", "stop"],
  ["← →", "in the text: from token to token; ↑ ↓ from line to line"],
  ["Shift+← →", "in the text: mark words; r writes the marked part, or the token, anew"],
  ["Ctrl+Z", "undo; with Shift: do it again"],
  ["1 – 5", "the panels: step, inside, map, costs, settings"],
  ["/", "to the prompt"],
  ["Escape", "out of a field; let go of the token, put the panel away"],
  ["?", "this list"],
];
const PANELS = ["step", "inside", "map", "costs", "settings"];

/** Listen; gives the function that ends it. */
export function onKey({ help }) {
  const heard = (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) leaveField(event);
    const isUndo = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z";
    if (inField(event.target) || document.querySelector("dialog[open]")) return;
    if (isUndo) (event.shiftKey ? redo : undo)();
    else if (event.ctrlKey || event.metaKey || event.altKey || !act(event, help)) return;
    event.preventDefault();
  };
  document.addEventListener("keydown", heard);
  return () => document.removeEventListener("keydown", heard);
}

/** Out of a field, to where the keys are heard. */
function leaveField({ target }) {
  if (target.closest(".composer, .reply")) document.getElementById("text")?.focus({ preventScroll: true });
  else if (inField(target) && target.closest(".side")) closeSheet();
}

const inField = (target) => target.closest?.("input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable]");

function act(event, help) {
  const onControl = event.target.closest?.("button, a, summary, input, [role=treeitem], [role=gridcell], [role=option]");
  if (event.key === "?") help();
  else if (state.view === "learn" && event.key === "Escape") return leave();
  else if (state.view !== "write") return false;
  else if (event.key === " " && !onControl) {
    if (state.writing) pause();
    else if (state.speed === 0) stepOnce();
    else goOn();
  } else if (event.key === ".") stepOnce();
  else if (event.key === "s") stop();
  else if (event.key === "r") rewritePart();
  else if (event.key === "/") {
    open("write");
    document.getElementById("prompt")?.focus();
  } else if (event.key === "Escape") return leave();
  else if (PANELS[event.key - 1] && !onControl?.matches("input")) show(PANELS[event.key - 1]);
  else return false;
  return true;
}

/** Ask what else could stand in the marked words, or else in the selected token. */
function rewritePart() {
  const branch = branchNow();
  if (!branch || state.writing) return;
  if (state.part === null && state.selected !== null) markPart(branch, state.selected, state.selected + 1);
  if (state.part === null) return;
  state.part = { ...state.part, asked: true };
  changed("part");
}

/** Let go of the token, put the panel away; false if there is neither. */
function leave() {
  if (clearPart()) return true;
  if (state.selected === null && !state.sheet) return false;
  select(null);
  closeSheet();
  return true;
}

export function KeysDialog({ open: isOpen, close }) {
  const dialog = useRef();
  useEffect(() => {
    if (isOpen) dialog.current.showModal();
  }, [isOpen]);
  return html`<dialog ref=${dialog} class="dialog" aria-labelledby="keys-title" onClose=${close}>
    <h2 id="keys-title">Keys</h2>
    <table class="keys"><tbody>${KEYS.map(([key, what]) => html`<tr><th scope="row"><kbd>${key}</kbd></th><td>${what}</td></tr>`)}</tbody></table>
    <form method="dialog"><button class="button">Close</button></form>
  </dialog>`;
}
