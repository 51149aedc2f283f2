// Other words for parts of a text, in a new branch: the rest stays, and what was there stays as a branch.

import { api } from "../api.js";
import { adopt, changed, state } from "../state.js";
import { display, jump, pause, pushUndo, tried } from "../actions.js";

/**
 * Make changes, `[{first, last, text}]`; gives the new branch, or null if that failed. `after(fork)` and `before()`
 * are called when it is done, done again and undone, with the text in place.
 */
export async function replaceParts(branch, changes, { label, after = () => {}, before = () => {} }) {
  await pause();
  let fork = null;
  await tried(async () => {
    const sent = changes.map(({ first, last, text }) => ({ first, last, text }));
    fork = adopt(await api.post(`/v1/tree/${branch.id}/replace`, { changes: sent }));
    fork.runs = [...branch.runs];
    fork.left = null;
    fork.kept = keptSteps(branch, fork, sent);
    display(fork.id);
    after(fork);
    pushUndo({
      label,
      undo: async () => { await jump(branch.id); before(); changed("revision"); },
      redo: async () => { await jump(fork.id); after(fork); changed("revision"); },
    });
  });
  changed("revision");
  return fork;
}

/** The steps that stand there because they stood there before: nobody chose them anew. */
function keptSteps(branch, fork, changes) {
  const spans = [];
  let shift = 0;
  for (const { first, last, text } of [...changes].sort((one, other) => one.first - other.first)) {
    const length = (to) => branch.steps.slice(0, to).reduce((sum, step) => sum + step.text.length, 0);
    const start = length(first) + shift;
    spans.push([start, start + text.length]);
    shift += text.length - (length(last) - length(first));
  }
  const kept = new Set();
  let at = 0;
  fork.steps.forEach((step, number) => {
    const end = at + step.text.length;
    if (!spans.some(([start, stop]) => at < stop && end > start)) kept.add(number);
    at = end;
  });
  return kept;
}

export const noRevision = () => {
  state.revision = null;
  changed("revision");
};
