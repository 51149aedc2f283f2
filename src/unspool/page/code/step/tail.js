// The tokens behind the likeliest few hundred: their number and their summed weight are known, not
// each of them. Sums over all of them come from the server's `log_sums`, and are as good as exact. Where only
// a part of them is asked for, their weight is taken to fall as a power of the rank, with the
// exponent that gives the mass they really have.

export class Tail {
  constructor(few, { tokens, mass, log_sums }) {
    this.tokens = tokens;
    this.begin = few.length;
    this.edge = few[few.length - 1].level;
    const known = log_sums.filter(([, sum]) => sum !== null).map(([t, sum]) => [1 / t, sum]);
    // With no sharpness at all every token weighs 1.
    this.knots = [[0, Math.log(Math.max(1, tokens))], ...known.sort((a, b) => a[0] - b[0])];
    this.power = tokens > 0 ? this.#fitted(mass) : 1;
  }

  /** The logarithm of the sum of exp(level · sharpness) over the first `ranks` of them. */
  logSum(sharpness, ranks = this.tokens) {
    const whole = smooth(this.knots, sharpness);
    return ranks >= this.tokens ? whole : whole + Math.log(this.#share(sharpness, ranks));
  }

  /** How many of the first `ranks` it takes to reach this share of their weight. */
  ranksOfShare(share, sharpness, ranks) {
    const goal = share * this.#integral(sharpness, ranks);
    return Math.min(ranks, search(ranks, (rank) => this.#integral(sharpness, rank) >= goal));
  }

  /** How many have at least this level. */
  ranksAbove(level) {
    const rank = this.begin * Math.exp(Math.max(0, this.edge - level) / this.power) - this.begin;
    return Math.min(this.tokens, Math.floor(rank));
  }

  #share(sharpness, ranks) {
    return this.#integral(sharpness, ranks) / this.#integral(sharpness, this.tokens);
  }

  /** The weight of the first `ranks`, up to a factor: ∫ x^-power over ranks in units of `begin`. */
  #integral(sharpness, ranks, power = this.power) {
    const exponent = 1 - power * sharpness;
    const reach = Math.log1p(ranks / this.begin);
    return Math.abs(exponent) < 1e-9 ? reach : Math.expm1(exponent * reach) / exponent;
  }

  /** The power under which all of them together have this mass. */
  #fitted(mass) {
    const goal = mass / Math.exp(this.edge) / this.begin;
    let [low, high] = [0.001, 60];
    for (let round = 0; round < 60; round += 1) {
      const middle = (low + high) / 2;
      if (this.#integral(1, this.tokens, middle) > goal) low = middle;
      else high = middle;
    }
    return high;
  }
}

/** The least whole number up to `most` for which `enough` holds. */
function search(most, enough) {
  let [low, high] = [1, Math.max(1, most)];
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if (enough(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** A smooth line through the knots (cubic between neighbours), straight beyond the last. */
function smooth(knots, x) {
  const last = knots.length - 1;
  if (last < 1) return knots[0][1];
  const slope = (a, b) => (knots[b][1] - knots[a][1]) / (knots[b][0] - knots[a][0]);
  const bend = (at) => {
    if (at === 0) return slope(0, 1);
    if (at === last) return slope(last - 1, last);
    const [before, behind] = [knots[at][0] - knots[at - 1][0], knots[at + 1][0] - knots[at][0]];
    return (slope(at - 1, at) * behind + slope(at, at + 1) * before) / (before + behind);
  };
  if (x >= knots[last][0]) return knots[last][1] + (x - knots[last][0]) * bend(last);
  const at = Math.max(0, knots.findIndex(([place]) => place > x) - 1);
  const [[x0, y0], [x1, y1]] = [knots[at], knots[at + 1]];
  const width = x1 - x0;
  const t = (x - x0) / width;
  const [left, right] = [bend(at) * width, bend(at + 1) * width];
  const rise = y1 - y0;
  return y0 + t * (left + t * (3 * rise - 2 * left - right + t * (left + right - 2 * rise)));
}
