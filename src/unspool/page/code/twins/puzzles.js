// Puzzles for the pairs that come with Unspool: one click makes a new one, and both fill it.

import { api, ApiFault } from "../api.js";
import { html } from "../lib.js";
import { change, isWriting, told, twins, writeBoth } from "./runs.js";

const PUZZLES = { sudoku: "Sudoku" };
const EMPTY = [30, 40, 48, 54]; // cells
const OWN = ["prompt", "mode", "length", "order", "threshold", "remask", "causal", "masked"]; // what a puzzle sets
let own = null; // the same as a person had it before

/** Leave the puzzles: everything is as it was before. */
function backToText() {
  change({ ...own, puzzle: null, fault: null });
  own = null;
}

/** A new puzzle of this kind for its pair, filled by both. */
async function another(puzzle) {
  if (isWriting()) return;
  own ??= Object.fromEntries(OWN.map((name) => [name, twins[name]]));
  change({ puzzle, making: true, fault: null });
  try {
    const made = await api.post("/v1/puzzles", { puzzle, empty: twins.empty });
    const { prompt, places, models } = made;
    Object.assign(twins, { prompt, mode: "plain", length: String(places), order: "threshold", threshold: "0.99", remask: "" });
    Object.assign(twins, { causal: models.causal, masked: models.whole });
  } catch (error) {
    if (!(error instanceof ApiFault)) throw error;
    twins.fault = { message: error.message };
  } finally {
    twins.making = false;
    told();
  }
  if (!twins.fault) await writeBoth();
}

export function PuzzleChoice() {
  const { puzzle, empty } = twins;
  const kinds = Object.entries(PUZZLES);
  const withEmpty = (event) => {
    change({ empty: Number(event.target.value) });
    another("sudoku");
  };
  return html`<div class="row twins-puzzles">
    <div class="segments" role="group" aria-label="What both write">
      <button type="button" aria-pressed=${!puzzle} disabled=${isWriting()} onClick=${() => puzzle && backToText()}>Text</button>
      ${kinds.map(([kind, title]) => html`<button key=${kind} type="button" aria-pressed=${puzzle === kind} disabled=${isWriting()}
        onClick=${() => another(kind)}>${title}</button>`)}</div>
    ${puzzle === "sudoku" && html`<label><span class="small">Empty cells</span>
      <select class="field" name="empty" value=${empty} disabled=${isWriting()} onChange=${withEmpty}>
        ${EMPTY.map((count) => html`<option key=${count} value=${count}>${count}</option>`)}</select></label>`}
    ${puzzle && html`<button class="button" type="button" id="twins-another" disabled=${isWriting()} onClick=${() => another(puzzle)}>Another one</button>`}
    ${puzzle && html`<span class="quiet small">Two small models that come with Unspool, alike in all but how far they look.</span>`}
  </div>`;
}
