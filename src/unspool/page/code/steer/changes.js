// Changes inside the model: the list of them that the Steer section edits, requests, and names of interventions.

import { api } from "../api.js";
import { adopt, changed } from "../state.js";

export const PART_NAMES = {
  resid_post: "residual stream", attn_out: "attention output", head_out: "head output", mlp_out: "MLP output",
  recurrent_out: "recurrent output",
};
const SHORT_NAMES = { resid_post: "residual", resid_pre: "residual", resid_mid: "residual", attn_out: "attention", head_out: "head",
  mlp_out: "MLP", recurrent_out: "recurrent" };

/** Layers from 0 as runs, counted from 1: "3", "3–7", "1, 5, 9". */
export function layersText(layers) {
  const runs = [];
  for (const layer of layers) {
    if (runs.length && layer === runs.at(-1)[1] + 1) runs.at(-1)[1] = layer;
    else runs.push([layer, layer]);
  }
  return runs.map(([first, last]) => (first === last ? `${first + 1}` : `${first + 1}–${last + 1}`)).join(", ");
}

export const valueText = (value) => `${Number(value.toPrecision(3))}`.replace("-", "−");
export const strengthText = (value) => `×${Number(value.toPrecision(3))}`.replace("-", "−");

/** What an intervention does, in a few words: "formal ×1.5", "no MLP, layer 3", "feature 12 = 8". */
export function interventionName({ label, site, op, layers, heads }) {
  const part = [SHORT_NAMES[site] ?? site, heads && heads.map((head) => head + 1).join(", ")].filter(Boolean).join(" ");
  const where = layers && layers.length < 6 ? `, ${layers.length > 1 ? "layers" : "layer"} ${layersText(layers)}` : "";
  if (op.kind === "scale") return `${op.factor === 0 ? `no ${part}` : `${part} ${strengthText(op.factor)}`}${where}`;
  const name = label?.trim() || op.kind.replaceAll("_", " ");
  if (op.kind === "clamp_feature") return `${name} = ${valueText(op.value)}${where}`;
  return op.kind === "add" ? `${name} ${strengthText(op.scale)}${where}` : `${name} of ${part}${where}`;
}

/** Whether an intervention changes new tokens too. */
export const isOpenEnded = ({ positions }) => (Array.isArray(positions) ? positions[1] === null : positions === "all" || positions === "generated");

/** End an intervention of a branch at its last token. */
export async function endIntervention(branch, index) {
  adopt(await api.delete(`/v1/tree/${branch.id}/interventions?index=${index}`));
  changed("branches", "current");
}

/** Stream the text from a step on under changes; `onSteps` gets the steps so far. Resolves to all of them. */
export async function streamSteered(branchId, body, signal, onSteps = () => {}) {
  const steps = [];
  for await (const { event, data } of api.stream(`/v1/tree/${branchId}/steer`, { ...body, stream: true }, { signal })) {
    if (event !== "step") continue;
    steps.length -= data.retracts;
    steps.push(data);
    onSteps([...steps]);
  }
  return steps;
}

/** For each of two lists of steps, whether a step has no partner in the other (longest common subsequence of tokens). */
export function differences(first, second) {
  const lengths = Array.from({ length: first.length + 1 }, () => new Uint16Array(second.length + 1));
  for (let a = first.length - 1; a >= 0; a--) {
    for (let b = second.length - 1; b >= 0; b--) {
      lengths[a][b] = first[a].token === second[b].token ? lengths[a + 1][b + 1] + 1 : Math.max(lengths[a + 1][b], lengths[a][b + 1]);
    }
  }
  const marks = [first.map(() => true), second.map(() => true)];
  for (let a = 0, b = 0; a < first.length && b < second.length;) {
    if (first[a].token === second[b].token) {
      marks[0][a++] = false;
      marks[1][b++] = false;
    } else if (lengths[a + 1][b] >= lengths[a][b + 1]) a += 1;
    else b += 1;
  }
  return marks;
}
