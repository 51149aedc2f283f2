// The side panel: a column beside the text or, on a narrow screen, a sheet at the bottom; and its Settings panel.

import { clearFault, closeSheet, showPanel, updateSettings } from "../actions.js";
import { clamp, html, isNarrow, Lazy, storage, Tabs, useChanges, useEffect, useRef, useState } from "../lib.js";
import { FIELDS, PRESET_FIELDS, PRESETS, settingValue } from "../settings.js";
import { changed, currentBranch, state } from "../state.js";
import { PANELS } from "../views.js";

export function SettingsPanel() {
  useChanges("settings", "fault", "current");
  const isSet = (field) => state.settings[field.name] != null && state.settings[field.name] !== field.defaultValue;
  const [all, setAll] = useState(false);
  const basic = FIELDS.filter((field) => !field.isAdvanced && !field.isFormat);
  const formats = FIELDS.filter((field) => field.isFormat);
  const advanced = FIELDS.filter((field) => field.isAdvanced);
  const reset = () => {
    updateSettings(Object.fromEntries(FIELDS.map((field) => [field.name, null])));
    clearFault();
  };
  const branch = currentBranch();
  return html`<section class="stack" aria-labelledby="settings-title">
    <div class="row spread"><h2 id="settings-title">Settings</h2>
      <button class="button tiny" onClick=${reset} disabled=${!FIELDS.some(isSet)}>Reset</button></div>
    <p class="quiet small">They apply to the next tokens; existing text does not change.
      ${branch && html` Seed of this text: <code>${branch.seed}</code>.`}</p>
    <${Presets} />
    ${basic.map((field) => html`<${Field} field=${field} key=${field.name} />`)}
    ${formats.length > 0 && html`<details open=${formats.some(isSet)}>
      <summary>Output format</summary>
      <div class="stack more"><p class="quiet small">The sampler allows only tokens that can match. One format at a time.</p>
        ${formats.map((field) => html`<${Field} field=${field} key=${field.name} />`)}</div>
    </details>`}
    <details open=${all || advanced.some(isSet)} onToggle=${(event) => setAll(event.target.open)}>
      <summary>Advanced</summary>
      <div class="stack more">${advanced.map((field) => html`<${Field} field=${field} key=${field.name} />`)}</div>
    </details>
  </section>`;
}

const NOTHING = Object.fromEntries(PRESET_FIELDS.map(({ name }) => [name, null]));

/** Presets of the page and of this browser. */
function Presets() {
  const [userPresets, setUserPresets] = useState(() => storage.get("presets", {}));
  const [name, setName] = useState("");
  const values = Object.fromEntries(PRESET_FIELDS.filter((field) => state.settings[field.name] != null).map((field) => [field.name, state.settings[field.name]]));
  const all = { ...PRESETS, ...userPresets };
  const isSame = (preset) => JSON.stringify(Object.entries(preset).sort()) === JSON.stringify(Object.entries(values).sort());
  const current = Object.keys(all).find((title) => isSame(all[title])) ?? "";
  const keep = (presets) => {
    setUserPresets(presets);
    storage.set("presets", presets);
  };
  const save = (event) => {
    event.preventDefault();
    const title = name.trim();
    if (!title || title in PRESETS) return;
    keep({ ...userPresets, [title]: values });
    setName("");
  };
  const remove = () => keep(Object.fromEntries(Object.entries(userPresets).filter(([title]) => title !== current)));
  return html`<div class="setting stack"><label class="row spread"><span>Preset</span>
      <select class="field" id="preset" value=${current} onChange=${(event) => event.target.value && updateSettings({ ...NOTHING, ...all[event.target.value] })}>
        ${current === "" && html`<option value="">changed</option>`}
        ${Object.keys(all).map((title) => html`<option key=${title} value=${title}>${title}</option>`)}</select></label>
    ${current === "" && html`<form class="row" onSubmit=${save}>
      <input class="field preset-name" aria-label="Name of the new preset" placeholder="Name" maxlength="60" value=${name} onInput=${(event) => setName(event.target.value)} />
      <button class="button tiny" disabled=${!name.trim() || name.trim() in PRESETS}>Save preset</button></form>`}
    ${current in userPresets && html`<div><button type="button" class="button tiny" onClick=${remove}>Delete this preset</button></div>`}
  </div>`;
}

const KINDS = {
  number: NumberField, integer: IntegerField, switch: SwitchField, text: TextField, area: AreaField, lines: LinesField, json: JsonField,
};

