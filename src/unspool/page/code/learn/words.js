// Numbers of a training, for people.

const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

export const compact = (n) => (n == null || !Number.isFinite(n) ? "–" : SHORT.format(n));
export const nats = (x) => (x == null || !Number.isFinite(x) ? "–" : x.toFixed(x < 1 ? 3 : 2));
export const bits = (x) => (x == null || !Number.isFinite(x) ? "–" : x.toFixed(3));

/** 42 s, 3:05, 1:02:05. */
export function clock(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${seconds < 10 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** How far into a run a step is: "30 %". */
export function shareOf(step, run) {
  const steps = run?.steps || 0;
  if (!steps) return "";
  const value = (100 * step) / steps;
  return `${value < 10 && value % 1 > 0.05 ? value.toFixed(1) : Math.round(value)} %`;
}
