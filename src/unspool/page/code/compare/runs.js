// The state of the Compare view: settings of the columns and samples, and their generation. It outlives the view.

import { addBranch, applyEvent, CANDIDATES, dropUnused } from "../actions.js";
import { api, ApiError } from "../api.js";
import { html } from "../lib.js";
import { shortName } from "../models.js";
import { changed, state } from "../state.js";
import { readPrompt } from "./prompt.js";

/** Settings of a column; `defaultValue` is the placeholder. */
const FIELDS = [
  { name: "temperature", label: "Temperature", short: "Temp", defaultValue: "0.8" },
  { name: "top_k", label: "Top-k", short: "Top-k", defaultValue: "40" },
  { name: "top_p", label: "Top-p", short: "Top-p", defaultValue: "0.95" },
  { name: "min_p", label: "Min-p", short: "Min-p", defaultValue: "0.05" },
  { name: "seed", label: "Seed", short: "Seed", defaultValue: "random" },
];

const SEED = "7"; // the same in all columns, so that only the settings differ

/** Temperature without other stages, unless they are given. */
const unfiltered = (temperature, cuts = {}) => (
  { temperature, top_k: "0", top_p: "1", min_p: "0", ...cuts });

const PRESETS = [
  unfiltered("0"),
  unfiltered("0.3"),
  unfiltered("1.0"),
  unfiltered("1.5"),
  unfiltered("1.5", { top_k: "5" }),
  unfiltered("1.0", { top_p: "0.9" }),
  unfiltered("1.5", { min_p: "0.1" }),
  { temperature: "0.8", top_k: "40", top_p: "0.95", min_p: "0.05" },
];
const DEFAULT_PRESET = PRESETS.length - 1;

const settingsOf = (preset, seed = SEED) => ({ ...PRESETS[preset], seed });
const FIRST_COLUMNS = [0, 1, 2, 4].map((preset) => settingsOf(preset));

/** Index of the preset with these settings; -1: none. */
function presetOf(settings) {
  return PRESETS.findIndex((preset) => (
    Object.keys(preset).every((name) => isSameNumber(preset[name], settings[name]))));
}

const isSameNumber = (a, b) => b.trim() !== "" && Number(a) === Number(b);

/** A short name: "Greedy", "T 0.3", "T 1.5, top-k 5". */
export function nameOf(settings) {
  const typed = (name) => settings[name].trim();
  if (typed("temperature") !== "" && Number(typed("temperature")) === 0) return "Greedy";
  if (presetOf(settings) === DEFAULT_PRESET) return "Default settings";
  const parts = [`T ${typed("temperature") || FIELDS[0].defaultValue}`];
  if (Number(typed("top_k") || 40) !== 0) parts.push(`top-k ${typed("top_k") || 40}`);
  if (Number(typed("top_p") || 0.95) !== 1) parts.push(`top-p ${typed("top_p") || 0.95}`);
  if (Number(typed("min_p") || 0.05) !== 0) parts.push(`min-p ${typed("min_p") || 0.05}`);
  return parts.join(", ");
}

/** Settings as numbers for a request. Throws if one is not a number; the server checks ranges. */
function parseSettings(settings) {
  const values = {};
  for (const { name, label } of FIELDS) {
    const typed = settings[name].trim().replace(",", ".");
    if (typed === "") continue;
    const value = Number(typed);
    if (!Number.isFinite(value)) {
      throw Object.assign(new Error(`${label} must be a number, got “${typed}”.`), { param: name });
    }
    values[name] = value;
  }
  return values;
}

export function Preset({ settings, owner, change }) {
  const preset = presetOf(settings);
  return html`<select class="field cmp-preset" aria-label=${`Settings of ${owner}`} value=${preset}
      onChange=${(event) => change(PRESETS[event.target.value])}>
    ${preset < 0 && html`<option value="-1">${nameOf(settings)}</option>`}
    ${PRESETS.map((option, index) => html`<option value=${index}>${nameOf(option)}</option>`)}
  </select>`;
}

export function Fields({ settings, fault, owner, change }) {
  return html`<div class="cmp-fields">
    ${FIELDS.map(({ name, label, short, defaultValue }) => html`<label key=${name}>
      <span class="quiet">${short}</span>
      <input class="field" type="text" inputmode="decimal" autocomplete="off" placeholder=${defaultValue}
        aria-label=${`${label} of ${owner}`} title=${label} value=${settings[name]}
        aria-invalid=${fault?.param === name ? "true" : null}
        onInput=${(event) => change({ [name]: event.target.value })} />
    </label>`)}
  </div>`;
}

export const FieldError = ({ fault }) => fault && html`<p class="fault" role="alert">${fault.message}</p>`;

// -- state ------------------------------------------------------------------------------------

export const MOST_COLUMNS = 4;
export const MOST_SAMPLES = 16;

const newColumn = (settings, model = null) => (
  { key: (nextKey += 1), settings, model, id: null, fault: null, writing: false, began: 0, until: 0 });
