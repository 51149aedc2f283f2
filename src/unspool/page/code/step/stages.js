// The stages of the sampling chain in words, and what can be read from their reports.

import { count, percent } from "../lib.js";
import { FIELDS } from "../settings.js";

const NAMES = {
  top_k: "top-k",
  top_p: "top-p",
  min_p: "min-p",
  typical_p: "typical",
  top_n_sigma: "top-nσ",
  xtc: "XTC",
  dry: "DRY",
  dynamic_temperature: "dynamic T",
  repetition_penalty: "repetition",
  frequency_penalty: "frequency",
  presence_penalty: "presence",
  no_repeat_ngram: "no repeats",
  logit_bias: "bias",
};
export const stageName = (name) => NAMES[name] ?? name.replaceAll("_", " ");

const WORDS = {
  top_k: (s) => `keeps the ${count(s.top_k)} likeliest`,
  top_p: (s) => `keeps the fewest that together reach ${percent(s.top_p)}`,
  min_p: (s) => `keeps what is at least ${percent(s.min_p)} as likely as the best`,
  temperature: (s) => `${s.temperature} ${s.temperature < 1 ? "favors the likely" : "evens out the chances"}`,
  greedy: () => "temperature 0 takes the likeliest, always",
  typical_p: () => "keeps what is about as surprising as one would expect",
  eta: () => "drops what is too unlikely for so sure a guess",
  top_n_sigma: () => "keeps what stands out from the noise",
  xtc: () => "now and then drops the top choices",
  dry: () => "lowers what would repeat a passage",
  no_repeat_ngram: () => "forbids what would repeat a run of tokens",
  logit_bias: () => "raises or lowers tokens by hand",
  repetition_penalty: () => "lowers tokens that occurred before",
  frequency_penalty: () => "lowers tokens by how often they occurred",
  presence_penalty: () => "lowers tokens that occurred at all",
  dynamic_temperature: () => "is colder the surer the model is",
  mirostat: () => "aims at an even surprise",
  grammar: () => "keeps what the form allows",
  forbidden: () => "drops what a guard forbids here",
};
export const stageWords = (name, settings) => WORDS[name]?.(settings) ?? "";

// These keep the first so many of the candidates in order, or all of them.
const KEEPS_ORDER = new Set([
  "top_k", "top_p", "min_p", "eta", "top_n_sigma", "mirostat", "temperature", "dynamic_temperature", "greedy",
]);

/** The name of the stage that removed a candidate of this rank; null if none did or none can be told. */
export function removedBy(token, rank, stages) {
  let ordered = true;
  for (const { name, kept, removed, top } of stages) {
    ordered &&= KEEPS_ORDER.has(name);
    if (!removed || top.some(([one]) => one === token)) continue;
    if (kept <= top.length || (ordered && rank >= kept)) return name;
  }
  return null;
}

/** All candidates that are known to be left at the end, likeliest first. */
export function finalists(step) {
  const found = new Map();
  for (const { token, text, probability } of step.candidates) found.set(token, { token, text, probability });
  for (const [token, probability, text] of step.stages.at(-1)?.top ?? []) {
    if (step.stages.at(-1).name !== "greedy") found.set(token, { token, text, probability });
  }
  const left = [...found.values()].filter(({ probability }) => probability > 0);
  return left.sort((a, b) => b.probability - a.probability || a.token - b.token);
}

/** A color for each token, the same in all pictures of a step: those left at the end come first. */
export function huesOf(step, others = []) {
  const order = [...finalists(step), ...step.candidates, ...others].map(({ token }) => token);
  const hues = new Map();
  for (const token of order) {
    if (!hues.has(token)) hues.set(token, hues.size < 6 ? `hue-${hues.size + 1}` : "hue-0");
  }
  if ((hues.get(step.token) ?? "hue-0") === "hue-0") hues.set(step.token, "hue-pick");
  return hues;
}

/** With which settings this step was written; what a run left open is the usual value. */
export function settingsOf(branch, step) {
  const settings = { ...branch.settings };
  const run = branch.runs?.findLast(({ from }) => from <= step.index);
  for (const { name, usual } of run ? FIELDS : []) {
    if (name in run.settings) settings[name] = run.settings[name] ?? usual;
  }
  return settings;
}
