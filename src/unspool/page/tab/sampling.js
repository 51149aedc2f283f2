// Sampling: the native library picks the token, as it does for the server and the command line, and the same
// stages are repeated here for display: what each did to the candidates.

import { TabError } from "./errors.js";

/** The supported settings with the defaults of `SamplingSettings`. */
export const DEFAULTS = {
  temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, repetition_penalty: 1, frequency_penalty: 0,
  presence_penalty: 0, penalty_window: -1, penalize_prompt: true, seed: 0,
};
const RANGES = {
  temperature: [0, Infinity], top_k: [0, 2 ** 31], top_p: [0, 1], min_p: [0, 1], repetition_penalty: [1e-9, Infinity],
  frequency_penalty: [-Infinity, Infinity], presence_penalty: [-Infinity, Infinity], penalty_window: [-1, 2 ** 31],
};
const FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"];
const INTEGERS = ["top_k", "penalty_window"];
const SLACK = 1e-6; // relative tolerance of masses and probabilities
const MIN_TEMPERATURE = 1e-6;
const REPORT_TOP = 8; // tokens in the report of a stage

export function checkSettings(given) {
  const settings = { ...DEFAULTS };
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null) continue;
    if (!(name in DEFAULTS)) {
      throw new TabError("unsupported_setting", `The tab does not support ${name}; it supports ${Object.keys(DEFAULTS).join(", ")}.`);
    }
    const [least, most] = RANGES[name] ?? [];
    const isNumber = typeof value === "number" && Number.isFinite(value) && value >= least && value <= most;
    if (name in RANGES && (!isNumber || (INTEGERS.includes(name) && !Number.isInteger(value)))) {
      throw new TabError("unsupported_setting", `${name} must be a number from ${least} to ${most}, got ${value}.`);
    }
    settings[name] = value;
  }
  try {
    settings.seed = BigInt.asUintN(64, BigInt(settings.seed));
  } catch {
    throw new TabError("unsupported_setting", `seed must be an integer, got ${settings.seed}.`);
  }
  return settings;
}

const WORD = 0xffffffffn;

/** Random number in [0, 1) from seed, sample and position alone (Philox4x32-10), as in `sampling/draw.py`. */
export function uniform(seed, sample, position) {
  let [c0, c1, c2, c3] = [BigInt(position) & WORD, BigInt(sample) & WORD, (BigInt(sample) >> 32n) & WORD, 0n];
  let [k0, k1] = [seed & WORD, seed >> 32n];
  for (let round = 0; round < 10; round++) {
    const p0 = c0 * 0xd2511f53n;
    const p1 = c2 * 0xcd9e8d57n;
    [c0, c1, c2, c3] = [(p1 >> 32n) ^ c1 ^ k0, p1 & WORD, (p0 >> 32n) ^ c3 ^ k1, p0 & WORD];
    k0 = (k0 + 0x9e3779b9n) & WORD;
    k1 = (k1 + 0xbb67ae85n) & WORD;
  }
  return Number(((c0 << 32n) | c1) >> 11n) * 2 ** -53;
}

/** The tokens that penalties count, and how often each occurs. */
function countTokens(settings, history, promptLength) {
  let start = settings.penalize_prompt ? 0 : promptLength;
  if (settings.penalty_window >= 0) start = Math.max(start, history.length - settings.penalty_window);
  const counts = new Map();
  for (const token of history.slice(start)) counts.set(token, (counts.get(token) ?? 0) + 1);
  return { start, counts };
}

const PENALTIES = {
  repetition_penalty: (x, amount) => Math.fround(x > 0 ? x / Math.fround(amount) : x * Math.fround(amount)),
  frequency_penalty: (x, amount, count) => Math.fround(x - Math.fround(amount * count)),
  presence_penalty: (x, amount) => Math.fround(x - Math.fround(amount)),
};

export class Sampler {
  constructor(native, width, context) {
    Object.assign(this, { native, width });
    this.logits = native.allocate(width * 4);
    this.numbers = native.allocate((FLOATS.length + 6 + 4) * 8);
    this.history = native.allocate((context + 1) * 8);
    this.leaders = native.allocate(2 * width * 8);
  }

  load(logits) {
    this.native.floats(this.logits, this.width).set(logits);
  }

  /** Pick a token. The random number depends only on the seed, the sample and the position. */
  pick(logits, settings, { history, promptLength, position, sample = 0 }) {
    const { native, numbers } = this;
    const { start } = countTokens(settings, history, promptLength);
    const [ints, token, logprob] = [numbers + FLOATS.length * 8, numbers + 96, numbers + 104];
    this.load(logits);
    native.doubles(numbers, FLOATS.length).set(FLOATS.map((name) => settings[name]));
    native.setIntegers(ints, [settings.top_k, BigInt.asIntN(64, settings.seed), sample, position, start, history.length]);
    native.setIntegers(this.history, history);
    native.calls.unspool_pick(this.logits, 1n, BigInt(this.width), numbers, ints, this.history, 1, token, logprob, 0, 0);
    const picked = Number(native.integers(token, 1)[0]);
    if (picked < 0) throw new TabError("damaged", "The model gave logits that are not numbers.");
    return { token: picked, logprob: native.doubles(logprob, 1)[0] };
  }