function Field({ field }) {
  const fault = state.fault?.param === field.name ? state.fault.message : null;
  const id = `set-${field.name}`;
  const set = (value) => {
    const others = field.isFormat && value !== null ? FIELDS.filter(({ isFormat }) => isFormat) : [];
    updateSettings({ ...Object.fromEntries(others.map(({ name }) => [name, null])), [field.name]: value });
    if (fault) clearFault();
  };
  return html`<div class="setting">
    <${KINDS[field.kind]} field=${field} id=${id} set=${set} describedBy=${fault ? `${id}-fault` : `${id}-help`} />
    ${fault && html`<p class="bad small" id=${`${id}-fault`} role="alert">${fault}</p>`}
    <p class="quiet small" id=${`${id}-help`}>${field.help ?? ""}</p>
  </div>`;
}

/** A text field that commits on change; updates of its value do not overwrite what is being typed. */
export function CommittedInput({ as = "input", value, commit, ...attributes }) {
  const [typed, setTyped] = useState(null);
  const commitValue = (event) => {
    setTyped(null);
    commit(event.target.value);
  };
  return html`<${as} class="field" ...${attributes} value=${typed ?? value ?? ""} onChange=${commitValue}
    onInput=${(event) => setTyped(event.target.value)} onBlur=${() => setTyped(null)} />`;
}

const asNumber = (text) => (text === "" ? null : Number(text));

function NumberField({ field, id, set, describedBy }) {
  const value = settingValue(field);
  const setNumber = (text) => set(asNumber(text) === field.defaultValue ? null : asNumber(text));
  const { min, max, step } = field;
  return html`<div class="row spread"><label for=${id}>${field.title}</label>
      <${CommittedInput} id=${id} class="field number" type="number" step="any" value=${value} commit=${setNumber} aria-describedby=${describedBy} /></div>
    <input type="range" min=${min} max=${max} step=${step} value=${value} aria-label=${`${field.title}, slider`}
      onInput=${(event) => setNumber(event.target.value)} />`;
}

function IntegerField({ field, id, set, describedBy }) {
  const [fault, setFault] = useState(null);
  const { title, min = field.name === "max_tokens" ? 1 : 0, placeholder } = field;
  const setInteger = (text) => {
    const value = asNumber(text);
    const isValid = value === null || (Number.isSafeInteger(value) && value >= min);
    setFault(isValid ? null : `${title} must be an integer >= ${min}, got ${text}.`);
    if (isValid) set(value);
  };
  return html`<div class="row spread"><label for=${id}>${title}</label>
    <${CommittedInput} id=${id} class="field number" type="number" step="1" placeholder=${placeholder} aria-describedby=${describedBy}
      aria-invalid=${fault ? "true" : null} value=${state.settings[field.name]} commit=${setInteger} /></div>
    ${fault && html`<p class="bad small" role="alert">${fault}</p>`}`;
}

function SwitchField({ field, id, set, describedBy }) {
  const { on, off = null, defaultValue } = field;
  const toggle = (event) => set(event.target.checked ? (on === defaultValue ? null : on) : off);
  return html`<label class="row" for=${id}><input id=${id} type="checkbox" role="switch" checked=${settingValue(field) === on}
    onChange=${toggle} aria-describedby=${describedBy} /> ${field.title}</label>`;
}

function TextField({ field, id, set, describedBy }) {
  return html`<label for=${id}>${field.title}</label>
    <${CommittedInput} id=${id} class="field mono" value=${state.settings[field.name]} placeholder=${field.placeholder}
      aria-describedby=${describedBy} commit=${(text) => set(text || null)} />`;
}

function AreaField({ field, id, describedBy, value = state.settings[field.name], set }) {
  return html`<label for=${id}>${field.title}</label>
    <${CommittedInput} as="textarea" id=${id} class="field mono" rows="3" spellcheck="false" value=${value} placeholder=${field.placeholder}
      aria-describedby=${describedBy} commit=${(text) => set(text.trim() === "" ? null : text)} />`;
}

function LinesField({ set, ...props }) {
  const setLines = (text) => set(text?.split("\n").filter((line) => line !== "") ?? null);
  return html`<${AreaField} ...${props} value=${state.settings[props.field.name]?.join("\n")} set=${setLines} />`;
}

