// Generation settings: the fields of the settings panel, and the values that requests send.

import { state } from "./state.js";
import { isTab } from "./tab/client.js";

const numberField = (min, max, step) => ({ kind: "number", min, max, step });

/** Those that the engine in a browser tab has. */
const TAB_FIELDS = new Set([
  "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "penalty_window", "seed",
  "max_tokens", "cache", "end", "stop",
]);

/** In display order. `defaultValue` is the server's; `isAdvanced` fields are folded. */
export const FIELDS = [
  { name: "temperature", title: "Temperature", defaultValue: 0.8, ...numberField(0, 2, 0.05),
    help: "Above 1 flattens the distribution, below 1 sharpens it; 0 is greedy." },
  { name: "top_k", title: "Top-k", defaultValue: 40, ...numberField(0, 200, 1),
    help: "Keep the k most likely tokens; 0 is off." },
  { name: "top_p", title: "Top-p", defaultValue: 0.95, ...numberField(0.01, 1, 0.01),
    help: "Keep the most likely tokens that together reach this probability; 1 is off." },
  { name: "min_p", title: "Min-p", defaultValue: 0.05, ...numberField(0, 0.5, 0.01),
    help: "Drop tokens below min-p × the top probability; 0 is off." },
  { name: "repetition_penalty", title: "Repetition penalty", defaultValue: 1, ...numberField(0.5, 2, 0.05),
    help: "Above 1, tokens that already occurred become less likely." },
  { name: "seed", title: "Seed", defaultValue: null, kind: "integer", placeholder: "random",
    help: "The same seed gives the same text." },
  { name: "max_tokens", title: "Max tokens", defaultValue: 200, kind: "integer", placeholder: "200",
    help: "Stop after this many tokens; Continue generates more." },
  { name: "guard", title: "Guard against loops", defaultValue: null, kind: "switch", on: "loop",
    help: "When the text repeats itself, rewind and sample another continuation." },
  { name: "speculate", title: "Speculative decoding", defaultValue: null, kind: "switch", on: "lookup",
    help: "Prompt lookup: draft tokens from earlier in the text and verify several in one pass. The text stays the same." },
  { name: "cache", title: "KV cache", defaultValue: true, kind: "switch", on: true, off: false,
    help: "Off: every step recomputes the whole text. The text stays the same, only slower." },
  { name: "think_budget", title: "Reasoning budget", defaultValue: null, kind: "integer", placeholder: "no limit", isAdvanced: true,
    help: "Close the reasoning after this many tokens; 0 skips it. Only for models that reason." },
  { name: "end", title: "Stop at the end-of-text token", defaultValue: true, kind: "switch", on: true, off: false,
    isAdvanced: true, help: "Off: the end-of-text token is ignored." },
  { name: "stop", title: "Stop string", defaultValue: null, kind: "text", isAdvanced: true,
    placeholder: "text to stop at", help: "Generation stops before this text." },
  { name: "json_schema", title: "JSON schema", defaultValue: null, kind: "json", isFormat: true,
    placeholder: '{"type": "object", "properties": {"city": {"type": "string"}}}', help: "The answer is JSON that matches this schema." },
  { name: "choice", title: "Choices", defaultValue: null, kind: "lines", isFormat: true,
    placeholder: "yes\nno", help: "The answer is one of these lines." },
  { name: "regex", title: "Regular expression", defaultValue: null, kind: "text", isFormat: true,
    placeholder: "[0-9]{4}", help: "A regular expression that the text must match." },
  { name: "grammar", title: "Grammar", defaultValue: null, kind: "area", isFormat: true,
    placeholder: 'root ::= "yes" | "no"', help: "A GBNF or Lark grammar that the text must match." },
  { name: "frequency_penalty", title: "Frequency penalty", defaultValue: 0, ...numberField(-2, 2, 0.1), isAdvanced: true,
    help: "Subtract this from a token's logit for each time it occurred." },
  { name: "presence_penalty", title: "Presence penalty", defaultValue: 0, ...numberField(-2, 2, 0.1), isAdvanced: true,
    help: "Subtract this from the logit of every token that occurred." },
  { name: "no_repeat_ngram", title: "No-repeat n-gram", defaultValue: 0, kind: "integer", isAdvanced: true,
    placeholder: "0", help: "No n-gram of this length occurs twice; 0 is off." },
  { name: "dry_multiplier", title: "DRY", defaultValue: 0, ...numberField(0, 2, 0.1), isAdvanced: true,
    help: "Penalize tokens that would extend a repetition, more for longer ones; 0 is off." },
  { name: "dry_base", title: "DRY base", defaultValue: 1.75, ...numberField(1, 4, 0.05), isAdvanced: true,
    help: "Growth of the DRY penalty with each repeated token." },
  { name: "dry_allowed_length", title: "DRY allowed length", defaultValue: 2, kind: "integer", isAdvanced: true,
    placeholder: "2", help: "Repetitions shorter than this have no DRY penalty." },
  { name: "penalty_window", title: "Penalty window", defaultValue: -1, kind: "integer", min: -1, isAdvanced: true,
    placeholder: "-1", help: "Number of last tokens that penalties count; -1: all." },
  { name: "penalize_prompt", title: "Penalize tokens of the prompt", defaultValue: true, kind: "switch", on: true, off: false, isAdvanced: true,
    help: "Off: penalties count only generated tokens." },
  { name: "typical_p", title: "Typical-p", defaultValue: 1, ...numberField(0.05, 1, 0.05), isAdvanced: true,
    help: "Keep tokens whose surprisal is close to the entropy; 1 is off." },
  { name: "top_n_sigma", title: "Top-n-sigma", defaultValue: 0, ...numberField(0, 5, 0.1), isAdvanced: true,
    help: "Keep tokens whose logit is within n standard deviations of the top logit; 0 is off." },
  { name: "xtc_probability", title: "XTC", defaultValue: 0, ...numberField(0, 1, 0.05), isAdvanced: true,
    help: "With this probability, drop the top choices when several are likely; 0 is off." },
  { name: "xtc_threshold", title: "XTC threshold", defaultValue: 0.1, ...numberField(0, 0.5, 0.01), isAdvanced: true,
    help: "Probability from which on XTC excludes a token." },
  { name: "eta", title: "Eta", defaultValue: 0, ...numberField(0, 0.05, 0.001), isAdvanced: true,
    help: "Epsilon of eta sampling; 0 is off." },
  { name: "dynatemp_range", title: "Dynamic temperature range", defaultValue: 0, ...numberField(0, 2, 0.05), isAdvanced: true,
    help: "Temperature ± this, by the entropy of the model; 0 is off." },
  { name: "mirostat_tau", title: "Mirostat", defaultValue: 0, ...numberField(0, 10, 0.5), isAdvanced: true,
    help: "Target surprisal in bits; 0 is off." },
  { name: "mirostat_eta", title: "Mirostat learning rate", defaultValue: 0.1, ...numberField(0.01, 1, 0.01), isAdvanced: true,
    help: "How fast mirostat adapts." },
].filter(({ name }) => !isTab || TAB_FIELDS.has(name));

