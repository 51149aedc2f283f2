// A run's log as curves: what lies along the picture, how it is scaled, smoothed and thinned.

import { clamp } from "../lib.js";

export const AXES = { step: "Steps", tokens: "Tokens", seconds: "Time" };

/** From values to shares of the picture (0 to 1) and back. Logarithms begin at 1 + value / unit. */
export function scale(low, high, unit = null) {
  const bend = unit === null ? (value) => value : (value) => Math.log1p(Math.max(0, value) / unit);
  const back = unit === null ? (bent) => bent : (bent) => Math.expm1(bent) * unit;
  const [from, to] = [bend(low), bend(high)];
  const span = to - from || 1;
  return {
    share: (value) => (bend(value) - from) / span,
    value: (share) => back(from + share * span),
  };
}

/** Where a step lies along an axis: between two logged ones, in proportion. */
export function along(lines, axis, step) {
  if (axis === "step" || step <= 0 || lines.length === 0) return axis === "step" ? step : 0;
  const next = indexAt(lines, "step", step);
  const after = lines[next];
  const before = next > 0 ? lines[next - 1] : { step: 0, tokens: 0, seconds: 0 };
  if (after.step <= step) return after[axis];
  const share = (step - before.step) / (after.step - before.step);
  return before[axis] + share * (after[axis] - before[axis]);
}

/** The first line whose value is at least this one; the last, if none is. */
export function indexAt(lines, axis, value) {
  let [low, high] = [0, lines.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lines[middle][axis] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The line nearest to a place. */
export function nearestLine(lines, axis, value) {
  if (lines.length === 0) return null;
  const at = indexAt(lines, axis, value);
  const before = lines[at - 1];
  return before && value - before[axis] < lines[at][axis] - value ? before : lines[at];
}

/**
 * The mean of each value and its neighbours, more of them the further the run is (`reach`, a share of the way):
 * even in a logarithmic picture, and never behind the curve as a running mean is.
 */
export function smoothed(values, reach) {
  const sums = [0];
  const counts = [0];
  for (const value of values) {
    const is = Number.isFinite(value);
    sums.push(sums.at(-1) + (is ? value : 0));
    counts.push(counts.at(-1) + is);
  }
  return values.map((value, at) => {
    const half = Math.round(at * reach);
    const [from, to] = [at - half, Math.min(values.length, at + half + 1)];
    return Number.isFinite(value) ? (sums[to] - sums[from]) / (counts[to] - counts[from]) : NaN;
  });
}

/** A path through points, of which those in one column of pixels are drawn as its lowest and highest. */
export function path(points) {
  const parts = [];
  let column = null;
  const flush = () => {
    if (!column) return;
    const { x, first, low, high, last } = column;
    const ys = [...new Set([first, low, high, last])];
    for (const y of ys) parts.push(`${parts.length ? "L" : "M"}${x} ${y.toFixed(1)}`);
  };
  for (const [place, y] of points) {
    if (!Number.isFinite(y)) continue;
    const x = Math.round(place * 2) / 2;
    if (column?.x === x) Object.assign(column, { low: Math.max(column.low, y), high: Math.min(column.high, y), last: y });
    else {
      flush();
      column = { x, first: y, low: y, high: y, last: y };
    }
  }
  flush();
  return parts.join("");
}

/** Round numbers for an axis whose scale is logarithmic: 1, 10, 100, or 1, 2, 5 where there is room. */
export function logTicks(low, high, wanted = 4) {
  const powers = Math.log10(high / Math.max(low, high * 1e-9));
  const times = powers > wanted ? [1] : [1, 2, 5];
  const found = [];
  for (let power = Math.floor(Math.log10(Math.max(low, high * 1e-6))); 10 ** power <= high; power += 1) {
    for (const each of times) {
      const value = each * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  const every = Math.max(1, Math.ceil(found.length / (wanted * 2)));
  return found.filter((_, at) => (found.length - 1 - at) % every === 0);
}

/** Of checkpoints along the picture, so many around the one nearest to a share of it. */
export function framesAround(shares, share, wanted) {
  let nearest = 0;
  shares.forEach((each, at) => {
    if (Math.abs(each - share) < Math.abs(shares[nearest] - share)) nearest = at;
  });
  const start = clamp(nearest - Math.floor((wanted - 1) / 2), 0, Math.max(0, shares.length - wanted));
  return { nearest, start, end: Math.min(shares.length, start + wanted) };
}
