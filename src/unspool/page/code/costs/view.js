// The view Costs of a text: the current text, and what each of its tokens cost.

import { openView } from "../actions.js";
import { html, useChanges } from "../lib.js";
import { state } from "../state.js";
import { Pane, TintChoice } from "../write/view.js";
import { CostsPanel } from "./panel.js";

export function TextCostsView() {
  useChanges("current");
  if (state.current === null) {
    return html`<section class="beside-empty stack" aria-label="Costs of a text"><h2>Costs of a text</h2>
      <p class="quiet">Time, probability, entropy, repetition and draft tokens of a text, token by token. No text is open.</p>
      <button class="button main" type="button" onClick=${() => openView("write")}>Open Write</button></section>`;
  }
  return html`<section class="beside" aria-label="Costs of a text">
    <h2 class="visually-hidden">Costs of a text</h2>
    <div class="paper"><${TintChoice} doubts /><${Pane} /></div>
    <div class="panel beside-panel" tabindex="0" role="region" aria-label="Costs"><${CostsPanel} /></div>
  </section>`;
}
