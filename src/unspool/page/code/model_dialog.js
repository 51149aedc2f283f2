// The dialog of the models: those on this machine, and those that can be downloaded.

import { connect } from "./actions.js";
import { api, ApiError } from "./api.js";
import { duration, html, useChanges, useEffect, useRef, useState } from "./lib.js";
import { loadErrors, pickModel } from "./models.js";
import { changed, state } from "./state.js";

function formatBytes(count) {
  if (!count) return "";
  const [unit, by] = count >= 1e9 ? ["GB", 1e9] : ["MB", 1e6];
  const value = count / by;
  return `${value.toFixed(value < 10 && by === 1e9 ? 1 : 0)} ${unit}`;
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
    <${Catalogue} />
    <form method="dialog"><button class="button">Close</button></form>
  </dialog>`;
}

// -- models to download ---------------------------------------------------------------------------

const downloads = new Map(); // catalogue id -> {done, total, fault, control}; they continue when the dialog is closed

async function download(id) {
  const control = new AbortController();
  downloads.set(id, { done: 0, total: 0, fault: null, control });
  changed("models");
  const set = (values) => {
    downloads.set(id, { ...downloads.get(id), ...values });
    changed("models");
  };
  try {
    for await (const { event, data } of api.stream(`/v1/catalogue/${encodeURIComponent(id)}/pull`, {}, { signal: control.signal })) {
      if (event === "progress") set(data);
    }
    downloads.delete(id);
    await connect(); // the list has grown
  } catch (error) {
    if (error.name === "AbortError") downloads.delete(id);
    else set({ fault: error.message, control: null });
    if (error.name !== "AbortError" && !(error instanceof ApiError)) throw error;
  }
  changed("models");
}

/** Whether a catalogue model is on this machine, by the name of its repository. */
const isHere = ({ id, repository }) => state.models.some((model) => {
  const name = model.id.toLowerCase();
  return name.includes(id.toLowerCase()) || name.includes(repository.toLowerCase()) || name.includes(repository.split("/").at(-1).toLowerCase());
});

function Catalogue() {
  const [list, setList] = useState(null);
  const [fault, setFault] = useState(null);
  useEffect(() => { api.get("/v1/catalogue").then(setList, (error) => setFault(error.message)); }, []);
  if (fault) return html`<p class="fault" role="alert">${fault}</p>`;
  const entries = (list?.data ?? []).filter((entry) => !isHere(entry));
  if (!entries.length) return null;
  return html`<section aria-labelledby="catalogue-title"><h2 id="catalogue-title">Models to download</h2>
    ${!list.may_download && html`<p class="quiet small">${list.why_not}</p>`}
    <ul class="model-list">${entries.map((entry) => html`<${CatalogueModel} key=${entry.id} entry=${entry} may=${list.may_download} />`)}</ul></section>`;
}

function CatalogueModel({ entry: { id, bytes, use, licence, fits }, may }) {
  const running = downloads.get(id);
  const isRunning = running?.control != null;
  return html`<li data-catalogue=${id}>
    <div class="grow"><b class="model-id">${id}</b>
      <span class="quiet small">${[formatBytes(bytes), use, licence].filter(Boolean).join(" · ")}</span>
      ${!fits && html`<span class="small quiet"> · does not fit in free memory</span>`}
      ${isRunning && html`<p class="small" role="status"><progress max=${running.total || 1} value=${running.done} aria-label=${`Download of ${id}`}></progress>
        ${formatBytes(running.done) || "0 MB"} of ${formatBytes(running.total || bytes)}</p>`}
      ${running?.fault && html`<p class="fault" role="alert">${running.fault}</p>`}</div>
    ${isRunning ? html`<button type="button" class="button" aria-label=${`Cancel the download of ${id}`} onClick=${() => running.control.abort()}>Cancel</button>`
      : html`<button type="button" class="button" aria-label=${`Download ${id}`} disabled=${!may} onClick=${() => download(id)}>Download</button>`}
  </li>`;
}

// -- models on this machine -----------------------------------------------------------------------

function Model({ model: { id, unspool } }) {
  const isCurrent = id === state.model;
  const isLoading = state.loading?.id === id;
  const isBusy = state.loading !== null;
  const facts = [formatBytes(unspool.bytes), unspool.source, unspool.default && "a tiny demo model: fast, and often wrong", unspool.loaded && !isCurrent && "loaded"];
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
