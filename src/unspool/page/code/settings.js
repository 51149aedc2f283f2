// What decides how a text is written: the fields of the settings panel, and what is sent of them.

import { state } from "./state.js";

const number = (least, most, step) => ({ kind: "number", least, most, step });

/** In the order shown. `usual` is the server's; `more` are shown on demand. */
export const FIELDS = [
  { name: "temperature", title: "Temperature", usual: 0.8, ...number(0, 2, 0.05),
    help: "Above 1 flattens the chances, below sharpens them; 0 always takes the likeliest." },
  { name: "top_k", title: "Top-k", usual: 40, ...number(0, 200, 1),
    help: "Only the k likeliest tokens stay; 0 keeps all." },
  { name: "top_p", title: "Top-p", usual: 0.95, ...number(0.01, 1, 0.01),
    help: "The likeliest stay until they have this much of the probability together." },
  { name: "min_p", title: "Min-p", usual: 0.05, ...number(0, 0.5, 0.01),
    help: "Tokens less likely than this share of the likeliest go." },
  { name: "repetition_penalty", title: "Repetition penalty", usual: 1, ...number(0.5, 2, 0.05),
    help: "Above 1, what was there already becomes less likely." },
  { name: "seed", title: "Seed", usual: null, kind: "whole", placeholder: "by chance",
    help: "The same seed writes the same text." },
  { name: "max_tokens", title: "Tokens to write", usual: 200, kind: "whole", placeholder: "200" },
  { name: "guard", title: "Guard against loops", usual: null, kind: "switch", on: "loop",
    help: "When the text repeats itself, steps are taken back and another way is tried." },
  { name: "speculate", title: "Speculation", usual: null, kind: "switch", on: "lookup",
    help: "Guess ahead what stood in the text before; right guesses come several at a time." },
  { name: "cache", title: "Cache", usual: true, kind: "switch", on: true, off: false,
    help: "Off: the whole text is read again for every token. The text is the same, only slower." },
  { name: "think_budget", title: "Tokens of thought", usual: null, kind: "whole", placeholder: "no limit", more: true,
    help: "Where the model thinks before it answers: after so many tokens the thought is closed; 0: at once." },
  { name: "end", title: "May end by itself", usual: true, kind: "switch", on: true, off: false,
    more: true, help: "Off: the model goes on where it would end." },
  { name: "stop", title: "Stop at", usual: null, kind: "text", more: true,
    placeholder: "words at which to stop", help: "The text ends before these words." },
  { name: "regex", title: "Pattern", usual: null, kind: "text", more: true,
    placeholder: "[0-9]{4}", help: "A regular expression that the text must match." },
  { name: "frequency_penalty", title: "Frequency penalty", usual: 0, ...number(-2, 2, 0.1), more: true,
    help: "Less likely by this much for each time a token was there." },
  { name: "presence_penalty", title: "Presence penalty", usual: 0, ...number(-2, 2, 0.1), more: true,
    help: "Less likely by this much once a token was there." },
  { name: "no_repeat_ngram", title: "No repeated run of", usual: 0, kind: "whole", more: true,
    placeholder: "0", help: "No run of so many tokens comes twice; 0 is off." },
  { name: "dry_multiplier", title: "DRY", usual: 0, ...number(0, 2, 0.1), more: true,
    help: "The longer a repeat would grow, the less likely its next token." },
  { name: "typical_p", title: "Typical-p", usual: 1, ...number(0.05, 1, 0.05), more: true,
    help: "Keeps tokens about as surprising as expected; 1 is off." },
  { name: "top_n_sigma", title: "Top-n-sigma", usual: 0, ...number(0, 5, 0.1), more: true,
    help: "Keeps tokens within so many deviations of the best score; 0 is off." },
  { name: "xtc_probability", title: "XTC", usual: 0, ...number(0, 1, 0.05), more: true,
    help: "With this chance, the likeliest of several good tokens are left out." },
  { name: "mirostat_tau", title: "Mirostat", usual: 0, ...number(0, 10, 0.5), more: true,
    help: "Holds the surprise at this many bits; 0 is off." },
];

const NOT_SENT = new Set(["seed", "max_tokens"]);

export const valueOf = (field) => state.settings[field.name] ?? field.usual;

/**
 * All settings of the panel, those that are not set as null, which means the usual value: so that
 * a branch that went on with others goes back to it. The seed stays the branch's own.
 */
export function requestSettings() {
  const sent = {};
  for (const { name, usual } of FIELDS) {
    if (NOT_SENT.has(name)) continue;
    const value = state.settings[name] ?? null;
    sent[name] = value === null && typeof usual === "boolean" ? usual : value;
  }
  if (typeof sent.stop === "string") sent.stop = sent.stop ? [sent.stop] : null;
  return sent;
}
