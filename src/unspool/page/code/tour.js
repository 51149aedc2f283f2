// The tour: a card beside an element, while the page does what the card says.

import {
  chooseToken, clearFault, clearText, connect, jump, openView, selectToken, setSpeed, showPanel, writePrompt,
} from "./actions.js";
import { html, reducedMotion, useChanges, useEffect, useLayoutEffect, useRef, useState } from "./lib.js";
import { changed, currentBranch, on, promptLength, state } from "./state.js";

const QUESTION = "Why do leaves change color in fall?";

/** A fixed seed, and slow enough to watch. */
const TOUR_SETTINGS = { seed: 7, max_tokens: 48 };
const TOUR_SPEED = 15;

/** `uses`: where the user can try what a step says; an action elsewhere ends the tour. */
const STEPS = [
  {
    title: "Text becomes tokens",
    says: "A model reads and writes tokens: pieces of text from a fixed vocabulary, each with an id. Type anything to see its tokens.",
    target: ".tk-list",
    uses: ".tokens-view",
    act() {
      openView("tokenizer");
    },
  },
  {
    title: "One token at a time",
    says: "An answer is generated token by token: each one is sampled and appended, then the next is predicted. "
      + "The warmer the color, the less likely the token was.",
    target: "#text",
    act: showText,
  },
  {
    title: "Candidate tokens",
    says: "At each position the model gives every token a probability. Click a candidate to continue with it.",
    target: "#side-panel",
    uses: "#side-panel",
    async act(tour) {
      await showText(tour);
      await selectUnlikely(tour);
      showPanel("step");
    },
  },
  {
    title: "Sampling",
    says: "Settings decide which candidates remain; a random number samples one of them. Move the temperature and watch the outcome.",
    target: ".step-settings",
    uses: "#side-panel",
    async act(tour) {
      await showText(tour);
      await selectUnlikely(tour);
      showPanel("step");
      const details = await waitForElement(".step-whatif");
      if (details) details.open = true;
    },
  },
  {
    title: "Edit any token",
    says: "We chose the next likely token instead, and the rest was generated again. The old text stays as a branch.",
    target: "#text",
    async act(tour) {
      if (tour.fork) {
        showWriteView();
        return jump(tour.fork, tour.place);
      }
      await showText(tour);
      await selectUnlikely(tour);
      showPanel("branches");
      const step = currentBranch().steps[tour.place - promptLength(currentBranch())];
      const other = step.candidates.find((candidate) => candidate.token !== step.token);
      chooseToken(tour.place, { token: other.token });
      await waitFor(() => state.current !== tour.root, tour);
      tour.fork = state.current;
    },
  },
  {
    title: "Look inside",
    says: "For each token the model attends to the tokens before it, never to later ones. The arcs show the attention weights.",
    target: "#text",
    async act(tour) {
      await showText(tour);
      await waitFor(() => currentBranch().steps.length >= 12 || !state.writing, tour);
      const branch = currentBranch();
      selectToken(promptLength(branch) + Math.min(10, branch.steps.length - 1));
      showPanel("inside");
    },
  },
  {
    title: "Costs",
    says: "Each token takes about the same time, because keys and values of earlier tokens are cached. Turn the KV cache off to compare.",
    target: ".costs",
    uses: ".costs",
    async act(tour) {
      await showText(tour);
      openView("text");
    },
  },
];

/** Show the text of the tour; write it first if there is none yet, so that every step can be the first. */
async function showText(tour) {
  showWriteView();
  if (tour.root) {
    if (state.current !== tour.root) await jump(tour.root);
    return;
  }
  await clearText();
  await typeDraft(QUESTION, tour);
  const before = state.current;
  writePrompt();
  await waitFor(() => state.current !== before && currentBranch()?.steps.length > 0, tour);
  tour.root = state.current;
}

/** Select a token that was not the likeliest. */
async function selectUnlikely(tour) {
  await waitFor(() => currentBranch().steps.length >= 12 || !state.writing, tour);
  tour.place = leastExpected(currentBranch());
  selectToken(tour.place);
}

function showWriteView() {
  if (state.view !== "write") openView("write");
}

/** Type the prompt letter by letter. */
async function typeDraft(words, tour) {
  state.mode = "chat";
  changed("mode");
  const setDraft = (text) => {
    state.draft = text;
    changed("draft");
  };
  if (!reducedMotion()) {
    for (let end = 1; end < words.length && !tour.isOver; end += 1) {
      setDraft(words.slice(0, end));
      await new Promise((done) => { setTimeout(done, 22); });
    }
  }
  if (!tour.isOver) setDraft(words);
}

