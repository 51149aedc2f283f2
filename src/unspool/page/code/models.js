// The models on this machine: which one is in use, and the dialog that loads another.

import { connect, writePrompt } from "./actions.js";
import { api, ApiError } from "./api.js";
import { duration, html, useChanges, useEffect, useRef, useState } from "./lib.js";
import { changed, currentBranch, currentModel, state } from "./state.js";

/** The name without the owner of the repository. */
export const shortName = (id) => id?.split("/").at(-1) ?? "";

function formatBytes(count) {
  if (!count) return "";
  const [unit, by] = count >= 1e9 ? ["GB", 1e9] : ["MB", 1e6];
  const value = count / by;
  return `${value.toFixed(value < 10 && by === 1e9 ? 1 : 0)} ${unit}`;
}

const loadErrors = new Map(); // model id -> message

const loadPath = (id) => `/v1/models/${id.split("/").map(encodeURIComponent).join("/")}/load`;

/** Load a model and use it from then on; until then the current one stays in use. */
async function pickModel(id) {
  if (state.loading) return;
  state.loading = { id, since: performance.now() };
  loadErrors.delete(id);
  changed("models");
  try {
    await api.post(loadPath(id));
    await connect(); // another model may have been unloaded
    state.model = id;
    rememberModel(id);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    loadErrors.set(id, error.message);
    if (error.isOffline) connect();
  } finally {
    state.loading = null;
    changed("models");
  }
}

function rememberModel(id) {
  const query = new URLSearchParams(location.search);
  if (id === state.models[0]?.id) query.delete("model");
  else query.set("model", id);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

const MAX_TRIES = 5; // one a second: the server may still be scanning for models

/** Load the model that the address names, if there is one. */
export async function restoreModel() {
  const requested = new URLSearchParams(location.search).get("model");
  if (!requested || requested === state.model) return;
  for (let tries = 0; tries < MAX_TRIES && !state.models.some(({ id }) => id === requested); tries += 1) {
    await new Promise((done) => { setTimeout(done, 1000); });
    await connect();
  }
  if (state.models.some(({ id }) => id === requested)) await pickModel(requested);
}

/** A note that the default model is tiny, while it is in use. */
export function DefaultModelNote() {
  useChanges("models");
  if (!currentModel()?.unspool?.default) return null;
  return html`<p class="tiny-note">This is a tiny demo model: fast, and often wrong. For a larger one
    start the page with <code>unspool page -m qwen3-0.6b</code>.</p>`;
}

/** Shown when another model than the one in use wrote the text. */
export function OtherModelNote() {
  useChanges("models", "current", "writing");
  const branch = currentBranch();
  if (!branch?.model || !state.model || branch.model === state.model || branch.recorded) return null;
  return html`<p class="notice other-model row" role="status"><span class="grow">${shortName(branch.model)} wrote this text and
    continues it. New texts use <b>${shortName(state.model)}</b>.</span>
    <button class="button tiny" type="button" disabled=${state.writing !== null || !state.draft}
      onClick=${writePrompt}>Rewrite with this model</button></p>`;
}


export function ModelDialog({ close }) {
  useChanges("models");
  const dialog = useRef();
  useEffect(() => {
    dialog.current.showModal();
    connect(); // the list may have grown
  }, []);
  return html`<dialog ref=${dialog} class="dialog models" aria-labelledby="models-title" onClose=${close}>
    <h2 id="models-title">Models on this machine</h2>
    <p class="quiet small">The model you choose writes new texts. Existing texts stay with the model that wrote them.</p>
    <ul class="model-list">${state.models.map((model) => html`<${Model} key=${model.id} model=${model} />`)}</ul>
    <${DefaultModelNote} />
    <form method="dialog"><button class="button">Close</button></form>
  </dialog>`;
}

function Model({ model: { id, unspool } }) {
  const isCurrent = id === state.model;
  const isLoading = state.loading?.id === id;
  const isBusy = state.loading !== null;
  const facts = [formatBytes(unspool.bytes), unspool.source, isCurrent ? "in use" : unspool.loaded ? "loaded" : ""];
  const fault = loadErrors.get(id);
  return html`<li class=${isCurrent ? "current" : ""} data-model=${id}>
    <div class="grow"><b class="model-id">${id}</b>
      <span class="quiet small">${facts.filter(Boolean).join(" · ")}</span>
      ${isLoading && html`<${Loading} size=${unspool.bytes} />`}
      ${!isLoading && unspool.fits === false && !unspool.loaded
        && html`<span class="small quiet">does not fit in free memory</span>`}
      ${fault && html`<p class="fault" role="alert">${fault}</p>`}</div>
    <button type="button" class="button" aria-pressed=${isCurrent} aria-label=${`Use ${id}`}
      disabled=${isBusy || isCurrent || (unspool.fits === false && !unspool.loaded)} onClick=${() => pickModel(id)}>
      ${isCurrent ? "In use" : "Use"}</button>
  </li>`;
}

/** Seconds since loading started: the server reports no progress. */
function Loading({ size }) {
  const [now, setNow] = useState(performance.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), 250);
    return () => clearInterval(timer);
  }, []);
  const since = state.loading ? (now - state.loading.since) / 1000 : 0;
  return html`<p class="small" role="status"><progress aria-label="Loading"></progress>
    Loading ${formatBytes(size)} … <span aria-hidden="true">${duration(Math.max(0, since))}</span></p>`;
}
