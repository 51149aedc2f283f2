// The settings that the next tokens are written with.

import { html, useChanges, useState } from "../lib.js";
import { branchNow, state } from "../state.js";
import { clearFault, useSettings } from "../actions.js";
import { FIELDS, valueOf } from "../settings.js";

export function SettingsPanel() {
  useChanges("settings", "fault", "current");
  const isSet = (field) => state.settings[field.name] != null && state.settings[field.name] !== field.usual;
  const [all, setAll] = useState(false);
  const usual = FIELDS.filter((field) => !field.more);
  const more = FIELDS.filter((field) => field.more);
  const reset = () => {
    useSettings(Object.fromEntries(FIELDS.map((field) => [field.name, null])));
    clearFault();
  };
  const branch = branchNow();
  return html`<section class="stack" aria-labelledby="settings-title">
    <div class="row spread"><h2 id="settings-title">Settings</h2>
      <button class="button tiny" onClick=${reset} disabled=${!FIELDS.some(isSet)}>Reset</button></div>
    <p class="quiet small">They hold for what is written next; what stands there stays.
      ${branch && html` This text has the seed <code>${branch.seed}</code>.`}</p>
    ${usual.map((field) => html`<${Field} field=${field} key=${field.name} />`)}
    <details open=${all || more.some(isSet)} onToggle=${(event) => setAll(event.target.open)}>
      <summary>More</summary>
      <div class="stack more">${more.map((field) => html`<${Field} field=${field} key=${field.name} />`)}</div>
    </details>
  </section>`;
}

const KINDS = { number: NumberField, whole: WholeField, switch: SwitchField, text: TextField };

function Field({ field }) {
  const fault = state.fault?.param === field.name ? state.fault.message : null;
  const id = `set-${field.name}`;
  const set = (value) => {
    useSettings({ [field.name]: value });
    if (fault) clearFault();
  };
  return html`<div class="setting">
    <${KINDS[field.kind]} field=${field} id=${id} set=${set} describedBy=${fault ? `${id}-fault` : `${id}-help`} />
    ${fault && html`<p class="bad small" id=${`${id}-fault`} role="alert">${fault}</p>`}
    <p class="quiet small" id=${`${id}-help`}>${field.help ?? ""}</p>
  </div>`;
}

/** A field whose words are taken when they are done; what happens meanwhile does not touch them. */
function Typed({ value, commit, ...rest }) {
  const [typed, setTyped] = useState(null);
  const take = (event) => {
    setTyped(null);
    commit(event.target.value);
  };
  return html`<input class="field" ...${rest} value=${typed ?? value ?? ""} onChange=${take}
    onInput=${(event) => setTyped(event.target.value)} onBlur=${() => setTyped(null)} />`;
}

const asNumber = (text) => (text === "" ? null : Number(text));

function NumberField({ field, id, set, describedBy }) {
  const value = valueOf(field);
  const put = (text) => set(asNumber(text) === field.usual ? null : asNumber(text));
  const { least, most, step } = field;
  return html`<div class="row spread"><label for=${id}>${field.title}</label>
      <${Typed} id=${id} class="field number" type="number" step="any" value=${value} commit=${put} aria-describedby=${describedBy} /></div>
    <input type="range" min=${least} max=${most} step=${step} value=${value} aria-label=${`${field.title}, slider`}
      onInput=${(event) => put(event.target.value)} />`;
}

function WholeField({ field, id, set, describedBy }) {
  return html`<div class="row spread"><label for=${id}>${field.title}</label>
    <${Typed} id=${id} class="field number" type="number" step="1" placeholder=${field.placeholder} aria-describedby=${describedBy}
      value=${state.settings[field.name]} commit=${(text) => set(asNumber(text))} /></div>`;
}

function SwitchField({ field, id, set, describedBy }) {
  const { on, off = null, usual } = field;
  const put = (event) => set(event.target.checked ? (on === usual ? null : on) : off);
  return html`<label class="row" for=${id}><input id=${id} type="checkbox" role="switch" checked=${valueOf(field) === on}
    onChange=${put} aria-describedby=${describedBy} /> ${field.title}</label>`;
}

function TextField({ field, id, set, describedBy }) {
  return html`<label for=${id}>${field.title}</label>
    <${Typed} id=${id} class="field mono" value=${state.settings[field.name]} placeholder=${field.placeholder}
      aria-describedby=${describedBy} commit=${(text) => set(text || null)} />`;
}