/** Position of the least likely of the first tokens that had several candidates. */
function leastExpected(branch) {
  const early = branch.steps.slice(1, 12).filter((step) => step.candidates.length > 1);
  const [least] = early.sort((a, b) => a.logprob - b.logprob);
  return promptLength(branch) + (least ?? branch.steps[0]).index;
}

/** Wait until `holds()` is true; fails when the tour ends or an error occurs. */
function waitFor(holds, tour) {
  return new Promise((done, failed) => {
    const topics = ["steps", "current", "writing", "fault", "server", "tour"];
    const look = () => {
      if (tour.isOver || state.fault || !state.server.ready) failed(new Error("The tour cannot continue."));
      else if (holds()) done();
      else return;
      leave.forEach((stop) => stop());
    };
    const leave = topics.map((topic) => on(topic, look));
    look();
  });
}

// -- position of the card -----------------------------------------------------------------------

const SPACE = 16;
const NARROW = 700; // px: below this the card is at the bottom

/** Position of the card beside the target, and the visible part of the target for the ring around it. */
function placeCard(target, card, view) {
  if (view.width < NARROW) {
    const top = view.height - card.height - 8;
    return { x: (view.width - card.width) / 2, y: top, ring: clipBox(target, { top: 0, bottom: top - 8 }) };
  }
  const ring = clipBox(target, { top: 0, bottom: view.height });
  const low = Math.min(Math.max(ring.bottom - card.height, SPACE), view.height - card.height - SPACE);
  const middle = Math.min(Math.max(SPACE, ring.left), view.width - card.width - SPACE);
  const sides = [
    { x: ring.left, y: ring.bottom + SPACE, fits: ring.bottom + card.height + 2 * SPACE <= view.height, small: true },
    { x: ring.right + SPACE, y: low, fits: ring.right + card.width + 2 * SPACE <= view.width },
    { x: ring.left - card.width - SPACE, y: low, fits: ring.left - card.width - 2 * SPACE >= 0 },
    { x: middle, y: ring.bottom + SPACE, fits: ring.bottom + card.height + 2 * SPACE <= view.height },
    { x: middle, y: ring.top - card.height - SPACE, fits: ring.top - card.height - 2 * SPACE >= 0 },
  ];
  const side = sides.find(({ fits, small }) => fits && (!small || ring.height < 160));
  const position = side ?? { x: view.width - card.width - SPACE, y: view.height - card.height - SPACE };
  return { x: Math.min(Math.max(SPACE, position.x), view.width - card.width - SPACE), y: position.y, ring };
}

function clipBox(box, { top, bottom }) {
  const from = Math.max(box.top, top);
  const to = Math.max(from, Math.min(box.bottom, bottom));
  return { left: box.left, right: box.right, top: from, bottom: to, width: box.width, height: to - from };
}

// -- the tour -----------------------------------------------------------------------------------

let tour = null; // the running tour

/** Start, or start again. */
export function startTour() {
  endTour();
  tour = { at: 0, isOver: false, isActing: false, settings: { ...state.settings }, speed: state.speed };
  state.settings = { ...TOUR_SETTINGS };
  setSpeed(TOUR_SPEED);
  changed("tour", "settings");
  goToStep(0);
}

function endTour() {
  if (!tour) return;
  tour.isOver = true;
  state.settings = tour.settings;
  setSpeed(tour.speed);
  tour = null;
  changed("tour", "settings");
}

/** Show a step and run its action. */
async function goToStep(at) {
  const now = tour;
  now.at = at;
  now.isActing = true;
  now.fails = false;
  changed("tour");
  const before = now.acting; // a step needs the result of the one before, which may still run
  now.acting = (async () => {
    await before?.catch(() => {});
    await STEPS[at].act(now);
  })();
  try {
    await now.acting;
    await waitForElement(STEPS[at].target);
  } catch {
    now.fails = true; // the page itself shows the error
  }
  if (now.at === at) now.isActing = false;
  changed("tour");
}

/** Wait for an element of a component that is still loading; null: it did not come. */
async function waitForElement(target) {
  for (let tries = 0; tries < 100 && !document.querySelector(target); tries += 1) {
    await new Promise((done) => { setTimeout(done, 50); });
  }
  return document.querySelector(target);
}

export function Tour() {
  useChanges("tour", "server", "fault");
  return tour && html`<${Card} key="card" tour=${tour} />`;
}

