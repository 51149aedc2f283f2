// What recurrent layers have instead of attention: a state that every token changes and reads.

import { html, percent, useChanges } from "../lib.js";
import { rounded } from "./cells.js";
import { chosenIn } from "./choice.js";

const NAMES = { conv: "convolution", delta: "gated DeltaNet", mamba2: "Mamba-2" };

/** What brings tokens together in a layer, in words. */
export function mixerOf({ states = [] }, layer) {
  const found = states.find((state) => state.layer === layer);
  return found ? NAMES[found.mixer] ?? found.mixer : "attention";
}

/** Whether a layer looks at tokens at all; some carry a state instead, and some do neither. */
export const attends = ({ attention }, layer) => attention.map.weight[layer - 1].some((weight) => weight > 0);

export function States({ look }) {
  useChanges("inside");
  const { states } = look;
  const { layer } = chosenIn(look);
  const fades = states.some(({ mixer }) => mixer !== "conv"); // what a convolution knew is gone at once
  const gates = states.some(({ mixer }) => mixer === "delta") ? 1 : Math.max(...states.map(({ gate }) => gate), 1e-9);
  const longest = Math.max(...states.map(({ state_norm: norm }) => norm), 1e-9);
  return html`
    <p class="quiet small">These layers look at no earlier token. Each carries a state along, of one size however long
      the text is. Of this token, as means over heads: ${said(states)} <b>Length</b>: how much the state holds then.</p>
    <div class="inside-scroll" tabindex="0" role="region" aria-label="States of recurrent layers, as a table">
      <table class="inside-states">
        <thead><tr><th scope="col">Layer</th><th scope="col">Gate</th>${fades && html`<th scope="col">Stays</th>`}
          <th scope="col">Length</th></tr></thead>
        <tbody>${states.map((state) => html`<tr data-layer=${state.layer} class=${state.layer === layer ? "here" : ""}
          title=${mixerOf(look, state.layer)}>
          <th scope="row">${state.layer}</th>
          <${Bar} share=${state.gate / gates} text=${rounded(state.gate)} />
          ${fades && html`<${Bar} share=${state.decay} text=${percent(state.decay)} />`}
          <${Bar} share=${Math.sqrt(state.state_norm / longest)} text=${rounded(state.state_norm)} />
        </tr>`)}</tbody>
      </table>
    </div>`;
}

/** What the gate means here. */
function said(states) {
  const kinds = new Set(states.map(({ mixer }) => mixer));
  if (kinds.has("conv")) return html`<b>Gate</b>: how much of what its last few tokens say is let out.`;
  const writes = kinds.has("delta") ? "how much it corrects the state" : "how much it adds to the state";
  return html`<b>Gate</b>: ${writes}. <b>Stays</b>: how much is kept of what was known.`;
}

const Bar = ({ share, text }) => html`<td><div>
  <span class="track"><span style=${{ width: `${Math.min(100, 100 * share).toFixed(1)}%` }}></span></span>
  <span class="mono">${text}</span></div></td>`;