/** Settings that are often used together; each sets those it names and resets the others of the sampler. */
export const PRESETS = Object.fromEntries(Object.entries({
  Default: {},
  Greedy: { temperature: 0 },
  Focused: { temperature: 0.4, top_p: 0.9 },
  Creative: { temperature: 1.2, min_p: 0.08, top_k: 0, top_p: 1 },
  Unfiltered: { temperature: 1, top_k: 0, top_p: 1, min_p: 0 },
  "No repetition": { dry_multiplier: 0.8, repetition_penalty: 1.05 },
}).filter(([, preset]) => Object.keys(preset).every((name) => FIELDS.some((field) => field.name === name))));

const NOT_IN_PRESETS = new Set(["seed", "max_tokens", "cache", "speculate"]);
/** The fields that a preset has. */
export const PRESET_FIELDS = FIELDS.filter(({ name, isFormat }) => !isFormat && !NOT_IN_PRESETS.has(name));
const FORMATS = FIELDS.filter(({ isFormat }) => isFormat).map(({ name }) => name);

const NOT_PER_RUN = new Set(["seed", "max_tokens"]);

export const settingValue = (field) => state.settings[field.name] ?? field.defaultValue;

/** All settings of the panel; null resets one that the branch had to the default. The seed stays the branch's. */
export function requestSettings() {
  const values = {};
  for (const { name, defaultValue } of FIELDS) {
    if (NOT_PER_RUN.has(name) || FORMATS.includes(name)) continue;
    const value = state.settings[name] ?? null;
    values[name] = value === null && typeof defaultValue === "boolean" ? defaultValue : value;
  }
  if (FORMATS.length) {
    const format = FORMATS.find((name) => state.settings[name] != null) ?? "regex"; // null resets any format before
    values[format] = state.settings[format] ?? null;
  }
  if (typeof values.stop === "string") values.stop = values.stop ? [values.stop] : null;
  return values;
}
