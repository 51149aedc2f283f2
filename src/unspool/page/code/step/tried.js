// What other settings would have made of a step: the server runs its real chain on the real numbers.

import { api } from "../api.js";
import { useAnswer } from "../asking.js";

export const MOST = 100; // candidates that the server tells
const WAIT = 40; // ms: a pointer that passes over many tokens, or a slider on its way, asks for none

/** With which settings this step was written, as they were sent. */
const sentFor = (branch, step) => branch.runs?.findLast(({ from }) => from <= step.index)?.settings ?? {};

/** The step as it would be with `changes` to its settings: `{made, fault, fresh, again}`. */
export function useTried(branch, step, changes, wanted) {
  const body = { ...sentFor(branch, step), ...changes, at: step.index, top: MOST };
  const ask = wanted && !branch.recorded // the server does not know a recorded branch
    ? async (signal) => ({ of: step, ...await api.post(`/v1/tree/${branch.id}/try`, body, { signal }) })
    : null;
  const { answer, ...rest } = useAnswer(ask, WAIT, [branch.id, step.token, body]);
  return { made: answer?.of === step ? answer.step : null, ...rest };
}
