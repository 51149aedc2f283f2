// What is said of models beside the text: a tiny one is tiny, and a text stays with the model that wrote it.

import { html, useChanges } from "../lib.js";
import { branchNow, modelNow, state } from "../state.js";
import { write } from "../actions.js";
import { shortName } from "./name.js";

/** One line, only where the default model writes. */
export function TinyNote() {
  useChanges("models");
  if (!modelNow()?.unspool?.default) return null;
  return html`<p class="tiny-note">This is a tiny model made for learning: quick everywhere, and often wrong. For a larger one
    start the page with <code>unspool page -m qwen3-0.6b</code>.</p>`;
}

/** The text on the screen is another model's than the one that was picked. */
export function OtherModel() {
  useChanges("models", "current", "writing");
  const branch = branchNow();
  if (!branch?.model || !state.model || branch.model === state.model || branch.recorded) return null;
  return html`<p class="notice other-model row" role="status"><span class="grow">${shortName(branch.model)} wrote this text, and goes
    on with it. <b>${shortName(state.model)}</b> writes the next.</span>
    <button class="button tiny" type="button" disabled=${state.writing !== null || !state.draft}
      onClick=${write}>Write it anew</button></p>`;
}
