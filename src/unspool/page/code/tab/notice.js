// What the page says about the engine in this tab: the download, what is missing, and other models.

import { connect } from "../actions.js";
import { html, useChanges, useEffect, useRef, useState } from "../lib.js";
import { state } from "../state.js";
import { loading, loadModel } from "./client.js";

/** What a text needs a server for. */
export const SERVER_ONLY = "Training, search, diffusion, steering, grammars, tools and several models need a server: pip install unspool, then unspool page.";

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(0)} MB`;
const isModelFile = (file) => file.name.toLowerCase().endsWith(".gguf");

/** Open another model; the page starts again with it. */
export async function openModel(source) {
  state.server.ready = false;
  loadModel(source);
  await connect();
}

/** Shown until the model is loaded. Model files can be dropped on the page at any time. */
export function TabNotice() {
  useChanges("tab");
  useEffect(() => {
    const drop = (event) => {
      const file = [...(event.dataTransfer?.files ?? [])].find(isModelFile);
      if (!file) return;
      event.preventDefault();
      event.stopImmediatePropagation(); // other files are sessions
      openModel(file);
    };
    addEventListener("drop", drop, true);
    return () => removeEventListener("drop", drop, true);
  }, []);
  const { phase, done, total, error, name } = loading;
  if (phase === "ready") return null;
  if (phase === "failed") {
    return html`<div class="notice bad stack" role="alert" id="tab-fault"><p>${error.message}</p>
      <div class="row"><button class="button" type="button" onClick=${() => openModel()}>Try again</button><${FilePicker} /></div></div>`;
  }
  const says = phase === "load" ? `Preparing ${name} …` : total
    ? `Downloading ${name}: ${megabytes(done)} of ${megabytes(total)}. This happens once; afterwards the page works offline.`
    : `Downloading ${name}: ${megabytes(done)} …`;
  return html`<div class="notice stack" role="status" id="tab-loading"><p>${says}</p>
    <progress max=${total || 1} value=${total ? done : null} aria-label="Loading the model"></progress></div>`;
}

function FilePicker() {
  const input = useRef();
  const picked = ({ target }) => target.files[0] && openModel(target.files[0]);
  return html`<button class="button" type="button" id="open-gguf" onClick=${() => input.current.click()}>Open a GGUF file …</button>
    <input type="file" accept=".gguf" hidden ref=${input} onChange=${picked} />`;
}

/** The dialog of the model: which one runs here, and how to open another. */
export function TabModelDialog({ close }) {
  useChanges("models", "tab");
  const dialog = useRef();
  const [address, setAddress] = useState("");
  useEffect(() => dialog.current.showModal(), []);
  const details = state.models[0]?.unspool;
  const open = (event) => {
    event.preventDefault();
    if (address) openModel(address);
  };
  return html`<dialog ref=${dialog} class="dialog models" aria-labelledby="models-title" onClose=${close}>
    <h2 id="models-title">The model in this tab</h2>
    <div class="stack">
    ${details && html`<p><b class="model-id">${state.models[0].id}</b> <span class="quiet small">${[megabytes(details.bytes), details.precision,
      `${details.layers} layers`, `context of ${details.context} tokens`, `runs in ${details.device}`].join(" · ")}</span></p>`}
    <p class="quiet small">Another GGUF file of the Llama family can take its place: choose or drop a file, or give its address.
      It stays in this browser. ${SERVER_ONLY}</p>
    <form class="row" onSubmit=${open}><${FilePicker} />
      <input class="field grow" type="url" aria-label="Address of a GGUF file" placeholder="address of a .gguf file" value=${address}
        onInput=${(event) => setAddress(event.target.value)} /><button class="button" disabled=${!address}>Load</button></form></div>
    <form method="dialog"><button class="button">Close</button></form>
  </dialog>`;
}
