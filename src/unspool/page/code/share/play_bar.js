// The small bar at the bottom while a text is played.

import { count, html, render, useChanges } from "../lib.js";
import { on } from "../state.js";
import { play, played, setPlaySpeed, stopPlaying } from "./play.js";

const SPEEDS = [[0.25, "×¼"], [1, "×1"], [4, "×4"]];

export function openPlayBar(speed) {
  play(speed);
  if (!played()) return;
  const place = document.createElement("div");
  document.body.append(place);
  render(html`<${PlayBar} />`, place);
  place.querySelector("#stop-playing")?.focus();
  const leave = on("playing", () => {
    if (played()) return;
    leave();
    render(null, place);
    place.remove();
  });
}

function PlayBar() {
  useChanges("playing");
  const now = played();
  if (!now) return null;
  return html`<div class="play-bar panel row" role="group" aria-label="Playing">
    <span class="small">Playing ${count(now.done)} of ${count(now.total)}</span>
    <progress class="grow" max=${now.total} value=${now.done} aria-label="Played tokens"></progress>
    <div class="segments" role="group" aria-label="Speed">
      ${SPEEDS.map(([speed, name]) => html`<button aria-pressed=${now.speed === speed} onClick=${() => setPlaySpeed(speed)}>${name}</button>`)}
    </div>
    <button class="button tiny" id="stop-playing" onClick=${stopPlaying}>Stop</button>
  </div>`;
}
