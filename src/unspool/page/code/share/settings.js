// Settings as a request gives them: only what differs from the usual, and all that decides a text.

const STAGES = [
  "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram", "dry", "logit_bias",
  "top_n_sigma", "top_k", "typical_p", "eta", "top_p", "min_p", "xtc", "dynamic_temperature", "temperature",
];

/** The server's own, where a request says nothing. */
export const USUAL = {
  temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, typical_p: 1, eta: 0, top_n_sigma: 0,
  xtc_probability: 0, xtc_threshold: 0.1, repetition_penalty: 1, frequency_penalty: 0, presence_penalty: 0,
  penalty_window: -1, penalize_prompt: true, no_repeat_ngram: 0, dry_multiplier: 0, dry_base: 1.75,
  dry_allowed_length: 2, dry_window: -1, dry_breakers: [], logit_bias: {}, dynatemp_range: 0,
  dynatemp_exponent: 1, mirostat_tau: 0, mirostat_eta: 0.1, stages: STAGES, stop: [], sample: 0, guard: null,
  regex: null, grammar: null, choice: null, json_schema: null, speculate: null, end: true, cache: true,
  think_budget: null,
};

const GRAMMARS = ["regex", "grammar", "choice", "json_schema"];
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** Every setting that decides a text, with its value; null and nothing mean the usual one. */
export function complete(settings) {
  const found = {};
  for (const name of Object.keys(USUAL)) found[name] = settings[name] ?? USUAL[name];
  if (found.mirostat_tau > 0) found.stages = null; // its stages follow from its being on
  return found;
}

/** Only what differs from the usual. */
export function unusual(settings) {
  const found = complete(settings);
  for (const name of Object.keys(found)) {
    if (found[name] === null || same(found[name], USUAL[name])) delete found[name];
  }
  return found;
}

const NEVER_NULL = new Set(["sample", "end", "cache", "stop"]);

/** What a request must say so that nothing of earlier settings remains: null is the usual value. */
export function asRequest(settings) {
  const found = complete(settings);
  const grammar = GRAMMARS.find((name) => found[name] !== null) ?? GRAMMARS[0];
  for (const name of Object.keys(found)) {
    if (GRAMMARS.includes(name) && name !== grammar) delete found[name];
    else if (!NEVER_NULL.has(name) && same(found[name], USUAL[name])) found[name] = null;
  }
  return found;
}

/** Only what must be said so that these settings hold after those. */
export function changesBetween(before, after) {
  const [old, now] = [asRequest(before), asRequest(after)];
  return Object.fromEntries(Object.entries(now).filter(([name, value]) => !same(value, old[name] ?? null)));
}

/** The settings of each stretch of a branch: `{from, settings, seed}`, the first from 0 on. */
export function runsOf(branch) {
  const known = (branch.runs ?? []).filter((run) => run.from <= branch.steps.length);
  const runs = known.map(({ from, settings }) => ({
    from,
    settings: { ...branch.settings, ...settings },
    seed: settings.seed ?? branch.seed,
  }));
  if (!runs.length || runs[0].from > 0) {
    runs.unshift({ from: 0, settings: branch.settings, seed: branch.seed });
  }
  return runs;
}

const key = (run) => JSON.stringify([complete(run.settings), run.seed]);

/** Guards and mirostat begin anew with each run; without them it does not matter where one began. */
const startMatters = ({ guard, mirostat_tau }) => Boolean(guard || mirostat_tau);

/** What guards took back. */
export const takenBack = (branch) => (branch.retracted ?? []).filter(({ verb }) => verb === "retract");

/**
 * How a branch came about from step `since` on: stretches that were written, each with one run's
 * settings, and stretches that a person put there. `reached` is how far a guard let the text grow
 * before it was taken back, which a replay must allow too.
 */
export function piecesOf(branch, since = 0) {
  const runs = runsOf(branch);
  const pieces = [];
  let at = 0;
  branch.steps.forEach((step, index) => {
    while (at + 1 < runs.length && runs[at + 1].from <= index) at += 1;
    if (index < since) return;
    const run = runs[at];
    const last = pieces[pieces.length - 1];
    const kind = step.chosen ? "chosen" : "written";
    const goesOn = last && last.kind === kind && (kind === "chosen" || last.run === run
      || (!startMatters(run.settings) && key(last.run) === key(run)));
    if (goesOn) last.to = index + 1;
    else pieces.push({ kind, from: index, to: index + 1, reached: index + 1, run });
  });
  for (const piece of pieces) {
    const cuts = takenBack(branch).filter((cut) => cut.at >= piece.from && cut.at < piece.to);
    // One more than was seen: a guard judges a token before it is sent.
    piece.reached = Math.max(piece.to, ...cuts.map((cut) => cut.at + cut.steps.length + 1));
  }
  return pieces;
}
