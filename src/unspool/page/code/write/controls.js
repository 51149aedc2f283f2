// Pause, step, go on, stop; how fast; and what the color behind a token means.

import { html, useChanges } from "../lib.js";
import { branchNow, changed, state } from "../state.js";
import { goOn, pause, setSpeed, stepOnce, stop } from "../actions.js";
import { isLit } from "./pane.js";
import { SCALE, TINTS } from "./tint.js";

const SPEEDS = [0, 1, 2, 4, 8, 15, 30, 60, 120, null];

function named(speed) {
  if (speed === 0) return "step by step";
  return speed === null ? "full speed" : `${speed} a second`;
}

export function Controls() {
  useChanges("writing", "current", "speed", "server");
  const branch = branchNow();
  const isWriting = state.writing !== null;
  const isPaused = !isWriting && Boolean(branch?.left);
  const can = branch !== null && !branch.recorded && state.server.ready;
  const place = SPEEDS.indexOf(state.speed);
  return html`<div class="controls row" role="group" aria-label="Writing">
    ${isWriting
      ? html`<button id="pause" class="button" onClick=${pause}>Pause</button>`
      : html`<button id="go-on" class="button" disabled=${!can} onClick=${() => goOn()}>
          ${isPaused ? "Resume" : "Go on"}</button>`}
    <button id="one-step" class="button folds" disabled=${!can || isWriting} onClick=${stepOnce}>Step</button>
    <button id="stop" class="button folds" disabled=${!isWriting && !isPaused} onClick=${stop}>Stop</button>
    <label class="speed small folds" title="One step a key press (Space), so many tokens a second, or as fast as may be"><span class="visually-hidden">Speed</span>
      <input id="speed" type="range" min="0" max=${SPEEDS.length - 1} step="1" value=${place < 0 ? SPEEDS.length - 1 : place}
        aria-valuetext=${named(state.speed)} onInput=${(event) => setSpeed(SPEEDS[event.target.value])} />
      <span class="quiet">${named(state.speed)}</span>
    </label>
  </div>`;
}

/** What the colors mean. While attention lights the text, they are its own. Doubt is asked for of one text only. */
export function TintChoice({ doubts = false }) {
  useChanges("tint", "light");
  const set = (event) => {
    state.tint = event.target.value;
    changed("tint");
  };
  if (isLit()) {
    return html`<div class="row tint-choice small folds"><span class="scale quiet">Attention: none
      <span class="ramp" aria-hidden="true">${[1, 2, 3, 4, 5, 6, 7, 8, 9].map((n) => html`<i class="t lit"
        style=${{ "--lit": n / 9 }}></i>`)}</span> most</span></div>`;
  }
  const tints = Object.entries(TINTS).filter(([tint]) => doubts || tint !== "doubt");
  const tint = !doubts && state.tint === "doubt" ? "none" : state.tint;
  const scale = SCALE[tint];
  return html`<div class="row tint-choice small folds">
    <label>Color by <select id="tint" class="field" value=${tint} onChange=${set}>
      ${tints.map(([value, name]) => html`<option value=${value}>${name}</option>`)}
    </select></label>
    ${scale && html`<span class="scale quiet">${scale[0]}
      <span class="ramp" aria-hidden="true">${[1, 2, 3, 4, 5, 6, 7, 8, 9].map((n) => html`<i class=${`tint-${n}`}></i>`)}</span>
      ${scale[1]}</span>`}
  </div>`;
}
