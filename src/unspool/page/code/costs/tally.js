// The running figures of a branch, kept up as its steps come and go.
//
// Only what is new is counted: a text of two thousand tokens costs as little a frame as a short one.

import { LoopMeter } from "./loops.js";

export const MEAN_OVER = 16; // tokens of the running mean

export class Tally {
  constructor() {
    this.steps = [];
    this.seconds = []; // NaN: not written by the model, but put there
    this.logprobs = []; // of the text up to and with each token
    this.entropies = [];
    this.entropySums = [0];
    this.means = []; // of the entropy, over the last tokens
    this.drifts = []; // surprise minus entropy, summed up
    this.drafts = [{ accepted: 0, rejected: 0 }]; // among the first i
    this.loops = new LoopMeter();
  }

  /** Bring the figures to what these steps are now. */
  follow(steps) {
    let same = Math.min(steps.length, this.steps.length);
    while (same > 0 && steps[same - 1] !== this.steps[same - 1]) same--;
    if (same < this.steps.length) this.cut(same);
    for (let i = same; i < steps.length; i++) this.push(steps[i]);
    return this;
  }

  push(step) {
    const at = this.steps.push(step) - 1;
    const logprob = step.logprob ?? 0;
    const entropy = step.entropy ?? 0;
    this.seconds.push(step.chosen ? NaN : step.seconds);
    this.logprobs.push((this.logprobs[at - 1] ?? 0) + logprob);
    this.entropies.push(entropy);
    this.entropySums.push(this.entropySums[at] + entropy);
    const over = Math.min(MEAN_OVER, at + 1);
    this.means.push((this.entropySums[at + 1] - this.entropySums[at + 1 - over]) / over);
    this.drifts.push((this.drifts[at - 1] ?? 0) - logprob - entropy);
    const { accepted, rejected } = this.drafts[at];
    this.drafts.push({
      accepted: accepted + (step.draft === "accepted" ? 1 : 0),
      rejected: rejected + (step.draft === "rejected" ? 1 : 0),
    });
    this.loops.push(step.token);
  }

  cut(length) {
    for (const list of [this.steps, this.seconds, this.logprobs, this.entropies, this.means, this.drifts]) {
      list.length = length;
    }
    this.entropySums.length = this.drafts.length = length + 1;
    this.loops.cut(length);
  }

  get length() {
    return this.steps.length;
  }

  /** Log probability of the whole text. */
  get logprob() {
    return this.logprobs.at(-1) ?? 0;
  }

  /** The probability that each token would need to have for the text to be as likely as it is. */
  get typical() {
    return this.length ? Math.exp(this.logprob / this.length) : 1;
  }

  get perplexity() {
    return 1 / this.typical;
  }
}

const tallies = new WeakMap();

/** The figures of a branch as it is now. */
export function tallyOf(branch) {
  if (!tallies.has(branch)) tallies.set(branch, new Tally());
  return tallies.get(branch).follow(branch.steps);
}
