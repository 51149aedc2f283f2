// Numbers of a report for people, as the report's own page writes them.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three digits that count, without a tail of zeros. */
export const short = (value) => String(Number(value.toPrecision(3))).replace("-", "−");

export function told(value, unit = "") {
  if (value == null) return "–";
  if (unit === "%") return `${Math.abs(value) < 1 ? short(100 * value) : WHOLE.format(100 * value).replace("-", "−")} %`;
  const text = Number.isInteger(value) || Math.abs(value) >= 1000 ? WHOLE.format(value).replace("-", "−") : short(value);
  return `${text} ${unit}`.trimEnd();
}

/** The 95 % interval; empty where there is none. */
export function interval({ low, high, unit }) {
  if (low == null || high == null) return "";
  const first = told(low, unit);
  return `${unit && first.endsWith(unit) ? first.slice(0, -unit.length).trimEnd() : first} … ${told(high, unit)}`;
}

/** Which of several models is surely better: its interval lies beyond all others. Nats say that only of models with the same tokens. */
export function winner(figures, sameTokens) {
  const { better, unit } = figures.find(Boolean) ?? {};
  if (figures.length < 2 || !better || (unit.startsWith("nats") && !sameTokens)) return null;
  const beats = (one, other) => (better === "lower" ? one.high != null && other.low != null && one.high < other.low
    : one.low != null && other.high != null && one.low > other.high);
  const found = figures.findIndex((one) => one && figures.every((other) => other === one || (other && beats(one, other))));
  return found < 0 ? null : found;
}
