// The Steer section of the Inside panel: changes inside the model from the selected token on, and the text with and
// without them.

import { attempt, pauseWriting, pushUndo, setCurrent } from "../actions.js";
import { api } from "../api.js";
import { html, isWord, Piece, plural, RequestError, useChanges, useEffect, useRequest, useState } from "../lib.js";
import { adopt, currentBranch, promptLength, state, tokenAt } from "../state.js";
import { options, placeInText } from "../inside/lookups.js";
import { placeOf } from "../write/history.js";
import { differences, interventionName, PART_NAMES, strengthText, streamSteered, valueText } from "./changes.js";
import { Features } from "./features.js";

const DEBOUNCE_MS = 80;
const LENGTHS = [20, 40, 80, 160]; // tokens of a preview
const NUM_BEFORE = 6; // tokens shown before the first new one
const MAX_CHANGES = 8; // of the server
const STRENGTHS = {
  vector: { min: -4, max: 4, step: 0.1, start: 1.5 },
  token: { min: -1, max: 1, step: 0.02, start: 0.3 },
  scale: { min: 0, max: 3, step: 0.05, start: 0 },
};

const draft = { changes: [], length: 40, next: 1 }; // stays when another token is selected

const kindOf = ({ what }) => (what === "token" || what === "scale" ? what : what.split(":", 1)[0]);
const isComplete = (change) => change.what !== "token" || change.token !== "";

/** A change as the server takes it. */
function asRequest({ what, token, site, first, last, head, strength, sae, feature }, offers) {
  if (kindOf({ what }) === "feature") return { feature, sae, strength };
  const part = offers.parts.find((item) => item.site === site);
  const layers = part.layers.filter((layer) => layer >= first && layer <= last);
  const kind = { vector: { vector: what.slice(7) }, token: { token }, scale: { scale: true } }[kindOf({ what })];
  return { ...kind, site, layers, strength, ...(head === null ? {} : { heads: [head] }) };
}

/** A new change of a kind, with layers that fit it. */
function newChange(what, offers, before = {}) {
  const kind = kindOf({ what });
  const site = before.site && (kind === "scale" || before.site !== "head_out") ? before.site : kind === "scale" ? offers.parts.at(-1).site : "resid_post";
  const { layers } = offers.parts.find((part) => part.site === site);
  const vector = offers.vectors.find(({ name }) => what === `vector:${name}`);
  const late = layers[Math.floor((2 * layers.length) / 3)]; // where a direction of the output head has an effect after some layers
  const layer = layers.includes(options.layer - 1) ? options.layer - 1 : late;
  const [first, last] = vector ? [vector.layers[0], vector.layers.at(-1)] : [layer, layer];
  return { id: draft.next++, token: "", ...before, range: undefined, feature: undefined, what, site, first, last, head: site === "head_out" ? before.head ?? 0 : null, strength: STRENGTHS[kind].start };
}

