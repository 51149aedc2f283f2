// What can be undone, and done again.

import { changed } from "./state.js";

const MOST = 50;
const done = [];
const undone = [];

/** Remember an action: `{label, undo, redo, forget?}`; `forget` when it can no longer be undone. */
export function pushUndo(action) {
  done.push(action);
  undone.length = 0;
  while (done.length > MOST) done.shift().forget?.();
  changed("history");
}

export const canUndo = () => done.length > 0;
export const canRedo = () => undone.length > 0;
export const undoLabel = () => done.at(-1)?.label ?? "";
export const redoLabel = () => undone.at(-1)?.label ?? "";

export async function undo() {
  const action = done.pop();
  if (!action) return;
  undone.push(action);
  changed("history");
  await action.undo();
}

export async function redo() {
  const action = undone.pop();
  if (!action) return;
  done.push(action);
  changed("history");
  await action.redo();
}

addEventListener("pagehide", () => done.forEach((action) => action.forget?.()));
