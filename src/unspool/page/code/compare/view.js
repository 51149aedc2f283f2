// The Compare view: one prompt, and either several settings side by side or many samples as a tree.

import { html, plural, useChanges, useState } from "../lib.js";
import { changed, modelNow, state } from "../state.js";
import { TintChoice } from "../write/controls.js";
import { Columns } from "./columns.js";
import { Popover } from "./popover.js";
import { change, compare, isExample, isWriting, promptNow, stopAll, writeAll } from "./runs.js";
import { Samples } from "./samples.js";
import { Fault } from "./settings.js";

const PICTURES = { settings: "Settings", samples: "Samples" };
const ABOUT = {
  settings: "One prompt, written once with each of these settings, all in one batch. "
    + "Where the seeds are the same, so is the chance: only the settings differ.",
  samples: "One prompt, written many times with the same settings, all in one batch. "
    + "What the samples share is drawn once.",
};

export function CompareView() {
  useChanges("compare", "mode", "models");
  const [picked, setPicked] = useState(null);
  const { picture } = compare;
  const writing = isWriting();
  const write = () => {
    setPicked(null);
    writeAll();
  };
  const close = (back) => {
    if (back && picked?.element.isConnected) picked.element.focus();
    setPicked(null);
  };
  // Enter writes, in the prompt and in every field.
  const enter = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    if (!event.target.matches("textarea, input")) return;
    event.preventDefault();
    write();
  };
  return html`<section class="cmp stack" aria-label="Compare" onKeyDown=${enter}>
    <div class="row spread">
      <h2>Compare</h2>
      <div class="segments" role="group" aria-label="What to compare">
        ${Object.entries(PICTURES).map(([name, title]) => html`<button aria-pressed=${picture === name}
          onClick=${() => { setPicked(null); change({ picture: name }); }}>${title}</button>`)}
      </div>
    </div>
    <p class="quiet small">${ABOUT[picture]}</p>
    <${Asking} writing=${writing} write=${write} />
    <${TintChoice} />
    <${Ready} write=${write} />
    ${picture === "settings" ? html`<${Columns} pick=${setPicked} />` : html`<${Samples} pick=${setPicked} />`}
    ${picked && html`<${Popover} picked=${picked} close=${close} />`}
  </section>`;
}

/** As long as nothing is written: what is there to be run. */
function Ready({ write }) {
  const { columns, samples, picture, length } = compare;
  const isSettings = picture === "settings";
  if (isWriting() || (isSettings ? columns.some(({ id }) => id) : samples.ids.length)) return null;
  const what = isSettings ? plural(columns.length, "text", "texts side by side") : `${samples.number} samples as a picture`;
  return html`<div class="panel row cmp-ready"><p class="grow">${isExample() ? "An example is ready" : "Ready"}: “${
    short(promptNow())}” becomes ${what}, ${length} tokens each.</p>
    <button class="button main" onClick=${write}>${isExample() ? "Run the example" : "Run it"}</button></div>`;
}

const short = (text) => (text.length > 70 ? `${text.slice(0, 69).toWellFormed()}…` : text);

function Asking({ writing, write }) {
  const { fault } = compare;
  const mode = (value) => {
    state.mode = value;
    changed("mode");
  };
  return html`<div class="cmp-prompt">
    <label class="grow"><span class="visually-hidden">Prompt to compare</span>
      <textarea class="field" rows="2" placeholder=${state.mode === "chat" ? "Ask something" : "Begin a text"}
        aria-invalid=${fault?.param === "prompt" ? "true" : null} value=${promptNow()}
        onInput=${(event) => change({ prompt: event.target.value, fault: null })} /></label>
    <div class="row">
      <div class="segments" role="group" aria-label="Mode">
        ${[["chat", "Chat"], ["plain", "Plain"]].map(([value, title]) => html`<button
          aria-pressed=${state.mode === value}
          disabled=${value === "chat" && modelNow()?.unspool.chat === false}
          onClick=${() => mode(value)}>${title}</button>`)}
      </div>
      <label class="row cmp-length"><span>Tokens</span>
        <input class="field" type="text" inputmode="numeric" autocomplete="off" value=${compare.length}
          aria-invalid=${fault?.param === "length" ? "true" : null}
          onInput=${(event) => change({ length: event.target.value, fault: null })} /></label>
      ${writing
        ? html`<button class="button" onClick=${stopAll}>Stop</button>`
        : html`<button class="button main" onClick=${write}>Write ${compare.picture === "samples"
          ? `${compare.samples.number} samples` : "all"}</button>`}
    </div>
    <${Fault} fault=${fault} />
  </div>`;
}
