// A branch once more as it came: its recorded steps are put one by one into a copy that is only shown.
// Needs no server, so it also works with what was loaded from a file.

import { count, html, render, useChanges } from "../lib.js";
import { branchNow, changed, on, state } from "../state.js";
import { takenBack } from "./settings.js";

const LONGEST_WAIT = 2; // seconds, where somebody let the model wait
let playing = null;

/** What is played now: `{done, total, speed}`, or null. */
export const played = () => playing && { done: playing.next, total: playing.events.length, speed: playing.speed };

/**
 * All that happened to a text, in order: `{step}` or `{cut}`. What a guard took back stood in the
 * place of what is there now, so each cut's steps come first and are then taken away.
 */
function eventsOf(branch) {
  const cuts = takenBack(branch);
  const events = [];
  let length = 0;
  const stepAt = (index, phase) => {
    const cut = cuts.slice(phase).find(({ at, steps }) => index >= at && index < at + steps.length);
    return cut ? cut.steps[index - cut.at] : branch.steps[index];
  };
  const writeTo = (end, phase) => {
    for (; length < end; length += 1) {
      const step = stepAt(length, phase);
      if (step) events.push({ step });
    }
  };
  cuts.forEach(({ at, steps }, phase) => {
    writeTo(at + steps.length, phase);
    events.push({ cut: at });
    length = Math.min(length, at);
  });
  writeTo(branch.steps.length, cuts.length);
  return events;
}

/** Begin; `speed` 1 is as it was, 4 four times as fast. */
export function play(speed = 1) {
  stopPlaying();
  const branch = branchNow();
  if (!branch?.steps.length) return;
  const copy = { ...branch, id: `${branch.id}-played`, recorded: true, steps: [], retracted: [], writing: false };
  state.branches.set(copy.id, copy);
  playing = { from: branch.id, selected: state.selected, copy, speed, events: eventsOf(branch), next: 0, timer: 0, due: performance.now() };
  state.current = copy.id;
  state.selected = state.hovered = null;
  for (const kind of ENDING) addEventListener(kind, endedByHand, true);
  changed("current", "selection", "steps", "playing");
  next();
}

function next() {
  const { copy, events, speed } = playing;
  const now = performance.now();
  while (playing.next < events.length && playing.due <= now) {
    const { step, cut } = events[playing.next];
    if (step) copy.steps.push(step);
    else copy.retracted.push({ at: cut, steps: copy.steps.splice(cut), verb: "retract" });
    playing.next += 1;
    const wait = Math.min(events[playing.next]?.step?.seconds ?? 0, LONGEST_WAIT);
    playing.due += (wait * 1000) / speed;
  }
  changed("steps", "playing");
  if (playing.next >= events.length) stopPlaying();
  else playing.timer = setTimeout(next, Math.max(0, playing.due - performance.now()));
}

/** Back to the text itself. */
function stopPlaying() {
  if (!playing) return;
  const { from, selected, copy, timer } = playing;
  clearTimeout(timer);
  playing = null;
  for (const kind of ENDING) removeEventListener(kind, endedByHand, true);
  state.branches.delete(copy.id);
  if (state.current === copy.id) {
    state.current = state.branches.has(from) ? from : null;
    state.selected = selected;
    state.hovered = null;
  }
  changed("current", "selection", "steps", "playing", "branches");
}

const ENDING = ["pointerdown", "keydown"];

/** Whoever takes hold of the page has seen enough. */
function endedByHand(event) {
  if (event.target.closest?.(".play-bar")) return;
  if (event.type === "keydown" && ["Shift", "Control", "Alt", "Meta", "Tab"].includes(event.key)) return;
  if (event.key === "Escape") event.preventDefault();
  stopPlaying();
}

function setPlaySpeed(speed) {
  if (!playing) return;
  playing.speed = speed;
  changed("playing");
}

// -- the bar at the bottom meanwhile ---------------------------------------------------------------

export const SPEEDS = [[0.25, "×¼"], [1, "×1"], [4, "×4"]];

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
