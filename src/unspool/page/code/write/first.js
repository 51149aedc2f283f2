// The first visit: a short text by the model in use, one of its tokens open, and what can be clicked next.

import { newText, selectToken, setMode, writePrompt } from "../actions.js";
import { html, isNarrow, storage, useChanges } from "../lib.js";
import { DefaultModelNote } from "../models.js";
import { changed, currentBranch, currentModel, promptLength, state } from "../state.js";

export const EXAMPLES = [
  ["Why do leaves change color in fall?", "chat"],
  ["Write a haiku about the sea.", "chat"],
  ["Once upon a time there was a", "plain"],
  ["Name three planets.", "chat"],
];
const EXAMPLE_SETTINGS = { seed: 7, max_tokens: 48 };

/** Write an example, unless this browser was here before, or the model would have to be loaded first. */
export async function writeFirstText() {
  const model = currentModel();
  if (storage.get("visited") || !model?.unspool.loaded || state.current !== null || state.draft) return;
  storage.set("visited", true);
  state.isFirstVisit = true;
  if (model.unspool.chat === false) setMode("plain");
  const { settings } = state;
  state.settings = { ...EXAMPLE_SETTINGS };
  state.draft = EXAMPLES[0][0];
  try {
    await writePrompt();
  } finally {
    state.settings = settings;
    changed("settings");
  }
  const branch = currentBranch();
  if (!state.isFirstVisit || !branch || state.selected !== null) return; // the user has started
  const early = branch.steps.slice(1, 16).filter((step) => step.candidates.length > 1);
  const [least] = early.toSorted((a, b) => a.logprob - b.logprob);
  if (!least) return;
  selectToken(promptLength(branch) + least.index);
  state.sheet = !isNarrow(); // on a phone it would cover the text
}

async function writeExample([words, mode]) {
  await newText();
  setMode(mode);
  state.draft = words;
  changed("draft");
  await writePrompt();
}

const startTour = async () => (await import("../tour.js")).startTour();

/** Three examples, and the tour. */
export function Examples({ from = 0 }) {
  useChanges("server", "models");
  return html`<div class="row examples" role="group" aria-label="Examples">
    ${EXAMPLES.slice(from, from + 3).map((example) => html`<button type="button" class="button" key=${example[0]}
      disabled=${!state.server.ready || (example[1] === "chat" && currentModel()?.unspool.chat === false)} onClick=${() => writeExample(example)}>${example[0]}</button>`)}
    <button type="button" class="button plain" onClick=${startTour}>Take the tour</button></div>`;
}

/** Below the first text. */
export function FirstSteps() {
  useChanges("current");
  if (!state.isFirstVisit || state.current === null) return null;
  const close = () => {
    state.isFirstVisit = false;
    changed("current");
  };
  return html`<aside class="panel stack first-steps" aria-label="First steps">
    <p class="row spread"><span>The model wrote this just now. Click any token to see the candidates; click another
      candidate to continue from there.</span><button type="button" class="button plain tiny" aria-label="Close" onClick=${close}>×</button></p>
    <${Examples} from=${1} />
    <${DefaultModelNote} /></aside>`;
}
