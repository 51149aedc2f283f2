// Straight lines through measured times, and two texts held against each other.

/** The line that comes closest to the values (least squares): `{start, slope}`. */
export function line(values) {
  let n = 0, sumX = 0, sumY = 0, sumXX = 0, sumXY = 0;
  values.forEach((y, x) => {
    if (!Number.isFinite(y)) return;
    n += 1;
    sumX += x;
    sumY += y;
    sumXX += x * x;
    sumXY += x * y;
  });
  const spread = n * sumXX - sumX * sumX;
  if (n === 0) return { start: 0, slope: 0 };
  const slope = spread === 0 ? 0 : (n * sumXY - sumX * sumY) / spread;
  return { start: (sumY - slope * sumX) / n, slope };
}

/** The values of such a line. */
export const along = ({ start, slope }, length) => Array.from({ length }, (_, x) => start + slope * x);

export const sum = (values) => values.reduce((total, x) => total + (Number.isFinite(x) ? x : 0), 0);

/** How many tokens two texts have in common before they part. */
export function common(ours, theirs) {
  const most = Math.min(ours.length, theirs.length);
  let same = 0;
  while (same < most && ours[same].token === theirs[same].token) same++;
  return same;
}

/** So high that the few outliers at the top do not flatten the rest; for a scale. */
export function ceiling(values, share = 0.97) {
  const stride = Math.max(1, Math.floor(values.length / 400));
  const some = [];
  for (let i = values.length - 1; i >= 0; i -= stride) {
    if (Number.isFinite(values[i])) some.push(values[i]);
  }
  if (some.length === 0) return 0;
  some.sort((a, b) => a - b);
  const most = some.length > 3 ? some.length - 2 : some.length - 1; // one outlier, at least
  return some[Math.min(most, Math.floor(share * some.length))];
}
