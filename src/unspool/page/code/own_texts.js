// Texts that a view of many texts wrote by itself: kept among the branches of the page as long as they are shown,
// and longer if a person made something of them.

import { api } from "./api.js";
import { adopt, changed, on, state } from "./state.js";

const used = new Set(); // branches that a person has been to
on("current", () => used.add(state.current));
const names = new Map(); // which names are ours

/** Put a new branch among the others of the page. */
export function keep(branch, settings) {
  const kept = adopt(branch);
  kept.runs = [{ from: 0, settings }];
  names.set(kept.id, kept.name);
  return kept.id;
}

/** What the panels want to know of the model behind a text, if it is in no list: a checkpoint, a puzzle solver. */
export async function know(model, signal) {
  if (state.unlisted.has(model) || state.models.some(({ id }) => id === model)) return;
  state.unlisted.set(model, await api.get(`/v1/models/${encodeURIComponent(model)}`, { signal }));
  changed("models");
}

/** Drop branches that are no longer shown, but none that a person went to, named or went on from. */
export function letGo(ids) {
  for (const id of ids) {
    const branch = state.branches.get(id);
    if (!branch || used.has(id) || id === state.comparing || branch.name !== names.get(id)) continue;
    if ([...state.branches.values()].some((other) => other.parent === id)) continue;
    state.branches.delete(id);
    api.delete(`/v1/tree/${id}`).catch(() => {}); // gone there already: all the better
  }
  changed("branches");
}
