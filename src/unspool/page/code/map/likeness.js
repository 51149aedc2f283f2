// What two branches have in common, and how they differ. Pure.

// They change what is told of a text, how soon it comes or how long it is, and not how it goes on.
const TECHNICAL = new Set(["top", "trace", "priority", "max_tokens"]);

/** How many steps from the first on have the same token. */
export function sharedSteps(one, other) {
  const most = Math.min(one.steps.length, other.steps.length);
  let same = 0;
  while (same < most && one.steps[same].token === other.steps[same].token) same += 1;
  return same;
}

export function samePrompt(one, other) {
  const [left, right] = [one, other].map((branch) => branch.prompt?.tokens ?? []);
  return left.length === right.length && left.every((token, at) => token.id === right[at].id);
}

/** How likely the model held a whole text, and how sure it was on the way. */
export function summary(branch) {
  const { steps } = branch;
  const length = steps.length;
  // A probability of zero is told as null: JSON has no infinity.
  const logprob = steps.reduce((sum, step) => sum + (step.logprob ?? -Infinity), 0);
  const entropy = steps.reduce((sum, step) => sum + (step.entropy ?? 0), 0);
  const per = (sum) => (length ? sum / length : null);
  return {
    length, logprob, perToken: length ? Math.exp(logprob / length) : null,
    perplexity: length ? Math.exp(-logprob / length) : null, entropy: per(entropy),
  };
}

/** Settings of two branches that are not the same: `{name, values: [one, other]}`. */
export function differing(one, other) {
  const names = new Set([...Object.keys(one ?? {}), ...Object.keys(other ?? {})]);
  return [...names].filter((name) => !TECHNICAL.has(name))
    .map((name) => ({ name, values: [one?.[name] ?? null, other?.[name] ?? null] }))
    .filter(({ values }) => JSON.stringify(values[0]) !== JSON.stringify(values[1]));
}
