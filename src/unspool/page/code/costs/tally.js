// Running statistics of a branch, updated as its steps arrive and are rewound. LoopMeter measures repetition:
//
//     const meter = new LoopMeter();
//     meter.push(token);  meter.cut(length);  meter.share();  meter.tail();
//
// A token repeats if its 4-gram occurred earlier in the text. Each token is looked up once: constant time per token.

const GRAM = 4; // shorter n-grams repeat in any text
export const WINDOW = 64; // last tokens that the meter counts
const MIN_TOKENS = 8; // below this the share is 0
const MAX_CANDIDATE_ENDS = 24; // earlier occurrences tried for the tail, the nearest first
const MAX_TAIL = 1024; // tokens

export class LoopMeter {
  constructor() {
    this.tokens = [];
    this.repeats = []; // whether each token repeats
    this.sums = [0]; // sums[i]: repeats among the first i
    this.ends = new Map(); // 4-gram → indices where it ended
  }

  push(token) {
    const at = this.tokens.push(token) - 1;
    let again = false;
    if (at >= GRAM - 1) {
      const gram = this.gramAt(at);
      const ends = this.ends.get(gram);
      again = ends !== undefined && ends.length > 0;
      if (ends) ends.push(at);
      else this.ends.set(gram, [at]);
    }
    this.repeats.push(again);
    this.sums.push(this.sums[at] + (again ? 1 : 0));
  }

  /** Keep only the first `length` tokens. */
  cut(length) {
    for (let at = this.tokens.length - 1; at >= Math.max(length, GRAM - 1); at--) {
      this.ends.get(this.gramAt(at)).pop();
    }
    this.tokens.length = this.repeats.length = length;
    this.sums.length = length + 1;
  }

  /** Share of the last tokens that repeat, 0 to 1. */
  share() {
    const length = this.tokens.length;
    if (length < MIN_TOKENS) return 0;
    const looked = Math.min(WINDOW, length);
    return (this.sums[length] - this.sums[length - looked]) / looked;
  }

  /**
   * The longest suffix that occurred before: `{length, distance, times}`. `times` is how often the last `distance`
   * tokens come in a row; 1 if the earlier occurrence does not touch the end.
   */
  tail() {
    const last = this.tokens.length - 1;
    let best = { length: 0, distance: 0, times: 1 };
    if (!this.repeats[last]) return best;
    const ends = this.ends.get(this.gramAt(last));
    for (let i = ends.length - 2; i >= Math.max(0, ends.length - 1 - MAX_CANDIDATE_ENDS); i--) {
      const length = this.matched(last, ends[i]);
      if (length > best.length) best = { length, distance: last - ends[i], times: 1 };
    }
    best.times = Math.floor(best.length / best.distance) + 1;
    return best;
  }

  gramAt(at) {
    return this.tokens.slice(at - GRAM + 1, at + 1).join(" ");
  }

  /** Number of equal tokens before these two indices. */
  matched(late, early) {
    let length = 0;
    while (length <= early && length < MAX_TAIL && this.tokens[late - length] === this.tokens[early - length]) {
      length++;
    }
    return length;
  }
}

// -- statistics of a branch: only new steps are counted -------------------------------------------

export const MEAN_OVER = 16; // tokens of the running mean

export class Tally {
  constructor() {
    this.steps = [];
    this.seconds = []; // NaN: chosen by the user
    this.logprobs = []; // of the text up to and including each token
    this.entropies = [];
    this.entropySums = [0];
    this.means = []; // of the entropy, over the last MEAN_OVER tokens
    this.drifts = []; // cumulative surprisal minus entropy
    this.drafts = [{ accepted: 0, rejected: 0 }]; // [i]: among the first i
    this.loops = new LoopMeter();
  }

  /** Update the statistics to these steps. */
  follow(steps) {
    let shared = Math.min(steps.length, this.steps.length);
    while (shared > 0 && steps[shared - 1] !== this.steps[shared - 1]) shared--;
    if (shared < this.steps.length) this.cut(shared);
    for (let i = shared; i < steps.length; i++) this.push(steps[i]);
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

  /** Geometric mean of the token probabilities. */
  get typical() {
    return this.length ? Math.exp(this.logprob / this.length) : 1;
  }

  get perplexity() {
    return 1 / this.typical;
  }
}

const tallies = new WeakMap();

/** The up-to-date statistics of a branch. */
export function tallyOf(branch) {
  if (!tallies.has(branch)) tallies.set(branch, new Tally());
  return tallies.get(branch).follow(branch.steps);
}
