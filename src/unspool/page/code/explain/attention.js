// The Attention view: the current text with the attention of one token as arcs, and the map of all heads.

import { openView, selectToken } from "../actions.js";
import { html, useChanges, useEffect, useMemo } from "../lib.js";
import { Attention } from "../inside/attention.js";
import { Pending, placeInText, useInspection } from "../inside/lookups.js";
import { currentBranch, state, textLength } from "../state.js";
import { Pane } from "../write/view.js";

export function AttentionView() {
  useChanges("current", "selection", "writing");
  const branch = currentBranch();
  const length = branch?.prompt ? textLength(branch) : 0;
  useEffect(() => { if (length && state.selected === null) selectToken(length - 1); }, [length]);
  if (!length) {
    return html`<section class="beside-empty stack" aria-label="Attention"><h2>Attention</h2>
      <p class="quiet">Each token attends to itself and to the tokens before it. No text is open.</p>
      <button class="button main" type="button" onClick=${() => openView("write")}>Open Write</button></section>`;
  }
  return html`<section class="beside" aria-label="Attention">
    <h2 class="visually-hidden">Attention</h2>
    <div class="paper"><p class="quiet small">Click a token: the arcs show to which tokens the model attended when it read it.</p><${Pane} /></div>
    <div class="panel beside-panel inside attention" tabindex="0" role="region" aria-label="Attention of one token">
      <h3 class="visually-hidden">Attention of one token</h3>
      ${state.selected !== null && state.selected < length && html`<${Selected} branch=${branch} at=${state.selected} />`}</div>
  </section>`;
}

function Selected({ branch, at }) {
  const next = placeInText(branch, at);
  const place = useMemo(() => next, [next.key]);
  const response = useInspection(place, "include=vectors,attention&top=8");
  if (response.answer?.position !== at) return html`<${Pending} ...${response} />`;
  return html`<${Attention} place=${place} look=${response.answer} />`;
}
