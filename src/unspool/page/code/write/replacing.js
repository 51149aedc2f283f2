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
  const spans = []; // what is new, in characters of the new text
  const chosen = new Set(); // where a token begins that a person had chosen before
  const sorted = [...changes].sort((one, other) => one.first - other.first);
  let [at, next] = [0, 0];
  branch.steps.forEach((step, number) => {
    if (sorted[next]?.first === number) {
      spans.push([at, at + sorted[next].text.length]);
      at += sorted[next].text.length;
    }
    const isGone = sorted[next] && number >= sorted[next].first;
    if (!isGone && step.chosen && !branch.kept?.has(number)) chosen.add(at);
    if (!isGone) at += step.text.length;
    if (sorted[next]?.last === number + 1) next += 1;
  });
  const kept = new Set();
  at = 0;
  fork.steps.forEach((step, number) => {
    const end = at + step.text.length;
    if (!spans.some(([start, stop]) => at < stop && end > start) && !chosen.has(at)) kept.add(number);
    at = end;
  });
  return kept;
}

export const noRevision = () => {
  state.revision = null;
  changed("revision");
};
