// The costs of the current branch, live while it is written and afterwards.

import { html, useCalmChanges } from "../lib.js";
import { branchNow } from "../state.js";
import { Certainty, Chance } from "./certainty.js";
import { Drafts } from "./drafts.js";
import { Repeats } from "./repeats.js";
import { Time } from "./time.js";

export function CostsPanel() {
  useCalmChanges("steps", "current", "writing", "branches", "settings", "costs");
  const branch = branchNow();
  if (!branch || !branch.steps.length) {
    return html`<div class="costs"><p class="quiet">Write something: what it cost and how likely it was is shown here.</p></div>`;
  }
  return html`<div class="costs">
    <h2 class="visually-hidden">Costs</h2>
    ${[Time, Chance, Repeats, Certainty, Drafts].map((Section) => html`<${Section} branch=${branch} />`)}
  </div>`;
}