export function Steer() {
  useChanges("current", "selection", "inside", "server");
  const [, redraw] = useState(0);
  const branch = currentBranch();
  const at = Math.max(0, state.selected - promptLength(branch));
  const isPrompt = state.selected < promptLength(branch);
  const { key } = placeInText(branch, state.selected);
  const offersRequest = useRequest((signal) => api.get(`/v1/tree/${branch.id}/steer`, { signal }), 0, [branch.model, state.server.ready]);
  const offers = offersRequest.answer;
  const set = (changes) => {
    draft.changes = changes;
    redraw((n) => n + 1);
  };
  const update = (id, values) => set(draft.changes.map((change) => (change.id === id ? { ...change, ...values } : change)));
  const setLength = (event) => {
    draft.length = Number(event.target.value);
    redraw((n) => n + 1);
  };
  useEffect(() => {
    // Of another model: parts, layers and vectors are different.
    const fits = (change) => (kindOf(change) === "feature" ? offers.autoencoders.some(({ name }) => name === change.sae) : fitsParts(change));
    const fitsParts = (change) => offers.parts.some((part) => part.site === change.site && part.layers.includes(change.first) && part.layers.includes(change.last))
      && (kindOf(change) !== "vector" || offers.vectors.some(({ name }) => change.what === `vector:${name}`));
    if (offers && !draft.changes.every(fits)) set(draft.changes.filter(fits));
  }, [offers]);

  const isOf = (sae, feature) => (change) => change.sae === sae && change.feature === feature && kindOf(change) === "feature";
  const body = { at, max_tokens: draft.length, ...(isPrompt ? { first: state.selected } : {}) };
  const changes = offers ? draft.changes.filter(isComplete).map((change) => asRequest(change, offers)) : [];
  if (!offers) return html`<${RequestError} ...${offersRequest} />${!offersRequest.fault && html`<p class="quiet small" role="status">Loading …</p>`}`;
  if (!offers.parts.length) return html`<p class="quiet small">The backend of this model cannot change what happens inside it; the CPU and torch backends can.</p>`;
  return html`
    <p class="quiet small">Change values inside the model from <${Piece} text=${tokenAt(branch, state.selected)?.text} /> on. The text is generated
      again with the same seed, with and without the changes.</p>
    ${offers.autoencoders.length > 0 && html`<${Features} branch=${branch} position=${state.selected} textKey=${key} autoencoders=${offers.autoencoders}
      clamped=${(sae, feature) => draft.changes.some(isOf(sae, feature))}
      clamp=${(change) => draft.changes.length < MAX_CHANGES && set([...draft.changes, { id: draft.next++, ...change }])}
      release=${(sae, feature) => set(draft.changes.filter((change) => !isOf(sae, feature)(change)))} />`}
    ${draft.changes.map((change, index) => html`<${ChangeForm} key=${change.id} number=${index + 1} change=${change} offers=${offers}
      update=${(values) => update(change.id, values)} replace=${(other) => set(draft.changes.map((item) => (item.id === change.id ? other : item)))}
      remove=${() => set(draft.changes.filter(({ id }) => id !== change.id))} />`)}
    <div class="row">
      ${draft.changes.length < MAX_CHANGES && html`<${AddChange} isFirst=${!draft.changes.length} offers=${offers} add=${(change) => set([...draft.changes, change])} />`}
      <label class="small">Tokens${" "}<select class="field inside-choice" id="steer-length" value=${draft.length} onChange=${setLength}>
        ${LENGTHS.map((length) => html`<option value=${length}>${length}</option>`)}</select></label>
    </div>
    ${changes.length > 0 && html`<${Outcome} branch=${branch} textKey=${key} body=${body} changes=${changes} discard=${() => set([])} />`}`;
}

/** Options of what is done; values are `vector:NAME`, `token` and `scale`. */
const whatOptions = ({ vectors }, { what, feature } = {}) => html`
  ${feature !== undefined && what.startsWith("feature:") && html`<option value=${what}>set feature ${feature}</option>`}
  ${vectors.length > 0 && html`<optgroup label="Steering vectors">${vectors.map(({ name }) => html`<option value=${`vector:${name}`}>add ${name}</option>`)}</optgroup>`}
  <option value="token">add the direction of a token</option>
  <option value="scale">scale a part (0: knock out)</option>`;

function AddChange({ isFirst, offers, add }) {
  const picked = (event) => {
    add(newChange(event.target.value, offers));
    event.target.value = "";
  };
  return html`<select class="field small" id="steer-add" aria-label=${isFirst ? "Choose a change" : "Add another change"} value="" onChange=${picked}>
    <option value="" disabled>${isFirst ? "Choose a change …" : "Add another change …"}</option>${whatOptions(offers)}</select>`;
}

/** What a change does, and the button that removes it. */
function WhatRow({ number, change, offers, replace, remove }) {
  return html`<div class="row spread"><select class="field inside-choice" id=${`steer-what-${number}`} aria-label="What is done" value=${change.what}
      onChange=${({ target }) => replace({ ...newChange(target.value, offers, change), id: change.id })}>${whatOptions(offers, change)}</select>
    <button type="button" class="button plain tiny" aria-label=${`Remove change ${number}`} onClick=${remove}>×</button></div>`;
}