let nextKey = 0;

/** Topic "compare". */
export const compare = {
  columns: FIRST_COLUMNS.map((settings) => newColumn(settings)),
  models: [], // columns with the same settings, one for each model
  samples: {
    number: 8, settings: settingsOf(DEFAULT_PRESET, ""), root: null, ids: [], fault: null, writing: false,
    selected: null, // index of the sample whose text is shown
  },
};

const notify = () => changed("compare");
export const isWriting = () => (
  compare.samples.writing || [...compare.columns, ...compare.models].some((column) => column.writing));

export function setSamples(values) {
  Object.assign(compare.samples, values);
  notify();
}

/** The columns of a view: of settings, or of models. The models are those of the server at first. */
export function columnsOf(picture) {
  if (picture === "settings") return compare.columns;
  if (!compare.models.length && state.models.length) {
    const here = [...state.models].sort((a, b) => (b.id === state.model) - (a.id === state.model) || b.unspool.loaded - a.unspool.loaded);
    compare.models = here.filter(({ unspool }) => unspool.fits !== false || unspool.loaded).slice(0, 2)
      .map(({ id }) => newColumn(settingsOf(DEFAULT_PRESET), id));
  }
  return compare.models;
}

export function setColumn(column, values) {
  Object.assign(column.settings, values);
  column.fault = null;
  notify();
}

export function addColumn(columns) {
  const last = columns.at(-1);
  const used = new Set(columns.map(({ model }) => model));
  const model = last.model && (state.models.find(({ id }) => !used.has(id))?.id ?? last.model);
  columns.push(newColumn({ ...last.settings }, model));
  notify();
}

export function setModel(column, model) {
  column.model = model;
  column.fault = null;
  notify();
}

export function removeColumn(columns, column) {
  columns.splice(columns.indexOf(column), 1);
  dropUnused([column.id]);
  notify();
}

// -- generation -------------------------------------------------------------------------------

/** Generate all columns, or all samples. */
export async function writeAll(picture) {
  if (isWriting()) return;
  const prompt = readPrompt();
  if (!prompt) return;
  const request = { ...prompt, top: CANDIDATES };
  if (state.model) request.model = state.model;
  await (picture === "samples" ? writeSamples(request) : writeColumns([...columnsOf(picture)], request));
}

/** Create all branches before the first resumes, so that the server generates them in one batch. */
async function writeColumns(columns, request) {
  const before = columns.map((column) => column.id);
  for (const column of columns) {
    Object.assign(column, { id: null, fault: null, writing: true, began: 0, until: 0 });
  }
  dropUnused(before);
  notify();
  await Promise.all(columns.map((column) => reportErrors(column, async () => {
    const settings = parseSettings(column.settings);
    const name = column.model ? shortName(column.model) : nameOf(column.settings);
    const body = { ...request, ...settings, name, ...(column.model ? { model: column.model } : {}) };
    column.id = addBranch(await api.post("/v1/tree", body), settings);
  })));
  await Promise.all(columns.filter((column) => column.id && column.writing).map(async (column) => {
    await reportErrors(column, async () => {
      column.began = column.until = performance.now();
      for await (const { event, data } of api.resume(column.id, { stream: true })) {
        applyEvent(event, data);
        column.until = performance.now();
        notify();
      }
    });
    column.writing = false;
    notify();
  }));
}

async function writeSamples(request) {
  const samples = compare.samples;
  const before = [...samples.ids, samples.root];
  Object.assign(samples, { root: null, ids: [], fault: null, writing: true, selected: null });
  dropUnused(before);
  notify();
  await reportErrors(samples, async () => {
    const settings = parseSettings(samples.settings);
    const name = `${samples.number} samples, ${nameOf(samples.settings)}`;
    samples.root = addBranch(await api.post("/v1/tree", { ...request, ...settings, name }), settings);
    const body = { n: samples.number, stream: true };
    for await (const { event, data } of api.resume(samples.root, body)) {
      if (!samples.ids.includes(data.branch)) {
        samples.ids.push(addBranch({ ...data.data, steps: [], since: 0 }, settings));
      }
      applyEvent(event, data);
      notify();
    }
  });
  samples.writing = false;
  notify();
}

/** Run an action; its error is shown in `place`, and others continue. */
async function reportErrors(place, action) {
  try {
    await action();
  } catch (error) {
    place.writing = false;
    place.fault = { message: error.message, param: error.param ?? null };
    notify();
    if (!(error instanceof ApiError) && !error.param) throw error; // a bug: report it in the console
  }
}

/** Stop all generations after their current step. */
export function stopAll() {
  const { samples } = compare;
  const columns = [...compare.columns, ...compare.models];
  for (const column of columns) if (!column.began) column.writing = false; // not started yet
  const ids = columns.filter((column) => column.writing).map((column) => column.id);
  if (samples.writing) ids.push(...samples.ids);
  for (const id of ids) api.stop(id).catch(() => {}); // the stream reports the error
}
