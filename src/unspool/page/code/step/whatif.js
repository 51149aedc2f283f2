// What the sampling chain would have made of a step with other settings. Numbers only, no page.
//
//   const found = whatIf(start, {temperature: 0.5, top_k: 40, top_p: 0.9, min_p: 0}, u);
//   found.stages, found.candidates, found.pick
//
// `start` holds the likeliest few hundred tokens with their log-probabilities, and of all others
// their number and, for several temperatures, the logarithm of their summed weight. Everything is
// exact as long as no filter cuts among those others; where one does, a power law stands in for them.
// None of the four stages changes the order of the candidates: each keeps the first so many.

import { Tail } from "./tail.js";

const SLACK = 1e-6; // so close to its limit counts as reaching it, as on the server
const COLDEST = 1e-6;
const SHOWN = 8; // candidates that a stage tells
export const SIMULATED = ["top_k", "top_p", "min_p", "temperature"];
const NEUTRAL = { top_k: 0, top_p: 1, min_p: 0, temperature: 1 };

/** Candidates likeliest first from the server's `alternatives`. */
export function startOf({ candidates, rest }) {
  return {
    candidates: candidates
      .filter(({ logprob }) => logprob !== null)
      .map(({ token, text, logprob }) => ({ token, text, level: logprob })),
    rest,
  };
}

/**
 * The same after a stage that changed single tokens, such as a penalty: the few that its report names
 * are taken from there, all others move together as the unchanged ones among those few did.
 */
export function startAfter(start, { kept, top }) {
  const told = new Map(top.map(([token, chance]) => [token, Math.log(chance)]));
  if (kept <= top.length) {
    const candidates = top.map(([token, , text]) => ({ token, text, level: told.get(token) }));
    return { candidates, rest: { tokens: 0, mass: 0, log_sums: [] } };
  }
  const moved = start.candidates
    .filter(({ token }) => told.has(token))
    .map(({ token, level }) => told.get(token) - level);
  if (!moved.length) return start;
  const shift = Math.max(...moved);
  const least = Math.min(...told.values());
  const candidates = start.candidates.map((one) => ({
    ...one,
    level: told.get(one.token) ?? Math.min(one.level + shift, least),
  }));
  candidates.sort((a, b) => b.level - a.level || a.token - b.token);
  const log_sums = start.rest.log_sums.map(([t, sum]) => [t, sum === null ? null : sum + shift / t]);
  return { candidates, rest: { ...start.rest, log_sums } };
}

/** The chain with these settings: its stages, the candidates after them, and what `u` falls on. */
export function whatIf(start, settings, u = null) {
  const few = start.candidates;
  const all = few.length + start.rest.tokens;
  if (settings.temperature === 0) return greedy(few, all);
  let row = new Row(few, new Tail(few, start.rest));
  const stages = [];
  for (const name of settings.stages ?? SIMULATED) {
    if (!SIMULATED.includes(name) || settings[name] === NEUTRAL[name]) continue;
    const before = row;
    row = APPLY[name](row, settings[name]);
    stages.push(report(name, before, row));
  }
  return { stages, ...drawn(row, u), exact: row.exact };
}

function greedy([best], all) {
  const one = { ...best, probability: 1, low: 0, high: 1 };
  const top = [[best.token, 1, best.text]];
  const stage = { name: "greedy", kept: 1, removed: all - 1, top, kept_mass: Math.exp(best.level) };
  return { stages: [stage], candidates: [one], rest: { tokens: 0, probability: 0 }, pick: one, exact: true };
}

const APPLY = {
  top_k: (row, k) => row.first(k),
  top_p: (row, p) => row.reaching(p * (1 - SLACK)),
  min_p: (row, share) => row.above(Math.log(share) - SLACK),
  temperature: (row, t) => row.scaled(Math.max(t, COLDEST)),
};

/** What remains: the first `kept` of the known ones, and the first `others` of those behind. */
class Row {
  constructor(few, tail, kept = few.length, others = tail.tokens, sharpness = 1, exact = true) {
    Object.assign(this, { few, tail, kept, others, sharpness, exact });
    const peak = few[0].level * sharpness;
    this.weights = few.slice(0, kept).map(({ level }) => Math.exp(level * sharpness - peak));
    this.othersWeight = others > 0 ? Math.exp(tail.logSum(sharpness, others) - peak) : 0;
    this.fewWeight = this.weights.reduce((sum, weight) => sum + weight, 0);
    this.total = this.fewWeight + this.othersWeight;
  }

  get size() {
    return this.kept + this.others;
  }

  first(number) {
    if (number >= this.size) return this;
    if (number <= this.kept) {
      return new Row(this.few, this.tail, Math.max(1, number), 0, this.sharpness, this.exact);
    }
    const others = number - this.kept;
    return new Row(this.few, this.tail, this.kept, others, this.sharpness, false);
  }

  reaching(share) {
    const goal = share * this.total;
    let sum = 0;
    for (let place = 0; place < this.kept; place += 1) {
      sum += this.weights[place];
      if (sum >= goal) return this.first(place + 1);
    }
    if (!this.others) return this;
    const part = Math.min(1, (goal - sum) / this.othersWeight);
    return this.first(this.kept + this.tail.ranksOfShare(part, this.sharpness, this.others));
  }

  above(distance) {
    const bound = Math.min(0, distance);
    const peak = this.few[0].level * this.sharpness;
    const inside = this.few.slice(0, this.kept).findIndex(({ level }) => level * this.sharpness - peak < bound);
    if (inside >= 0) return this.first(inside);
    return this.others ? this.first(this.kept + this.tail.ranksAbove((bound + peak) / this.sharpness)) : this;
  }

  scaled(temperature) {
    const sharpness = this.sharpness / temperature;
    return new Row(this.few, this.tail, this.kept, this.others, sharpness, this.exact);
  }
}

function report(name, before, after) {
  const mass = after.sharpness === before.sharpness ? Math.min(1, after.total / before.total) : 1;
  const top = after.weights
    .slice(0, SHOWN)
    .map((weight, place) => [after.few[place].token, weight / after.total, after.few[place].text])
    .filter(([, chance]) => chance > 0);
  return { name, kept: after.size, removed: before.size - after.size, kept_mass: mass, top };
}

/** Candidates end to end, likeliest first; `pick` is null if u falls among those without a name. */
function drawn(row, u) {
  let high = 0;
  let pick = null;
  const target = u === null ? null : u * row.total;
  const candidates = row.weights.map((weight, place) => {
    const low = high;
    high += weight;
    const one = {
      ...row.few[place], probability: weight / row.total, low: low / row.total, high: high / row.total,
    };
    if (pick === null && target !== null && high > target) pick = one;
    return one;
  });
  // u times the total may round up to the total itself: then the last of any weight is hit.
  if (pick === null && target !== null && !row.others) pick = candidates.findLast((one) => one.probability > 0);
  const rest = { tokens: row.others, probability: row.othersWeight / row.total };
  return { candidates, rest, pick };
}
