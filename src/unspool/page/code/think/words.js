// Numbers of a search for people.

/** A score: short, with a real minus. */
export function scored(score) {
  if (score == null) return "–";
  const text = Number.isInteger(score) ? String(score) : Math.abs(score) >= 100 ? score.toFixed(0) : score.toFixed(2);
  return text.replace("-", "−");
}