function Card({ tour: now }) {
  const card = useRef();
  const next = useRef();
  const [place, setPlace] = useState(null);
  const step = STEPS[now.at];
  const isLast = now.at === STEPS.length - 1;
  const back = () => goToStep(now.at - 1);
  const forward = () => (isLast ? leave() : goToStep(now.at + 1));
  const leave = () => {
    endTour();
    (document.getElementById("prompt") ?? document.getElementById("view")).focus({ preventScroll: true });
  };
  useFollowTarget(card, step.target, setPlace);
  const isPlaced = place !== null;
  useEffect(() => {
    if (isPlaced) next.current.focus({ preventScroll: true });
  }, [isPlaced]);
  useEffect(() => {
    // On a narrow screen the card covers the bottom: scroll the target up.
    document.documentElement.classList.add("touring");
    if (innerWidth < NARROW) {
      document.querySelector(step.target)?.scrollIntoView({ block: "start", behavior: reducedMotion() ? "auto" : "smooth" });
    }
    return () => document.documentElement.classList.remove("touring");
  }, [now.at, now.isActing]);
  useEffect(() => {
    const moves = { ArrowRight: () => !isLast && forward(), ArrowLeft: () => now.at > 0 && back(), Escape: leave };
    const onInput = (event) => {
      const inside = card.current?.contains(event.target) || (step.uses && event.target.closest?.(step.uses));
      const isFree = card.current?.contains(event.target) || event.target === document.body;
      if (event.type === "keydown" && (event.key === "Escape" || (isFree && moves[event.key]))) {
        event.preventDefault();
        event.stopPropagation();
        moves[event.key]();
      } else if (event.isTrusted && !inside && !QUIET_KEYS.has(event.key)) endTour(); // the user takes over
    };
    for (const kind of ["keydown", "pointerdown"]) document.addEventListener(kind, onInput, true);
    return () => {
      for (const kind of ["keydown", "pointerdown"]) document.removeEventListener(kind, onInput, true);
    };
  }, [now.at]);

  const at = place ?? { x: 0, y: 0, ring: null };
  return html`
    ${at.ring?.height > 8 && html`<div class="tour-ring" aria-hidden="true" style=${ringStyle(at.ring)}></div>`}
    <section class="tour-card panel" id="tour-card" ref=${card} role="dialog" aria-labelledby="tour-title"
        style=${{ left: `${at.x}px`, top: `${at.y}px`, visibility: isPlaced ? "visible" : "hidden" }}>
      <div class="row spread"><span class="quiet small">${now.at + 1} of ${STEPS.length}</span>
        <span class="tour-dots">${STEPS.map(({ title }, at) => html`<button type="button" key=${at} aria-label=${`Go to step ${at + 1}: ${title}`}
          aria-current=${at === now.at ? "step" : null} onClick=${() => goToStep(at)}></button>`)}</span></div>
      <div aria-live="polite">
        <h2 id="tour-title">${step.title}</h2>
        <p>${step.says}</p></div>
      <${TourError} now=${now} />
      <div class="row">
        <button class="button plain tiny" id="tour-skip" onClick=${leave}>End the tour</button>
        <span class="grow"></span>
        <button class="button" id="tour-back" disabled=${now.at === 0} onClick=${back}>Back</button>
        <button class="button main" id="tour-next" ref=${next} onClick=${forward}>${isLast ? "Done" : "Next"}</button>
      </div>
    </section>`;
}

const QUIET_KEYS = new Set(["Tab", "Shift", "Control", "Alt", "Meta"]);
const ringStyle = ({ left: x, top, width, height }) => ({
  left: `${x - 4}px`, top: `${top - 4}px`, width: `${width + 8}px`, height: `${height + 8}px`,
});

/** Shown when the server is away or a step failed. */
function TourError({ now }) {
  if (state.server.ready && !now.fails) return null;
  const again = async () => {
    clearFault();
    if (await connect()) goToStep(now.at);
  };
  return html`<p class="bad small" role="alert">${state.server.ready
    ? "This step failed."
    : "The server does not answer. The tour is waiting."}
    <button class="button tiny" onClick=${again}>Try again</button></p>`;
}

/** Keep the card beside its target while the page scrolls or changes. */
function useFollowTarget(card, target, setPlace) {
  useLayoutEffect(() => {
    let frame = 0;
    let before = "";
    const follow = () => {
      frame = requestAnimationFrame(follow);
      const element = document.querySelector(target);
      if (!element || !card.current) return;
      const { width, height } = card.current.getBoundingClientRect();
      const next = placeCard(element.getBoundingClientRect(), { width, height }, { width: document.documentElement.clientWidth, height: innerHeight });
      const now = JSON.stringify(next);
      if (now === before) return;
      before = now;
      setPlace(next);
    };
    follow();
    return () => cancelAnimationFrame(frame);
  }, [target]);
}
