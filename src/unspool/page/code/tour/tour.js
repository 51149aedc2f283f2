// A short tour, shown once: a card beside what it speaks of, while the page does what the card says.

import { html, kept, reducedMotion, useChanges, useEffect, useLayoutEffect, useRef, useState } from "../lib.js";
import { changed, on, state } from "../state.js";
import { clearFault, connect, setSpeed } from "../actions.js";
import { NARROW, placed } from "./place.js";
import { STEPS, TOUR_SETTINGS, TOUR_SPEED } from "./steps.js";

let tour = null; // what goes on now
let seen = false; // where the browser keeps nothing, once for each time the page is opened

/** Begin, or begin again. */
export function startTour() {
  endTour();
  seen = true;
  kept.set("tour", true);
  tour = { at: 0, isOver: false, isActing: false, settings: { ...state.settings }, speed: state.speed };
  state.settings = { ...TOUR_SETTINGS };
  setSpeed(TOUR_SPEED);
  changed("tour", "settings");
  go(0);
}

function endTour() {
  if (!tour) return;
  tour.isOver = true;
  state.settings = tour.settings;
  setSpeed(tour.speed);
  tour = null;
  changed("tour", "settings");
}

/** To a step, and do what it says; again, if the server was gone the first time. */
async function go(at) {
  const now = tour;
  now.at = at;
  now.isActing = true;
  now.fails = false;
  changed("tour");
  const before = now.acting; // a step builds on what the one before it did, which may still go on
  now.acting = (async () => {
    await before?.catch(() => {});
    await STEPS[at].act(now);
  })();
  try {
    await now.acting;
    await appeared(STEPS[at].target);
  } catch {
    now.fails = true; // said on the card; the page says itself what went wrong
  }
  if (now.at === at) now.isActing = false;
  changed("tour");
}

/** Parts of the page are fetched when they are first shown. */
async function appeared(target) {
  for (let tries = 0; tries < 100 && !document.querySelector(target); tries += 1) {
    await new Promise((done) => { setTimeout(done, 50); });
  }
}

export function Tour() {
  useChanges("tour", "server", "fault");
  useEffect(() => {
    const begin = () => {
      const isNew = !seen && !kept.get("tour") && !state.branches.size && !state.draft;
      if (state.server.ready && isNew && !tour) startTour();
    };
    const leave = on("server", begin);
    begin();
    return leave;
  }, []);
  return tour && html`<${Card} key="card" tour=${tour} />`;
}

function Card({ tour: now }) {
  const card = useRef();
  const next = useRef();
  const [place, setPlace] = useState(null);
  const step = STEPS[now.at];
  const isLast = now.at === STEPS.length - 1;
  const back = () => go(now.at - 1);
  const forward = () => (isLast ? leave() : go(now.at + 1));
  const leave = () => {
    endTour();
    document.getElementById("prompt")?.focus({ preventScroll: true });
  };
  useFollowing(card, step.target, setPlace);
  const isPlaced = place !== null;
  useEffect(() => {
    if (isPlaced) next.current.focus({ preventScroll: true });
  }, [isPlaced]);
  useEffect(() => {
    // On a narrow screen the card lies below, so what it speaks of must come up; also once it has grown.
    document.documentElement.classList.add("touring");
    if (innerWidth < NARROW) {
      document.querySelector(step.target)?.scrollIntoView({ block: "start", behavior: reducedMotion() ? "auto" : "smooth" });
    }
    return () => document.documentElement.classList.remove("touring");
  }, [now.at, now.isActing]);
  useEffect(() => {
    const moves = { ArrowRight: () => !isLast && forward(), ArrowLeft: () => now.at > 0 && back(), Escape: leave };
    const heard = (event) => {
      const inside = card.current?.contains(event.target);
      const isFree = inside || event.target === document.body;
      if (event.type === "keydown" && (event.key === "Escape" || (isFree && moves[event.key]))) {
        event.preventDefault();
        event.stopPropagation();
        moves[event.key]();
      } else if (event.isTrusted && !inside && !QUIET_KEYS.has(event.key)) endTour(); // they take over
    };
    for (const kind of ["keydown", "pointerdown"]) document.addEventListener(kind, heard, true);
    return () => {
      for (const kind of ["keydown", "pointerdown"]) document.removeEventListener(kind, heard, true);
    };
  }, [now.at]);

  const at = place ?? { x: 0, y: 0, ring: null };
  return html`
    ${at.ring?.height > 8 && html`<div class="tour-ring" aria-hidden="true" style=${box(at.ring)}></div>`}
    <section class="tour-card panel" id="tour-card" ref=${card} role="dialog" aria-labelledby="tour-title"
        style=${{ left: `${at.x}px`, top: `${at.y}px`, visibility: isPlaced ? "visible" : "hidden" }}>
      <div aria-live="polite"><p class="quiet small">${now.at + 1} of ${STEPS.length}</p>
        <h2 id="tour-title">${step.title}</h2>
        <p>${step.says}</p></div>
      <${Trouble} now=${now} />
      <div class="row">
        <button class="button plain tiny" id="tour-skip" onClick=${leave}>${isLast ? "Close" : "Skip"}</button>
        <span class="tour-dots grow" aria-hidden="true">${STEPS.map((_, n) => html`<i class=${n === now.at ? "now" : ""}></i>`)}</span>
        <button class="button" id="tour-back" disabled=${now.at === 0} onClick=${back}>Back</button>
        <button class="button main" id="tour-next" ref=${next} onClick=${forward}>${isLast ? "Done" : "Next"}</button>
      </div>
    </section>`;
}

const QUIET_KEYS = new Set(["Tab", "Shift", "Control", "Alt", "Meta"]);
const box = ({ left, top, width, height }) => ({
  left: `${left - 4}px`, top: `${top - 4}px`, width: `${width + 8}px`, height: `${height + 8}px`,
});

/** The server is gone, or refuses: the tour waits, and can be left. */
function Trouble({ now }) {
  if (state.server.ready && !now.fails) return null;
  const again = async () => {
    clearFault();
    if (await connect()) go(now.at);
  };
  return html`<p class="bad small" role="alert">${state.server.ready
    ? "This step did not work out."
    : "The server does not answer, so the tour waits."}
    <button class="button tiny" onClick=${again}>Try again</button></p>`;
}

/** Keep the card beside its target while the page moves under it. */
function useFollowing(card, target, setPlace) {
  useLayoutEffect(() => {
    let frame = 0;
    let before = "";
    const follow = () => {
      frame = requestAnimationFrame(follow);
      const found = document.querySelector(target);
      if (!found || !card.current) return;
      const { width, height } = card.current.getBoundingClientRect();
      const next = placed(found.getBoundingClientRect(), { width, height }, { width: document.documentElement.clientWidth, height: innerHeight });
      const now = JSON.stringify(next);
      if (now === before) return;
      before = now;
      setPlace(next);
    };
    follow();
    return () => cancelAnimationFrame(frame);
  }, [target]);
}