function StrengthRow({ number, change, update, label }) {
  const id = `steer-strength-${number}`;
  const range = change.range ?? STRENGTHS[kindOf(change)];
  const text = kindOf(change) === "feature" ? valueText(change.strength) : strengthText(change.strength);
  return html`<div class="steer-strength"><label class="small" for=${id}>${label}</label>
    <input id=${id} type="range" min=${range.min} max=${range.max} step=${range.step} value=${change.strength}
      aria-valuetext=${text} onInput=${({ target }) => update({ strength: target.valueAsNumber })} />
    <output class="mono small" for=${id}>${text}</output></div>`;
}

/** A feature of a sparse autoencoder, set to a value. */
function FeatureForm({ number, change, offers, update, replace, remove }) {
  return html`<fieldset class="steer-change">
    <legend class="visually-hidden">Change ${number}</legend>
    <${WhatRow} number=${number} change=${change} offers=${offers} replace=${replace} remove=${remove} />
    <${StrengthRow} number=${number} change=${change} update=${update} label="Value" />
  </fieldset>`;
}

function ChangeForm({ number, change, offers, update, replace, remove }) {
  const kind = kindOf(change);
  if (kind === "feature") return html`<${FeatureForm} number=${number} change=${change} offers=${offers} update=${update} replace=${replace} remove=${remove} />`;
  const parts = offers.parts.filter(({ site }) => kind === "scale" || site !== "head_out");
  const part = offers.parts.find(({ site }) => site === change.site);
  const vector = offers.vectors.find(({ name }) => change.what === `vector:${name}`);
  const layers = vector ? part.layers.filter((layer) => vector.layers.includes(layer)) : part.layers;
  const heads = part.heads[part.layers.indexOf(change.first)] ?? 0;
  const id = (name) => `steer-${name}-${number}`;
  const setSite = ({ target }) => {
    const { layers: others } = offers.parts.find(({ site }) => site === target.value);
    const [first, last] = [change.first, change.last].map((layer) => (others.includes(layer) ? layer : others[0]));
    update({ site: target.value, first, last, head: target.value === "head_out" ? 0 : null });
  };
  const setFirst = ({ target }) => update({ first: Number(target.value), last: Math.max(change.last, Number(target.value)) });
  const setLast = ({ target }) => update({ last: Number(target.value), first: Math.min(change.first, Number(target.value)) });
  const layerOptions = layers.map((layer) => html`<option value=${layer}>${layer + 1}</option>`);
  return html`<fieldset class="steer-change">
    <legend class="visually-hidden">Change ${number}</legend>
    <${WhatRow} number=${number} change=${change} offers=${offers} replace=${replace} remove=${remove} />
    ${kind === "token" && html`<label class="row small" for=${id("token")}>Token <input id=${id("token")} class="field steer-token mono" value=${change.token}
      placeholder="for example ␣happy" onInput=${({ target }) => update({ token: target.value.replace("␣", " ") })} /></label>`}
    <div class="row small">
      <label>Part <select class="field inside-choice" id=${id("part")} value=${change.site} onChange=${setSite}>
        ${parts.map(({ site }) => html`<option value=${site}>${PART_NAMES[site]}</option>`)}</select></label>
      ${change.head !== null && html`<label>Head <select class="field inside-choice" id=${id("head")} value=${change.head}
        onChange=${({ target }) => update({ head: Number(target.value) })}>${Array.from({ length: heads }, (_, head) => html`<option value=${head}>${head + 1}</option>`)}</select></label>`}
      <span class="steer-range"><label>Layers <select class="field inside-choice" id=${id("first")} aria-label="First layer" value=${change.first} onChange=${setFirst}>${layerOptions}</select></label>${" "}
      <label>to <select class="field inside-choice" id=${id("last")} aria-label="Last layer" value=${change.last} onChange=${setLast}>${layerOptions}</select></label></span>
    </div>
    <${StrengthRow} number=${number} change=${change} update=${update} label=${kind === "scale" ? "Factor" : "Strength"} />
  </fieldset>`;
}

