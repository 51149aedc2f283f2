// What is said of a text in one number, and where two texts part.

/** The first place where two texts differ; -1 while neither says anything the other does not. */
export function partsAt(steps, first) {
  const both = Math.min(steps.length, first.length);
  for (let at = 0; at < both; at += 1) if (steps[at].token !== first[at].token) return at;
  return -1;
}

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
