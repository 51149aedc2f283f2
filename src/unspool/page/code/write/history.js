// Undo and redo: a list of plain JSON, so that it can be kept with the session.
//
// An entry says where the text was before and after: `{label, before: {id, length}, after: {id, length}}`, a branch cut
// to this number of steps (null: all of it). Two other kinds: `{label, kind: "name", id, before, after}` and
// `{label, kind: "delete", id}`; `{label, kind: "parts", before, after}` has changes for parts.js. Nothing is lost by undo: a branch that has grown since is forked, not cut.

import { attempt, deleteOnServer, hideBranch, jump, pauseWriting, setName, showBranch } from "../actions.js";
import { api } from "../api.js";
import { adopt, changed, state } from "../state.js";
import { applyParts } from "./parts.js";

const MAX_ENTRIES = 200;
const GENERATE = "generate";

let done = [];
let undone = [];
let isSaved = false; // whether a session keeps the list

/** Add an action. `onUndo` and `onRedo` run after it is undone or redone; they are not saved. */
export function pushUndo(entry) {
  done.push(entry);
  undone.splice(0).forEach(forget);
  while (done.length > MAX_ENTRIES) forget(done.shift(), true);
  changed("history");
}

/** Record a generation: one that continues the last one is the same action. */
export function pushGeneration(branch, from) {
  const last = done.at(-1);
  if (branch.steps.length <= from) return;
  if (last?.label === GENERATE && last.after.id === branch.id && (last.after.length ?? from) === from) {
    last.after.length = branch.steps.length;
    undone = [];
    changed("history");
    return;
  }
  pushUndo({ label: GENERATE, before: { id: branch.id, length: from }, after: { id: branch.id, length: branch.steps.length } });
}

/** Where the text is now. */
export const placeOf = (branch) => ({ id: branch?.id ?? null, length: branch?.steps.length ?? null });

/** A deleted branch is deleted on the server when its deletion can no longer be undone. */
function forget(entry, isOld = false) {
  if (isOld && entry.kind === "delete" && state.removed.has(entry.id)) deleteOnServer(entry.id);
}

export const canUndo = () => done.length > 0;
export const canRedo = () => undone.length > 0;
export const undoLabel = () => done.at(-1)?.label ?? "";
export const redoLabel = () => undone.at(-1)?.label ?? "";

export async function undo() {
  await pauseWriting(); // its tokens become part of the list first
  const entry = done.pop();
  if (!entry) return;
  undone.push(entry);
  changed("history");
  await apply(entry, true);
}

export async function redo() {
  const entry = undone.pop();
  if (!entry) return;
  done.push(entry);
  changed("history");
  await apply(entry, false);
}

async function apply(entry, isUndo) {
  const target = isUndo ? entry.before : entry.after;
  if (entry.kind === "name") await setName(entry.id, target);
  else if (entry.kind === "parts") await applyParts(target);
  else if (entry.kind === "delete") await (isUndo ? showBranch(entry.id) : hideBranch(entry.id));
  else await goTo(target);
  await (isUndo ? entry.onUndo : entry.onRedo)?.();
}

/** Show a branch with this number of steps. If it has more by now, they stay in it, and a fork is shown. */
async function goTo(place) {
  const branch = state.branches.get(place.id);
  const length = branch?.isLoaded ? branch.steps.length : branch?.length;
  if (!branch || place.length === null || length <= place.length || branch.recorded) {
    await jump(place.id, place.selected ?? null);
    return;
  }
  await attempt(async () => {
    const fork = adopt(await api.post(`/v1/tree/${branch.id}/fork`, { at: place.length }));
    for (const entry of [...done, ...undone]) { // the same place is the same branch from now on
      for (const other of [entry.before, entry.after]) {
        if (other?.id === branch.id && other !== place && other.length === place.length) other.id = fork.id;
      }
    }
    place.id = fork.id;
    await jump(fork.id, place.selected ?? null);
  });
}

// -- kept with the session ----------------------------------------------------------------------------

/** The list as JSON for the `view` of a session. */
export function saveHistory() {
  isSaved = true;
  const plain = ({ label, kind, id, before, after }) => ({ label, ...(kind ? { kind, ...(id ? { id } : {}) } : {}), ...(before !== undefined ? { before, after } : {}) });
  return { done: done.map(plain), undone: undone.map(plain) };
}

/** Take over a saved list; deleted branches are hidden again. Branches have to be loaded before. */
export function loadHistory(saved) {
  const isEntry = (entry) => entry && typeof entry.label === "string";
  done = (saved?.done ?? []).filter(isEntry);
  undone = (saved?.undone ?? []).filter(isEntry);
  for (const { kind, id } of done) {
    const branch = kind === "delete" && state.branches.get(id);
    if (!branch) continue;
    state.branches.delete(id);
    state.removed.set(id, branch);
  }
  changed("history", "branches");
}

addEventListener("pagehide", () => {
  if (!isSaved) for (const entry of done) forget(entry, true);
});