/** The text without and with the changes, and what can be done with it. */
function Outcome({ branch, textKey, body, changes, discard }) {
  const [partial, setPartial] = useState({ key: "", steps: [] });
  const key = `${textKey} ${JSON.stringify([body, changes])}`;
  const stream = (list, onSteps) => (signal) => streamSteered(branch.id, { ...body, changes: list }, signal, onSteps);
  const carried = (branch.settings.interventions ?? []).map(interventionName).join(", ");
  const without = useRequest(stream([]), 0, [textKey, body, carried]);
  const withThem = useRequest(stream(changes, (steps) => setPartial({ key, steps })), DEBOUNCE_MS, [key, carried]);
  const steered = withThem.fresh || partial.key !== key ? withThem.answer : partial.steps;
  const fault = withThem.fault ?? without.fault;
  const [isKeeping, setKeeping] = useState(false);
  const keep = async () => {
    setKeeping(true);
    if (await keepSteered(branch, body, changes)) discard();
    setKeeping(false);
  };
  const isDone = withThem.fresh && without.fresh;
  const marks = without.answer && steered ? differences(without.answer, steered) : null;
  return html`
    <${RequestError} fault=${fault} again=${withThem.fault ? withThem.again : without.again} />
    ${!fault && html`<div class="steer-texts" aria-busy=${!isDone}>
      <${SteeredText} title=${carried ? `As it is (${carried})` : "Without"} branch=${branch} body=${body} steps=${without.answer} marks=${marks?.[0]} />
      <${SteeredText} title="With the changes" branch=${branch} body=${body} steps=${steered} marks=${marks?.[1]} />
    </div>
    <p class="quiet small" role="status">${isDone ? differenceText(without.answer, steered, marks) : "Generating …"}</p>
    <div class="row">
      <button type="button" class="button main" id="steer-keep" disabled=${!isDone || isKeeping} onClick=${keep}>Keep as branch</button>
      <button type="button" class="button" id="steer-discard" onClick=${discard}>Discard</button>
    </div>`}`;
}

function differenceText(before, after, [, marks]) {
  const changed = marks.filter(Boolean).length;
  const isSame = !changed && before.length === after.length;
  if (isSame) return "The same text.";
  const first = after.findIndex((step, index) => step.token !== before[index]?.token);
  return `${plural(changed, "token")} of ${after.length} ${changed === 1 ? "is" : "are"} different${first < 0 ? "" : `, from token ${first + 1} on`}.`;
}

const inLine = (text) => text.replaceAll("\n", "⏎");

function SteeredText({ title, branch, body, steps, marks }) {
  const end = promptLength(branch) + body.at;
  const before = Array.from({ length: Math.min(NUM_BEFORE, end) }, (_, index) => tokenAt(branch, end - Math.min(NUM_BEFORE, end) + index)?.text ?? "");
  return html`<div class="steer-text"><h4>${title}</h4>
    <p dir="auto"><span class="quiet">${end > NUM_BEFORE ? "…" : ""}${inLine(before.join(""))}</span>${(steps ?? []).map((step, index) => {
      const text = inLine(step.piece);
      if (!marks?.[index]) return text;
      const isSpaced = isWord(text, steps[index - 1]?.piece ?? "x");
      return html`${isSpaced ? " " : ""}<mark>${isSpaced ? text.slice(1) : text}</mark>`;
    })}</p></div>`;
}

/** Store the steered text as a branch and show it. */
async function keepSteered(branch, body, changes) {
  await pauseWriting();
  const position = state.selected;
  return attempt(async () => {
    const fork = adopt(await api.post(`/v1/tree/${branch.id}/steer`, { ...body, changes, keep: true }));
    fork.runs = [...fork.runs, { from: body.at, settings: {} }]; // generated with the settings of the branch
    setCurrent(fork.id, position);
    pushUndo({
      label: "keep steered text", before: { ...placeOf(branch), selected: position },
      after: { id: fork.id, length: null, selected: position },
    });
  });
}
