// The models on this machine: which there are, how large, which one writes; a click takes another.

import { duration, html, useChanges, useEffect, useRef, useState } from "../lib.js";
import { state } from "../state.js";
import { connect } from "../actions.js";
import { bytes } from "./name.js";
import { TinyNote } from "./notes.js";
import { faults, pickModel } from "./picking.js";

export function ModelDialog({ close }) {
  useChanges("models");
  const dialog = useRef();
  useEffect(() => {
    dialog.current.showModal();
    connect(); // the server may have found more since
  }, []);
  return html`<dialog ref=${dialog} class="dialog models" aria-labelledby="models-title" onClose=${close}>
    <h2 id="models-title">Models on this machine</h2>
    <p class="quiet small">The one you pick writes what comes next. What is written stays, and stays with its model.</p>
    <ul class="model-list">${state.models.map((model) => html`<${Model} key=${model.id} model=${model} />`)}</ul>
    <${TinyNote} />
    <form method="dialog"><button class="button">Close</button></form>
  </dialog>`;
}

function Model({ model: { id, unspool } }) {
  const isCurrent = id === state.model;
  const isLoading = state.loading?.id === id;
  const isBusy = state.loading !== null;
  const facts = [bytes(unspool.bytes), unspool.source, isCurrent ? "writes now" : unspool.loaded ? "in memory" : ""];
  const fault = faults.get(id);
  return html`<li class=${isCurrent ? "current" : ""} data-model=${id}>
    <div class="grow"><b class="model-id">${id}</b>
      <span class="quiet small">${facts.filter(Boolean).join(" · ")}</span>
      ${isLoading && html`<${Loading} size=${unspool.bytes} />`}
      ${!isLoading && unspool.fits === false && !unspool.loaded
        && html`<span class="small quiet">larger than the memory that is free here</span>`}
      ${fault && html`<p class="fault" role="alert">${fault}</p>`}</div>
    <button type="button" class="button" aria-pressed=${isCurrent} aria-label=${`Write with ${id}`}
      disabled=${isBusy || isCurrent || (unspool.fits === false && !unspool.loaded)} onClick=${() => pickModel(id)}>
      ${isCurrent ? "In use" : "Use"}</button>
  </li>`;
}

/** How long it has been on its way: there is no telling how far it is. */
export function Loading({ size }) {
  const [now, setNow] = useState(performance.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), 250);
    return () => clearInterval(timer);
  }, []);
  const since = state.loading ? (now - state.loading.since) / 1000 : 0;
  return html`<p class="small" role="status"><progress aria-label="Loading"></progress>
    Loading ${bytes(size)} … <span aria-hidden="true">${duration(Math.max(0, since))}</span></p>`;
}
