// One line under the text: how fast it is being written.

import { count, duration, html, plural, useCalmChanges } from "../lib.js";
import { branchNow } from "../state.js";
import { paceOf } from "./pace.js";

export function LiveFigures() {
  useCalmChanges("steps", "current", "writing", "branches");
  const branch = branchNow();
  if (!branch || (!branch.steps.length && !branch.writing)) return null;
  const { first, rate } = paceOf(branch);
  return html`<p class="live-figures quiet small">
    <span>first token <b data-live="first">${duration(first)}</b></span>
    <span><b data-live="rate">${perSecond(rate)}</b> tokens/s</span>
    <span data-live="tokens">${plural(branch.steps.length, "token")}</span>
  </p>`;
}

export const perSecond = (rate) => (rate === null ? "–" : rate < 10 ? rate.toFixed(1) : count(Math.round(rate)));
