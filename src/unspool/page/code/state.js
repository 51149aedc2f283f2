// The one state of the page, and who wants to know when it changes.
//
// Parts read `state` freely and change it through `actions.js`. After a change `changed(topic)` wakes
// those who asked, at most once a frame, and for a text that streams thirty times a second.

export const state = {
  server: { ready: false, asking: true, keyNeeded: false },
  models: [],
  unlisted: new Map(), // models that were asked for by name: checkpoints of trainings, puzzle solvers
  model: null,
  loading: null, // {id, since}: a model that is on its way into memory
  mode: "chat",
  draft: "", // what stands in the composer
  system: null, // the system message of a chat; null: the template's own
  settings: {}, // what differs from the server's usual settings
  branches: new Map(),
  removed: new Map(), // deleted here; the server has them until that cannot be undone any more
  current: null,
  selected: null, // a position in the whole text, prompt included
  hovered: null,
  part: null, // {branch, first, last}: steps that a person marked, to write them anew
  revision: null, // {branch, proposals, …}: what would fit better, until it is taken or not
  comparing: null, // a second branch, beside the current one
  writing: null,
  tint: "probability",
  speed: null, // tokens a second; null: as fast as may be; 0: one step a key press
  panel: "step",
  sheet: false, // on a narrow screen: whether the panel is up
  view: "write",
  fault: null,
};

const listeners = new Map();
const pending = new Set();
const STREAMED = new Set(["steps", "branches", "layout"]);
const CALM = 33; // milliseconds between two drawings of a text that streams: the model needs the cores too
let frame = 0;
let timer = 0;
let last = 0;

/** Call `listener` after changes of this topic; gives the function that ends it. */
export function on(topic, listener) {
  if (!listeners.has(topic)) listeners.set(topic, new Set());
  listeners.get(topic).add(listener);
  return () => listeners.get(topic).delete(listener);
}

/** Something of these topics is new. What a person did shows in the next frame. */
export function changed(...topics) {
  for (const topic of topics) pending.add(topic);
  if (frame) return;
  const wait = topics.every((topic) => STREAMED.has(topic)) ? last + CALM - performance.now() : 0;
  // A page in the background gets no frames, and must go on reading all the same.
  if (wait <= 0) frame = document.hidden ? setTimeout(tell, 50) : requestAnimationFrame(tell);
  else timer ||= setTimeout(later, wait);
}

function later() {
  timer = 0; // first: timers may come early, and then another is needed
  changed();
}

function tell() {
  frame = 0;
  last = performance.now();
  const topics = [...pending];
  pending.clear();
  const woken = new Set(topics.flatMap((topic) => [...(listeners.get(topic) ?? [])]));
  for (const listener of woken) listener();
}

// -- branches ---------------------------------------------------------------------------------

/** Keep a branch as the server tells it; what it does not tell this time stays. */
export function adopt(told) {
  const known = state.branches.get(told.id);
  const branch = known ?? {
    steps: [], prompt: null, told: false, retracted: [], runs: [], recorded: false,
  };
  const { steps, since, prompt, ...rest } = told;
  Object.assign(branch, rest);
  settle(branch);
  const parent = state.branches.get(branch.parent);
  branch.prompt = prompt ?? branch.prompt ?? parent?.prompt ?? null;
  if (steps) {
    const from = since ?? 0;
    if (branch.steps.length < from && parent?.steps.length >= from) share(branch, parent, from);
    if (branch.steps.length >= from) {
      branch.steps.splice(from, Infinity, ...steps);
      branch.told = branch.steps.length >= branch.length;
    }
  }
  state.branches.set(branch.id, branch);
  changed("branches");
  if (branch.id === state.current) changed("steps");
  return branch;
}

/** The child of a branch that was deleted is one of that branch's parent. */
export function settle(branch) {
  for (let gone; (gone = state.removed.get(branch.parent)); ) {
    branch.parent = gone.parent;
    branch.forked_at = gone.parent === null ? null : Math.min(branch.forked_at, gone.forked_at);
  }
}

/** A fork begins with its parent's steps, which the server need not tell again. */
function share(branch, parent, length) {
  branch.steps = parent.steps.slice(0, length);
  branch.runs = parent.runs.filter((run) => run.from < length);
  branch.retracted = parent.retracted.filter((cut) => cut.at < length);
}

export const branchNow = () => state.branches.get(state.current) ?? null;
const modelNamed = (name) => state.models.find((model) => model.id === name) ?? state.unlisted.get(name) ?? null;
export const modelNow = () => modelNamed(state.model);
/** The model of a text: another one may have been picked since. */
export const modelOf = (branch) => modelNamed(branch?.model) ?? modelNow();
export const promptLength = (branch) => branch.prompt?.tokens.length ?? branch.prompt_tokens;
export const textLength = (branch) => promptLength(branch) + branch.steps.length;

export function stepAt(branch, position) {
  return branch?.steps[position - promptLength(branch)] ?? null;
}

/** The token at a position, of the prompt or written: `{id, text, added}`. */
export function tokenAt(branch, position) {
  const step = stepAt(branch, position);
  if (step) return { id: step.token, text: step.piece, added: false };
  const token = branch?.prompt?.tokens[position];
  return token ? { ...token, text: token.piece ?? token.text } : null;
}

/** How many tokens two texts have in common before they part. */
export function sharedSteps(ours, theirs) {
  const most = Math.min(ours.length, theirs.length);
  let same = 0;
  while (same < most && ours[same].token === theirs[same].token) same += 1;
  return same;
}

/** Whether two branches begin with the same tokens. */
export function samePrompt(one, other) {
  if (!one?.prompt || !other?.prompt) return false;
  const [ours, theirs] = [one.prompt.tokens, other.prompt.tokens];
  return ours === theirs || (ours.length === theirs.length && ours.every((token, at) => token.id === theirs[at].id));
}

export const textOf = (branch) => branch.steps.map((step) => step.text).join("");
