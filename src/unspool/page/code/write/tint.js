// How surprising a token was, as one of ten tints: 0 is what the model was sure of.

import { clamp, nats, ordinal, percent } from "../lib.js";

export const TINTS = {
  probability: "probability", entropy: "entropy", rank: "rank", doubt: "doubt", none: "no color",
};

const LOG_STEPS = 9 / Math.log(1000); // from certain to one in a thousand
const ENTROPY_STEPS = 9 / 6; // a step of two thirds of a nat

const level = {
  probability: (step) => -(step.logprob ?? -50) * LOG_STEPS,
  entropy: (step) => (step.entropy ?? 0) * ENTROPY_STEPS,
  rank: (step) => (step.rank ? 1 + Math.log2(step.rank) : 0),
  doubt: (step) => (step.doubt ?? 0) * LOG_STEPS, // known once it was asked for: doubt.js
  none: () => 0,
};

/** The class that tints a step; nothing for what was certain. */
export function tintOf(step, by) {
  if (!step || step.logprob === undefined) return "";
  const tint = Math.round(clamp(level[by](step), 0, 9));
  return tint ? `tint-${tint}` : "";
}

/** The least and the greatest of the scale, in words. */
export const SCALE = {
  probability: ["likely", "1 in 1,000"], entropy: ["sure", "6 nats"], rank: ["1st", "256th"],
  doubt: ["fits", "doubtful"],
};

/** A step in a few words, for those who hear the page. */
export function said(step) {
  const p = step.logprob === null ? 0 : Math.exp(step.logprob);
  return `probability ${percent(p)}, ${ordinal(step.rank + 1)}, entropy ${nats(step.entropy)} nats`;
}