  /** The `count` most likely tokens: `{ids, logits}`, ties by lower id. */
  leading(logits, count) {
    const { native, leaders } = this;
    const size = Math.min(count, this.width);
    this.load(logits);
    native.calls.unspool_leading(this.logits, 1n, BigInt(this.width), BigInt(size), leaders);
    return {
      ids: Array.from(native.integers(leaders + size * 8, size), Number),
      logits: Array.from(native.doubles(leaders, size)),
    };
  }

  /** The largest logit, the sum of exp(logit - peak), and the entropy in nats. */
  measure(logits) {
    const { native, numbers } = this;
    this.load(logits);
    native.calls.unspool_measure(this.logits, 1n, BigInt(this.width), 0, numbers);
    const [peak, total, entropy] = native.doubles(numbers, 3);
    return { peak, total, entropy: Math.max(0, entropy) };
  }

  /** The most likely tokens of the model, before any stage: `[{token, logprob, probability}]`. */
  top(logits, count) {
    const { peak, total } = this.measure(logits);
    const { ids, logits: values } = this.leading(logits, count);
    return ids.map((token, n) => {
      const logprob = values[n] - peak - Math.log(total);
      return { token, logprob, probability: Math.exp(logprob) };
    });
  }

  score(logits, token) {
    const { peak, total, entropy } = this.measure(logits);
    let rank = 0;
    for (const logit of logits) if (logit > logits[token]) rank++;
    return { logprob: logits[token] - peak - Math.log(total), rank, entropy };
  }

  /** Pick a token and report the candidates and what each stage did, with the keys of a step of the server. */
  step(logits, settings, input, top) {
    const { token } = this.pick(logits, settings, input);
    const stages = [];
    let edited = logits;
    let { peak, total } = this.measure(logits);
    const report = (name, fields, list) => stages.push({ name, ...fields, top: list });
    const { counts } = countTokens(settings, input.history, input.promptLength);
    for (const [name, change] of Object.entries(PENALTIES)) {
      if (settings[name] === DEFAULTS[name]) continue;
      edited = edited.slice();
      let changed = 0;
      for (const [id, count] of counts) {
        const value = change(edited[id], settings[name], count);
        if (value !== edited[id]) changed++;
        edited[id] = value;
      }
      ({ peak, total } = this.measure(edited));
      const best = this.leading(edited, REPORT_TOP);
      const list = best.ids.map((id, n) => [id, Math.exp(best.logits[n] - peak) / total]);
      report(name, { kept: this.width, removed: 0, kept_mass: 1, changed }, list);
    }

    // The remaining candidates are always the first `kept` of the sorted ones.
    const isGreedy = settings.temperature === 0;
    const needed = isGreedy ? REPORT_TOP : settings.top_k || this.width;
    const { ids, logits: values } = this.leading(edited, needed);
    let kept = this.width;
    const weight = (n) => Math.exp(values[n] - peak);
    const keep = (name, count) => {
      let mass = 0;
      for (let n = 0; n < count; n++) mass += weight(n);
      const fields = { kept: count, removed: kept - count, kept_mass: kept === count ? 1 : Math.min(1, mass / total), changed: 0 };
      [kept, total] = [count, mass];
      report(name, fields, ids.slice(0, Math.min(count, REPORT_TOP)).map((id, n) => [id, weight(n) / total]));
    };
    if (isGreedy) {
      keep("greedy", 1);
    } else {
      if (settings.top_k > 0) keep("top_k", Math.min(settings.top_k, kept));
      if (settings.top_p < 1) {
        const goal = settings.top_p * (1 - SLACK) * total;
        let [count, sum] = [0, 0];
        while (count < kept && sum < goal) sum += weight(count++);
        keep("top_p", Math.max(1, count));
      }
      if (settings.min_p > 0) {
        const bound = Math.min(peak + Math.log(settings.min_p) - SLACK, peak);
        let count = 1;
        while (count < kept && values[count] >= bound) count++;
        keep("min_p", count);
      }
      if (settings.temperature !== 1) {
        for (let n = 0; n < kept; n++) values[n] /= Math.max(settings.temperature, MIN_TEMPERATURE);
        peak = values[0];
        keep("temperature", kept);
        stages.at(-1).changed = kept;
      }
    }

    const final = new Map();
    let [low, draw] = [0, null];
    for (let n = 0; n < kept; n++) {
      const probability = weight(n) / total;
      final.set(ids[n], probability);
      if (ids[n] === token && !isGreedy) {
        draw = { u: uniform(settings.seed, input.sample ?? 0, input.position), low, high: Math.min(1, low + probability) };
      }
      low += probability;
    }
    return {
      token,
      ...this.score(logits, token),
      probability: final.get(token) ?? 0,
      draw,
      candidates: this.top(logits, top).map((candidate) => ({ ...candidate, probability: final.get(candidate.token) ?? 0 })),
      stages,
    };
  }
}
