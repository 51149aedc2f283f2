// The Twins view: the same prompt written left to right, and filled in any order, side by side and pass by pass.

import { html, plural, useChanges, useEffect } from "../lib.js";
import { connect } from "../actions.js";
import { modelNow } from "../state.js";
import { shortName } from "../models/name.js";
import { TintChoice } from "../write/controls.js";
import { Filled, Written } from "./columns.js";
import { PuzzleChoice } from "./puzzles.js";
import {
  causalModels, causalNow, change, isWriting, look, maskedModels, maskedNow, mostPasses, otherModels, shownNow, stopBoth,
  twins, writeBoth,
} from "./runs.js";

const ORDERS = {
  threshold: "all that are sure enough", factor: "as many as are sure together", entropy: "where little is open",
  margin: "the clearest first", fixed: "the surest first", left: "from left to right", random: "by chance",
};

export function TwinsView() {
  useChanges("twins", "models", "branches");
  useEffect(() => { connect(); }, []);
  return html`<section class="twins stack" aria-label="Twins">
    <h2>Twins</h2>
    <p class="quiet small">A causal model writes one token a pass and never takes one back. A diffusion model guesses all masked
      places at once, keeps what it is sure of, and looks again. Both run here, one after the other.</p>
    ${!maskedNow() && html`<${NoTwin} />`}
    <${Asking} />
    ${twins.puzzle !== "sudoku" && html`<${TintChoice} />`}
    <${Passes} />
    <div class="twins-columns">
      <${Written} />
      <${Filled} />
    </div>
  </section>`;
}

/** No model here has a mask token: how to get one. */
function NoTwin() {
  return html`<div class="notice twins-none" role="note">
    <p>No model in memory has a mask token, so no text can be filled in yet. Solve a puzzle with the pair that comes with Unspool,${
      otherModels().length > 0 ? " choose another model below, if one of them is a diffusion model," : ""} or make a twin of your own:</p>
    <p><code>unspool train twin --kind block --model ${shortName(modelNow()?.id) || "MODEL"}</code></p>
    <p class="quiet small">Then start the page with it: <code>unspool page -m FOLDER</code>. LLaDA, Dream and SDAR work too.</p></div>`;
}

function Asking() {
  const { fault } = twins;
  const set = (event) => change({ [event.target.name]: event.target.value, fault: null });
  const invalid = (name) => (fault?.param === name ? "true" : null);
  const submit = (event) => {
    event.preventDefault();
    writeBoth();
  };
  const enter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && submit(event);
  const number = (name, title, help, mode = "decimal") => html`<label class="twins-number" title=${help}><span class="small">${title}</span>
    <input class="field" name=${name} inputmode=${mode} autocomplete="off" value=${twins[name]} aria-invalid=${invalid(name)} onInput=${set} /></label>`;
  const models = html`<${ModelPick} name="causal" title="Left to right" models=${causalModels()} now=${causalNow()} />
    <${ModelPick} name="masked" title="In any order" models=${maskedModels()} now=${maskedNow()} more=${otherModels()} />`;
  return html`<form class="twins-asking" onSubmit=${submit} aria-label="What both write">
    <${PuzzleChoice} />
    <label class="twins-prompt"><span class="small">Prompt, for both</span>
      <textarea class="field" name="prompt" rows="2" dir="auto" value=${twins.prompt} aria-invalid=${invalid("prompt")} onInput=${set} onKeyDown=${enter} /></label>
    ${!twins.puzzle && html`<div class="row">
      <div class="segments" role="group" aria-label="Mode">
        ${[["chat", "Chat"], ["plain", "Plain"]].map(([mode, title]) => html`<button type="button" aria-pressed=${twins.mode === mode}
          onClick=${() => change({ mode })}>${title}</button>`)}</div>
      ${models}
    </div>`}
    <div class="row twins-row">
      ${twins.puzzle && models}
      <label><span class="small">A pass sets</span>
        <select class="field" name="order" value=${twins.order} onChange=${set}>
          ${Object.entries(ORDERS).map(([order, title]) => html`<option value=${order}>${title}</option>`)}</select></label>
      ${!twins.puzzle && number("length", "Tokens", "How many are written, and how many places there are", "numeric")}
      ${twins.order === "threshold" && number("threshold", "Sure from", "How likely a token must be to be set")}
      ${number("remask", "Taken back below", "Empty: what is set stays. Else a token that became less likely than this is cleared")}
      ${isWriting() ? html`<button class="button" type="button" onClick=${stopBoth}>Stop</button>`
        : html`<button class="button main" id="twins-write" disabled=${!causalNow() && !maskedNow()}>Write both</button>`}
    </div>
    ${fault && html`<p class="fault" role="alert">${fault.message}</p>`}
  </form>`;
}

function ModelPick({ name, title, models, now, more = [] }) {
  const set = (event) => change({ [name]: event.target.value || null });
  return html`<label><span class="small">${title}</span>
    <select class="field twins-model" name=${name} value=${now ?? ""} onChange=${set} disabled=${isWriting()}>
      ${!now && html`<option value="">none in memory</option>`}
      ${now && ![...models, ...more].some(({ id }) => id === now) && html`<option value=${now}>${shortName(now)}</option>`}
      ${models.map(({ id }) => html`<option key=${id} value=${id}>${shortName(id)}</option>`)}
      ${more.length > 0 && html`<optgroup label="Not in memory yet">${more.map(({ id }) => html`<option key=${id} value=${id}>${
        shortName(id)}</option>`)}</optgroup>`}
    </select></label>`;
}

/** Drag through the passes of both. */
function Passes() {
  const most = mostPasses();
  if (!most) return null;
  const shown = shownNow();
  return html`<label class="twins-passes"><span>After ${plural(shown, "pass", "passes")}</span>
    <input type="range" id="twins-pass" min="0" max=${most} step="1" value=${shown} aria-valuetext=${`after ${plural(shown, "pass", "passes")} of ${most}`}
      onInput=${(event) => look(Number(event.target.value))} /></label>`;
}
