// The interventions that a branch carries, as chips.

import { attempt } from "../actions.js";
import { html, useChanges } from "../lib.js";
import { currentBranch, state } from "../state.js";
import { endIntervention, interventionName, isOpenEnded } from "./changes.js";

/** Below the toolbar: what steers the current text, each with a button that ends it. */
export function SteerNote() {
  useChanges("current", "branches", "writing", "steps");
  const branch = currentBranch();
  const interventions = branch?.settings?.interventions ?? [];
  if (!interventions.length) return null;
  const canEnd = !branch.recorded && state.writing?.branch !== branch.id;
  return html`<div class="steer-note row small" id="steer-note" role="group" aria-label="Changes inside the model">
    <span class="quiet">Steered:</span>
    ${interventions.map((item, index) => html`<span class="chip" key=${index}>${interventionName(item)}${isOpenEnded(item)
      ? html`<button type="button" class="steer-end" disabled=${!canEnd} aria-label=${`End ${interventionName(item)} here`}
          title="Tokens from here on are generated without it; the text stays" onClick=${() => attempt(() => endIntervention(branch, index))}>×</button>`
      : html`<span class="quiet">ended</span>`}</span>`)}
  </div>`;
}

/** On the card of a branch. */
export function SteerChips({ branch }) {
  const interventions = branch.settings?.interventions ?? [];
  if (!interventions.length) return null;
  return html`<p class="row small"><span class="quiet">Steered:</span>
    ${interventions.map((item, index) => html`<span class="chip" key=${index}>${interventionName(item)}</span>`)}</p>`;
}
