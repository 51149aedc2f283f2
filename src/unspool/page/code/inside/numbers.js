// Numbers of any size, short.

/** Three digits: 0.0312, 2.29, 157, 12,400. */
export function rounded(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  if (size < 0.0005) return value.toExponential(1).replace("-", "−");
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 4;
  return value.toFixed(digits).replace("-", "−");
}

/** With its sign, as a push. */
export const signed = (value) => (value > 0 ? `+${rounded(value)}` : rounded(value));
