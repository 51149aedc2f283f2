// The settings of a column as a person types them, the usual choices among them, and their name.

import { html } from "../lib.js";

/** What can be set, and what the field shows while it is empty: the server's usual value. */
export const FIELDS = [
  { name: "temperature", label: "Temperature", short: "Temp", usual: "0.8" },
  { name: "top_k", label: "Top-k", short: "Top-k", usual: "40" },
  { name: "top_p", label: "Top-p", short: "Top-p", usual: "0.95" },
  { name: "min_p", label: "Min-p", short: "Min-p", usual: "0.05" },
  { name: "seed", label: "Seed", short: "Seed", usual: "any" },
];

const SEED = "7"; // the same in all columns: the same chance, so that only the settings differ

/** Temperature with nothing cut off, unless a cut is named. */
const only = (temperature, cuts = {}) => (
  { temperature, top_k: "0", top_p: "1", min_p: "0", ...cuts });

const PRESETS = [
  only("0"),
  only("0.3"),
  only("1.0"),
  only("1.5"),
  only("1.5", { top_k: "5" }),
  only("1.0", { top_p: "0.9" }),
  only("1.5", { min_p: "0.1" }),
  { temperature: "0.8", top_k: "40", top_p: "0.95", min_p: "0.05" },
];
export const USUAL = PRESETS.length - 1;

export const settingsOf = (preset, seed = SEED) => ({ ...PRESETS[preset], seed });
export const FIRST = [0, 1, 2, 4].map((preset) => settingsOf(preset));

/** Which preset these settings are; -1: none. */
function presetOf(settings) {
  return PRESETS.findIndex((preset) => (
    Object.keys(preset).every((name) => same(preset[name], settings[name]))));
}

const same = (one, other) => other.trim() !== "" && Number(one) === Number(other);

/** A short name: "Greedy", "T 0.3", "T 1.5, top-k 5". */
export function nameOf(settings) {
  const given = (name) => settings[name].trim();
  if (given("temperature") !== "" && Number(given("temperature")) === 0) return "Greedy";
  if (presetOf(settings) === USUAL) return "Usual settings";
  const parts = [`T ${given("temperature") || FIELDS[0].usual}`];
  if (Number(given("top_k") || 40) !== 0) parts.push(`top-k ${given("top_k") || 40}`);
  if (Number(given("top_p") || 0.95) !== 1) parts.push(`top-p ${given("top_p") || 0.95}`);
  if (Number(given("min_p") || 0.05) !== 0) parts.push(`min-p ${given("min_p") || 0.05}`);
  return parts.join(", ");
}

/** As the server takes them. Throws where something is no number; what is out of range the server says. */
export function sentSettings(settings) {
  const sent = {};
  for (const { name, label } of FIELDS) {
    const typed = settings[name].trim().replace(",", ".");
    if (typed === "") continue;
    const value = Number(typed);
    if (!Number.isFinite(value)) {
      throw Object.assign(new Error(`${label} was “${typed}”; it must be a number.`), { param: name });
    }
    sent[name] = value;
  }
  return sent;
}

export function Preset({ settings, of, change }) {
  const preset = presetOf(settings);
  return html`<select class="field cmp-preset" aria-label=${`Settings of ${of}`} value=${preset}
      onChange=${(event) => change(PRESETS[event.target.value])}>
    ${preset < 0 && html`<option value="-1">${nameOf(settings)}</option>`}
    ${PRESETS.map((each, index) => html`<option value=${index}>${nameOf(each)}</option>`)}
  </select>`;
}

export function Fields({ settings, fault, of, change }) {
  return html`<div class="cmp-fields">
    ${FIELDS.map(({ name, label, short, usual }) => html`<label key=${name}>
      <span class="quiet">${short}</span>
      <input class="field" type="text" inputmode="decimal" autocomplete="off" placeholder=${usual}
        aria-label=${`${label} of ${of}`} title=${label} value=${settings[name]}
        aria-invalid=${fault?.param === name ? "true" : null}
        onInput=${(event) => change({ [name]: event.target.value })} />
    </label>`)}
  </div>`;
}

export const Fault = ({ fault }) => fault && html`<p class="fault" role="alert">${fault.message}</p>`;
