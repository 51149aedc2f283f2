// Playback: the recorded steps of a branch appear one by one in a temporary copy. Needs no server, so it works for loaded
// files too.

import { count, html, render, useChanges } from "../lib.js";
import { retractions } from "./session.js";
import { changed, currentBranch, on, state } from "../state.js";

const LONGEST_WAIT = 2; // seconds
let playback = null;

/** The running playback: `{done, total, speed}`, or null. */
const playbackStatus = () => playback && { done: playback.next, total: playback.events.length, speed: playback.speed };

/** The history of a text in order: `{step}` or `{cut}`. Steps that a guard rewound come before their cut. */
function eventsOf(branch) {
  const cuts = retractions(branch);
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

/** Start; `speed` 1 is the recorded speed. */
function play(speed = 1) {
  stopPlaying();
  const branch = currentBranch();
  if (!branch?.steps.length) return;
  // Of no session: the server must not save the copy as what the session shows.
  const copy = { ...branch, id: `${branch.id}-played`, copyOf: branch.recorded ? null : branch.id, session: null, recorded: true, steps: [], retracted: [], writing: false };
  state.branches.set(copy.id, copy);
  playback = { from: branch.id, selected: state.selected, copy, speed, events: eventsOf(branch), next: 0, timer: 0, due: performance.now() };
  state.current = copy.id;
  state.selected = state.hovered = null;
  for (const kind of STOP_EVENTS) addEventListener(kind, stopOnInput, true);
  changed("current", "selection", "steps", "playing");
  next();
}

function next() {
  const { copy, events, speed } = playback;
  const now = performance.now();
  while (playback.next < events.length && playback.due <= now) {
    const { step, cut } = events[playback.next];
    if (step) copy.steps.push(step);
    else copy.retracted.push({ at: cut, steps: copy.steps.splice(cut), verb: "retract" });
    playback.next += 1;
    const wait = Math.min(events[playback.next]?.step?.seconds ?? 0, LONGEST_WAIT);
    playback.due += (wait * 1000) / speed;
  }
  changed("steps", "playing");
  if (playback.next >= events.length) stopPlaying();
  else playback.timer = setTimeout(next, Math.max(0, playback.due - performance.now()));
}

/** Stop and show the original branch. */
function stopPlaying() {
  if (!playback) return;
  const { from, selected, copy, timer } = playback;
  clearTimeout(timer);
  playback = null;
  for (const kind of STOP_EVENTS) removeEventListener(kind, stopOnInput, true);
  state.branches.delete(copy.id);
  if (state.current === copy.id) {
    state.current = state.branches.has(from) ? from : null;
    state.selected = selected;
    state.hovered = null;
  }
  changed("current", "selection", "steps", "playing", "branches");
}

const STOP_EVENTS = ["pointerdown", "keydown"];

/** Stop on any input outside the playback bar. */
function stopOnInput(event) {
  if (event.target.closest?.(".play-bar")) return;
  if (event.type === "keydown" && ["Shift", "Control", "Alt", "Meta", "Tab"].includes(event.key)) return;
  if (event.key === "Escape") event.preventDefault();
  stopPlaying();
}

function setPlaySpeed(speed) {
  if (!playback) return;
  playback.speed = speed;
  changed("playing");
}

// -- the playback bar --------------------------------------------------------------------------

export const SPEEDS = [[0.25, "×¼"], [1, "×1"], [4, "×4"]];

export function openPlayBar(speed) {
  play(speed);
  if (!playbackStatus()) return;
  const place = document.createElement("div");
  document.body.append(place);
  render(html`<${PlayBar} />`, place);
  place.querySelector("#stop-playing")?.focus();
  const leave = on("playing", () => {
    if (playbackStatus()) return;
    leave();
    render(null, place);
    place.remove();
  });
}

function PlayBar() {
  useChanges("playing");
  const now = playbackStatus();
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
