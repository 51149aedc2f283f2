// The settings of a column, or of all samples: a menu of usual ones, and each by itself.
// `of` says whose they are: "column 2", "the samples".

import { html } from "../lib.js";
import { FIELDS, PRESETS, nameOf, presetOf } from "./settings.js";

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

export const Fault = ({ fault }) => fault && html`<p class="cmp-fault" role="alert">${fault.message}</p>`;
