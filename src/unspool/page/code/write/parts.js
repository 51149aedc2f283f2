// Memory, author's note and lorebook: what the model reads besides the text. They belong to the session; every request that
// generates sends them, and the server places them in the prompt.

import { attempt, pushUndo, shorten } from "../actions.js";
import { api } from "../api.js";
import { changed, currentBranch, state } from "../state.js";

export const emptyParts = () => ({ memory: null, author_note: null, lorebook: null });

state.parts ??= emptyParts();

let isUsed = false; // whether the server may have parts of this session

const isEmpty = (parts) => Object.values(parts).every((part) => part === null);

/** The fields of a request: null removes a part. Without any parts there is nothing to send. */
export const partsBody = () => (isUsed || !isEmpty(state.parts) ? { ...state.parts } : {});

/** Take over the parts of a session, of a file, or none. */
export function loadParts(parts) {
  state.parts = { ...emptyParts(), ...parts };
  isUsed = !isEmpty(state.parts);
  changed("parts");
}

/** Parts as JSON for the view of a session; undefined: none. */
export const saveParts = () => (isEmpty(state.parts) ? undefined : state.parts);

/**
 * Apply a change and send it for the branch that is shown; the others get it when they are resumed. A change is
 * `{memory}`, `{author_note}`, `{lorebook}`, or `{splice: [at, number removed, new entries]}` of the lorebook's entries.
 */
export async function applyParts(change) {
  const { splice, ...fields } = change;
  const parts = { ...state.parts, ...fields };
  if (splice) {
    const [at, removed, entries] = splice;
    const all = [...(parts.lorebook?.entries ?? [])];
    all.splice(at, removed, ...entries);
    parts.lorebook = { ...parts.lorebook, entries: all };
  }
  if (parts.lorebook && !parts.lorebook.entries?.length && Object.keys(parts.lorebook).length < 2) parts.lorebook = null;
  state.parts = parts;
  isUsed = true;
  changed("parts");
  const branch = currentBranch();
  if (branch && !branch.recorded) await attempt(() => api.patch(`/v1/tree/${branch.id}`, { ...state.parts }));
  changed("parts", "history");
}

const TITLES = { memory: "memory", author_note: "author's note", lorebook: "lorebook" };

/** Change one part, with undo. */
export function setPart(name, value) {
  const before = state.parts[name];
  if (JSON.stringify(before) === JSON.stringify(value)) return Promise.resolve();
  pushUndo({ label: `change the ${TITLES[name]}`, kind: "parts", before: { [name]: before }, after: { [name]: value } });
  return applyParts({ [name]: value });
}

/** Replace `removed` entries of the lorebook from `at` on, with undo. */
export function spliceEntries(at, removed, entries) {
  const before = (state.parts.lorebook?.entries ?? []).slice(at, at + removed);
  if (JSON.stringify(before) === JSON.stringify(entries)) return Promise.resolve();
  const { name, text, keys = [] } = entries[0] ?? before[0] ?? { text: "" };
  pushUndo({
    label: `change the entry “${shorten(name || keys[0] || text)}”`, kind: "parts",
    before: { splice: [at, entries.length, before] }, after: { splice: [at, removed, entries] },
  });
  return applyParts({ splice: [at, removed, entries] });
}
