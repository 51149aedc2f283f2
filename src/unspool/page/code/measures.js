// What a text tells of the model that wrote it, in single numbers. Null: there is nothing to measure.

/** The share of runs of four tokens that had been there before. */
export function repeatedFours(steps) {
  const seen = new Set();
  let again = 0;
  const runs = steps.length - 3;
  for (let at = 0; at < runs; at += 1) {
    const run = [0, 1, 2, 3].map((next) => steps[at + next].token).join(" ");
    if (seen.has(run)) again += 1;
    seen.add(run);
  }
  return runs > 0 ? again / runs : null;
}

const mean = (steps, of) => (
  steps.length ? steps.reduce((sum, step) => sum + of(step), 0) / steps.length : null);

export const meanSurprise = (steps) => mean(steps, (step) => -step.logprob);
export const meanEntropy = (steps) => mean(steps, (step) => step.entropy);

const WINDOW = 20; // words: how far back a reader notices a word that comes again

/** The share of words that stood among the last few words before. */
export function repeatedWords(text) {
  const words = text.toLowerCase().match(/[\p{L}\p{N}'’]+/gu) ?? [];
  if (words.length < 2) return null;
  const again = words.filter((word, at) => words.slice(Math.max(0, at - WINDOW), at).includes(word));
  return again.length / words.length;
}