function JsonField({ set, ...props }) {
  const [fault, setFault] = useState(null);
  const [typed, setTyped] = useState(null); // text that is not valid JSON
  const value = state.settings[props.field.name];
  const setJson = (text) => {
    let schema = null;
    try {
      schema = text === null ? null : JSON.parse(text);
      if (text !== null && (typeof schema !== "object" || schema === null || Array.isArray(schema))) throw new Error("it must be an object");
    } catch (error) {
      setFault(`${props.field.title} is not valid JSON: ${error.message}`);
      setTyped(text);
      return;
    }
    setFault(null);
    setTyped(null);
    set(schema);
  };
  return html`<${AreaField} ...${props} value=${typed ?? (value && JSON.stringify(value, null, 2))} set=${setJson} />
    ${fault && html`<p class="bad small" role="alert">${fault}</p>`}`;
}

// -- the side panel -----------------------------------------------------------------------------

const TITLES = { token: "Token", branches: "Branches", context: "Context", settings: "Settings" };
const TABS = Object.fromEntries(Object.entries(TITLES).filter(([tab]) => PANELS.some((panel) => panel.tab === tab)));
const levelsOf = (tab) => PANELS.filter((panel) => panel.tab === tab);
const HIGHEST = 0.85; // of the screen
const LOWEST = 0.2; // below this it closes

let tokenLevel = PANELS[0].name; // the level of the first tab that was shown last

export function SidePanel() {
  useChanges("panel");
  const side = useRef();
  useEffect(() => closeOnTapOutside(side.current), []);
  const { file, component, tab } = PANELS.find(({ name }) => name === state.panel) ?? PANELS[0];
  const levels = levelsOf(tab);
  const pick = (other) => {
    if (isNarrow() && state.sheet && other === tab) closeSheet();
    else if (other !== tab || !state.sheet) showPanel(other === tab ? state.panel : other === "token" ? tokenLevel : other);
  };
  if (tab === "token") tokenLevel = state.panel;
  return html`<aside class=${`side ${state.sheet ? "up" : ""}`} ref=${side} aria-label="Details of the text">
    <div class="sheet-head">
      <span class="sheet-grip" aria-hidden="true" onPointerDown=${(event) => dragSheet(event, side.current)}></span>
      <button type="button" class="button plain tiny" id="close-sheet" aria-label="Close the panel" onClick=${closeSheet}>×</button>
    </div>
    <${Tabs} class="tabs" label="Panels" prefix="tab" controls="side-panel" tabs=${TABS} now=${tab} pick=${pick} />
    <div class="panel side-panel" id="side-panel" role="tabpanel" aria-labelledby=${`tab-${tab}`} data-panel=${state.panel} tabindex="-1">
      ${levels.length > 1 && html`<div class="segments small levels" role="group" aria-label="What to show of the token">
        ${levels.map(({ name, title }) => html`<button type="button" key=${name} id=${`level-${name}`} aria-pressed=${state.panel === name}
          onClick=${() => showPanel(name)}>${title}</button>`)}</div>`}
      <${Lazy} key=${file} file=${file} name=${component} />
    </div>
  </aside>`;
}

/** Close the sheet on a tap outside it, unless the tap is on a token. */
function closeOnTapOutside(side) {
  const onPointerDown = ({ target }) => {
    const isKept = side.contains(target) || target.closest(".t, .tour-card, dialog");
    if (!isNarrow() || !state.sheet || isKept) return;
    state.sheet = false; // not closeSheet: the focus follows the tap
    changed("panel");
  };
  document.addEventListener("pointerdown", onPointerDown);
  return () => document.removeEventListener("pointerdown", onPointerDown);
}

/** Drag the sheet up or down; far enough down, it closes. */
function dragSheet(event, side) {
  const grip = event.currentTarget;
  const [from, tall] = [event.clientY, side.offsetHeight];
  let share = tall / innerHeight;
  const moved = ({ clientY }) => {
    share = clamp((tall + from - clientY) / innerHeight, 0.05, HIGHEST);
    side.style.setProperty("--sheet", `${(100 * share).toFixed(1)}dvh`);
  };
  const released = () => {
    grip.removeEventListener("pointermove", moved);
    if (share > LOWEST) return;
    side.style.removeProperty("--sheet");
    closeSheet();
  };
  grip.setPointerCapture(event.pointerId);
  grip.addEventListener("pointermove", moved);
  grip.addEventListener("pointerup", released, { once: true });
  grip.addEventListener("pointercancel", released, { once: true });
}
