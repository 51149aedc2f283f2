// The canvas after a pass: what is set, what each masked place would say and how sure the model is, what was set or
// taken back in this pass. One stop of the tab key; arrows go on inside.

import { html, isBlank, spelled, useState } from "../lib.js";
import { Board, boardSize } from "./board.js";
import { lookOf, saidOf, withHand } from "./looks.js";
import { change, passNow, placesAfter, twins } from "./runs.js";

export function Canvas() {
  const [stop, setStop] = useState(0);
  const places = placesAfter(passNow()).map(withHand);
  const prompt = twins.right.start.prompt.map(({ text }) => text).join("");
  const size = boardSize(prompt);
  const pick = (number) => {
    setStop(number);
    change({ place: twins.place === number ? null : number });
  };
  const keys = (event) => {
    const now = event.target.closest("[data-place]");
    const across = size || 1;
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
    if (!now || !move) return;
    const next = event.currentTarget.querySelector(`[data-place="${Number(now.dataset.place) + move}"]`);
    event.preventDefault();
    if (!next) return;
    setStop(Number(next.dataset.place));
    next.focus();
  };
  if (size) return html`<div class="stack" onKeyDown=${keys}><${Board} size=${size} puzzle=${prompt} cells=${places} pick=${pick} stop=${stop} /></div>`;
  return html`<div class="canvas" role="group" aria-label="The canvas; arrow keys move from place to place" onKeyDown=${keys}>
    ${places.map((place) => html`<${Place} key=${place.number} place=${place} pick=${pick} isStop=${place.number === stop} />`)}</div>`;
}

function Place({ place, pick, isStop }) {
  const isMasked = place.token === null;
  const shown = isMasked && place.probability == null ? "▒" : isBlank(place.text) ? spelled(place.text) || "∅" : place.text;
  return html`<button type="button" class=${lookOf(place)} data-place=${place.number} tabindex=${isStop ? 0 : -1} aria-label=${saidOf(place)}
    title=${saidOf(place)} aria-pressed=${twins.place === place.number} onClick=${() => pick(place.number)}
    style=${{ "--sure": place.probability ?? (isMasked ? 0 : 1) }}>${shown}</button>`;
}
