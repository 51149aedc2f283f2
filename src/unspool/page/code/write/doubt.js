// How doubtful each token of the current text is: asked for when the colors are to show it.

import { api } from "../api.js";
import { branchNow, changed, state } from "../state.js";
import { tried } from "../actions.js";

let asking = null; // of which text, as it was

export async function loadDoubts() {
  const branch = branchNow();
  if (state.tint !== "doubt" || !branch?.told || branch.recorded || state.writing) return;
  const { steps } = branch;
  const mark = `${branch.id} ${steps.length}`;
  if (steps.every((step) => step.doubt !== undefined) || asking === mark) return;
  asking = mark;
  await tried(async () => {
    const { doubts } = await api.post(`/v1/tree/${branch.id}/doubt`);
    doubts.forEach((doubt, at) => { if (steps[at]) steps[at].doubt = doubt; });
    changed("tint");
  });
  asking = null;
}
