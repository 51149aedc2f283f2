// All that could have stood at a step, by the model alone; asked for once a step.

import { useEffect, useState } from "../lib.js";
import { api } from "../api.js";

const MOST = 500; // that the server tells
const asked = new WeakMap(); // a step that is cut and written anew is another object

function alternatives(branch, step) {
  if (!asked.has(step)) {
    const answer = api.get(`/v1/tree/${branch.id}/alternatives?at=${step.index}&top=${MOST}`);
    const kept = answer.then((found) => ({ found }));
    asked.set(step, kept);
    kept.catch(() => asked.delete(step)); // so that it can be tried again
  }
  return asked.get(step);
}

/** `{found}`, `{fault}` or `{}` while it is not asked for or on its way. */
export function useAlternatives(branch, step, wanted) {
  const [told, tell] = useState({ step: null });
  useEffect(() => {
    if (!wanted || branch.recorded) return undefined; // the server does not know a recorded branch
    let current = true;
    // A pointer that only passes over many tokens asks for none.
    const timer = setTimeout(async () => {
      const answer = await alternatives(branch, step).catch((fault) => ({ fault }));
      if (current) tell({ step, ...answer });
    }, asked.has(step) ? 0 : 80);
    return () => {
      current = false;
      clearTimeout(timer);
    };
  }, [step, wanted]);
  return told.step === step ? told : {};
}
