// The state of the page, and listeners for its changes.
//
// Components read `state` and change it through `actions.js`. `changed(topic)` calls the listeners of a topic, at most
// once a frame, and for a text that streams at most 30 times a second.

export const state = {
  server: { ready: false, connecting: true, keyNeeded: false },
  models: [],
  unlisted: new Map(), // models requested by name: checkpoints of training runs, puzzle solvers
  model: null,
  loading: null, // {id, since}: the model that is being loaded
  mode: "chat",
  draft: "", // what is typed in the composer: a prompt, or the next words of the text
  system: null, // the system message of a chat; null: the template's default
  settings: {}, // settings that differ from the server's defaults
  branches: new Map(),
  renamed: new Map(), // old id -> new id, of branches that were created again after the server lost them
  removed: new Map(), // deleted on the page; the server deletes them when that cannot be undone any more
  current: null,
  selected: null, // a token position, prompt included
  hovered: null,
  span: null, // {branch, first, last, isRequested}: tokens of one message, prompt included, selected for rewriting
  revision: null, // {branch, proposals, …}: proposed edits that are open
  comparing: null, // a second branch, shown beside the current one
  writing: null,
  editing: false, // whether a tap puts a caret in the text (with a mouse, a click always does)
  afterEdit: "rescore", // what happens to the text after an edit: "rescore" or "keep"
  reading: false, // whether the text is rendered instead of shown token by token
  tint: "probability",
  speed: null, // tokens a second; null: no limit; 0: one token per key press
  panel: "step", // a name of PANELS
  sheet: false, // on a narrow screen: whether the side panel is open
  view: "write", // a name of VIEWS
  parts: null, // memory, author's note and lorebook of the session: see write/parts.js
  placement: null, // {branch, parts}: their positions in the prompt
  session: null, // the id of the session that is open: a text with its branches
  isFirstVisit: false, // the text is the example of a first visit
  library: false, // whether the drawer with all sessions is open
  fault: null,
};

const listeners = new Map();
const pending = new Set();
const STREAMED = new Set(["steps", "branches", "layout"]);
const STREAM_INTERVAL_MS = 33; // between two updates of a text that streams: the model needs the cores too
let frame = 0;
let timer = 0;
let lastUpdate = 0;

/** Call `listener` after changes of this topic. Returns the function that unsubscribes. */
export function on(topic, listener) {
  if (!listeners.has(topic)) listeners.set(topic, new Set());
  listeners.get(topic).add(listener);
  return () => listeners.get(topic).delete(listener);
}

/** Call the listeners of these topics in the next frame. */
export function changed(...topics) {
  for (const topic of topics) pending.add(topic);
  if (frame) return;
  const wait = topics.every((topic) => STREAMED.has(topic)) ? lastUpdate + STREAM_INTERVAL_MS - performance.now() : 0;
  // A page in the background gets no animation frames, but must keep reading the stream.
  if (wait <= 0) frame = document.hidden ? setTimeout(notifyListeners, 50) : requestAnimationFrame(notifyListeners);
  else timer ||= setTimeout(onTimer, wait);
}

function onTimer() {
  timer = 0; // before `changed`: a timer may fire early, and then another is needed
  changed();
}

function notifyListeners() {
  frame = 0;
  lastUpdate = performance.now();
  const topics = [...pending];
  pending.clear();
  const woken = new Set(topics.flatMap((topic) => [...(listeners.get(topic) ?? [])]));
  for (const listener of woken) listener();
}

// -- branches ---------------------------------------------------------------------------------

/** Add or update a branch from a server response; fields that are not in it stay. */
export function adopt(update) {
  const existing = state.branches.get(update.id);
  const branch = existing ?? {
    steps: [], prompt: null, isLoaded: false, retracted: [], runs: [], recorded: false,
  };
  const { steps, since, prompt, ...fields } = update;
  Object.assign(branch, fields);
  reparent(branch);
  const parent = state.branches.get(branch.parent);
  branch.prompt = prompt ?? branch.prompt ?? parent?.prompt ?? null;
  if (steps) {
    const from = since ?? 0;
    if (branch.steps.length < from && parent?.steps.length >= from) inheritSteps(branch, parent, from);
    if (branch.steps.length >= from) {
      branch.steps.splice(from, Infinity, ...steps);
      branch.isLoaded = branch.steps.length >= branch.length;
    }
  }
  state.branches.set(branch.id, branch);
  changed("branches");
  if (branch.id === state.current) changed("steps");
  return branch;
}

/** Attach the child of a deleted branch to the nearest ancestor that is left. */
export function reparent(branch) {
  for (let removed; (removed = state.removed.get(branch.parent)); ) {
    branch.parent = removed.parent;
    branch.forked_at = removed.parent === null ? null : Math.min(branch.forked_at, removed.forked_at);
  }
}

/** Copy the steps that a fork shares with its parent; the server does not send them again. */
function inheritSteps(branch, parent, length) {
  branch.steps = parent.steps.slice(0, length);
  branch.runs = parent.runs.filter((run) => run.from < length);
  branch.turns ??= parent.turns?.filter((turn) => turn.end <= length);
  branch.retracted = parent.retracted.filter((cut) => cut.at < length);
  branch.added = new Set([...(parent.added ?? [])].filter((index) => index < length));
}

export const currentBranch = () => state.branches.get(state.current) ?? null;
const findModel = (name) => state.models.find((model) => model.id === name) ?? state.unlisted.get(name) ?? null;
export const currentModel = () => findModel(state.model);
/** The model that wrote a text; another one may be in use since. */
export const modelOf = (branch) => findModel(branch?.model) ?? currentModel();
export const promptLength = (branch) => branch.prompt?.tokens.length ?? branch.prompt_tokens;
export const textLength = (branch) => promptLength(branch) + branch.steps.length;

export function stepAt(branch, position) {
  return branch?.steps[position - promptLength(branch)] ?? null;
}

/** The prompt or generated token at a position: `{id, text, added}`. */
export function tokenAt(branch, position) {
  const step = stepAt(branch, position);
  if (step) return { id: step.token, text: step.piece, added: false };
  const token = branch?.prompt?.tokens[position];
  return token ? { ...token, text: token.piece ?? token.text } : null;
}

/** Whether the chat template added the token at a position. A recorded branch of a file has a list of these steps. */
export function isTemplate(branch, at) {
  const promptTokens = promptLength(branch);
  if (at < promptTokens) return Boolean(branch.prompt.tokens[at].added);
  const step = at - promptTokens;
  return Boolean(branch.added?.has(step)) || (branch.turns ?? []).some(({ start, end, content }) => (
    start <= step && step < end && !(content && content[0] <= step && step < content[1])));
}

/** Number of steps that two texts share before they diverge. */
export function sharedSteps(steps, otherSteps) {
  const most = Math.min(steps.length, otherSteps.length);
  let shared = 0;
  while (shared < most && steps[shared].token === otherSteps[shared].token) shared += 1;
  return shared;
}

/** Whether two branches have the same prompt tokens. */
export function samePrompt(branch, otherBranch) {
  if (!branch?.prompt || !otherBranch?.prompt) return false;
  const [tokens, otherTokens] = [branch.prompt.tokens, otherBranch.prompt.tokens];
  return tokens === otherTokens || (tokens.length === otherTokens.length && tokens.every((token, at) => token.id === otherTokens[at].id));
}

export const textOf = (branch) => branch.steps.map((step) => step.text).join("");
