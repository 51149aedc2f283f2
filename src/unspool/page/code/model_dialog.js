// The dialog of the models: those on this machine, and those that can be downloaded.

import { connect } from "./actions.js";
import { duration, html, useChanges, useEffect, useRef, useState } from "./lib.js";
import { DefaultModelNote, loadErrors, pickModel } from "./models.js";
import { state } from "./state.js";

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
