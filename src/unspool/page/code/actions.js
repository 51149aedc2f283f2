// The verbs: all that a person can do to the text. Errors end in `state.fault`, said in place.

import { api, ApiFault } from "./api.js";
import { pushUndo } from "./history.js";
import { requestSettings } from "./settings.js";
import { adopt, branchNow, changed, promptLength, settle, state } from "./state.js";

export { canRedo, canUndo, pushUndo, redo, redoLabel, undo, undoLabel } from "./history.js";

export const CANDIDATES = 12; // told with each step; a step's panel can ask for more
const USUAL_TOKENS = 200;

// -- errors -----------------------------------------------------------------------------------

export function setFault(error, where = "text") {
  if (error?.name === "AbortError") return;
  if (!(error instanceof ApiFault)) console.error(error);
  const { message = String(error), param = null, code = null, status = null } = error ?? {};
  state.fault = { message, param, code, status, where };
  if (error?.gone) lost();
  if (status === 401) {
    state.server.keyNeeded = true;
    changed("server");
  }
  changed("fault");
}

export function clearFault() {
  if (state.fault === null) return;
  state.fault = null;
  changed("fault");
}

/** Run an action that may fail; true if it did not. */
export async function tried(action, where) {
  clearFault();
  try {
    await action();
    return true;
  } catch (error) {
    setFault(error, where);
    return false;
  }
}

// -- the server -------------------------------------------------------------------------------

let waiting = 0;

/** Ask for the models; while nobody answers, ask again every second. */
export async function connect() {
  clearTimeout(waiting);
  try {
    const { data } = await api.get("/v1/models");
    // What is known of a model that was put out of memory meanwhile stays known.
    const before = new Map(state.models.map((model) => [model.id, model.unspool]));
    state.models = data.map((model) => ({ ...model, unspool: { ...before.get(model.id), ...model.unspool } }));
    if (!data.some((model) => model.id === state.model)) state.model = data[0]?.id ?? null;
    Object.assign(state.server, { ready: true, asking: false, keyNeeded: false });
    if (state.fault?.status === 0 || state.fault?.status === 401) clearFault();
    changed("models", "server");
    return true;
  } catch (error) {
    state.server.asking = false;
    if (error.status === 401) {
      Object.assign(state.server, { ready: false, keyNeeded: true });
      changed("server");
    } else lost();
    return false;
  }
}

function lost() {
  state.server.ready = false;
  changed("server");
  clearTimeout(waiting);
  waiting = setTimeout(connect, 1000);
}

// -- writing ----------------------------------------------------------------------------------

/** What a text begins with, as the mode has it. */
export function promptBody(words) {
  if (state.mode !== "chat") return { prompt: words };
  const system = state.system?.trim();
  const messages = [{ role: "user", content: words }];
  return { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
}

/** Begin a new text from what is in the composer. */
export async function write() {
  await pause();
  const words = state.draft;
  if (!words.trim() && state.mode === "chat") return;
  await tried(async () => {
    const settings = { ...requestSettings(), seed: state.settings.seed ?? null };
    const told = await api.post("/v1/tree", {
      model: state.model, top: CANDIDATES, ...settings, ...promptBody(words),
    });
    const before = state.current;
    const branch = adopt(told);
    display(branch.id);
    pushUndo({
      label: "write", undo: () => jump(before), redo: () => jump(branch.id),
    });
    await run(branch);
  });
}

/** Go on with the current branch, by `n` tokens or as many as are usual. */
export async function goOn({ n = null } = {}) {
  const branch = branchNow();
  if (!branch || state.writing) return;
  await tried(() => run(branch, n));
}

export const stepOnce = () => goOn({ n: 1 });

/** Stop writing; what is there stays, and can be gone on with. */
export async function pause() {
  const writing = state.writing;
  if (!writing) return;
  await api.stop(writing.branch).catch((error) => {
    writing.control.abort();
    setFault(error);
  });
  await writing.over;
}

/** Stop, and do not offer to go on to the length that was asked for. */
export async function stop() {
  const branch = branchNow();
  await pause();
  if (branch) branch.left = null;
  changed("writing");
}

/** Put words of a person's own at the end, and let the model go on: an answer, or more text. */
export async function say(words) {
  const branch = branchNow();
  if (!branch || !words) return false;
  await pause();
  const isChat = Boolean(branch.prompt?.messages);
  const body = isChat ? { message: { role: "user", content: words } } : { text: words };
  const length = branch.steps.length;
  const put = async () => {
    adopt(await api.post(`/v1/tree/${branch.id}/append`, body));
    if (isChat) markTurn(branch, length, words);
  };
  const goes = await tried(put);
  if (!goes) return false;
  pushUndo({
    label: `say “${short(words)}”`,
    undo: () => takeBack(branch, length),
    redo: () => tried(async () => {
      await jump(branch.id);
      await put();
      await run(branch);
    }),
  });
  return tried(() => run(branch));
}

/** Which of the steps of a turn are the template's: those in which the words do not stand. */
function markTurn(branch, from, words) {
  // Byte by byte, each as one letter: a character may be spread over several tokens.
  const spread = (bytes) => String.fromCharCode(...bytes);
  const pieces = branch.steps.slice(from).map((step) => spread(step.bytes));
  const wanted = spread(new TextEncoder().encode(words.trim()));
  const start = pieces.join("").indexOf(wanted);
  let at = 0;
  branch.added ??= new Set();
  pieces.forEach((piece, number) => {
    const inside = start >= 0 && at + piece.length > start && at < start + wanted.length;
    if (!inside) branch.added.add(from + number);
    at += piece.length;
  });
}

async function takeBack(branch, length) {
  await pause();
  await tried(async () => adopt(await api.post(`/v1/tree/${branch.id}/rewind`, { to: length })));
  jump(branch.id);
}

/** Another token, or other words, at this place; what stood behind it stays as a branch. */
export async function choose(position, { token, text }) {
  const branch = branchNow();
  if (!branch) return;
  await pause();
  await tried(async () => {
    const at = position - promptLength(branch);
    const what = text === undefined ? { token } : { text };
    const told = await api.post(`/v1/tree/${branch.id}/choose`, { at, ...what });
    const fork = adopt(told);
    fork.byChoice = true;
    display(fork.id, position);
    const words = fork.steps.slice(at).map((step) => step.piece).join("");
    pushUndo({
      label: `choose “${short(words)}”`,
      undo: () => jump(branch.id, position),
      redo: () => jump(fork.id, position),
    });
    await run(fork);
  });
}

export const short = (words) => (words.length > 24 ? `${words.slice(0, 23)}…` : words).trim();

/** Stream what the server writes into a branch. */
async function run(branch, n = null) {
  const most = state.speed === 0 ? 1 : n ?? branch.left ?? state.settings.max_tokens ?? USUAL_TOKENS;
  const settings = requestSettings();
  const control = new AbortController();
  let over;
  const writing = {
    branch: branch.id, began: performance.now(), first: null, control,
    over: new Promise((done) => { over = done; }),
  };
  state.writing = writing;
  const from = branch.steps.length;
  branch.runs = [...branch.runs.filter((run) => run.from < from), { from, settings }];
  changed("writing");
  try {
    const body = {
      ...settings, stream: true, max_tokens: most, top: CANDIDATES,
      ...(state.speed ? { pace: state.speed } : {}),
    };
    for await (const { event, data } of api.resume(branch.id, body, { signal: control.signal })) {
      adoptEvent(event, data);
      if (event === "step" && writing.first === null) {
        writing.first = (performance.now() - writing.began) / 1000;
        changed("writing"); // the first word shows at once
      }
    }
    if (branch.error) throw new ApiFault(500, branch.error.message, branch.error);
  } finally {
    const wrote = branch.steps.length - from;
    const isPaused = branch.finish_reason === "interrupted" && wrote < most;
    branch.left = isPaused && n === null ? most - wrote : null;
    branch.writing = false;
    state.writing = null;
    over();
    changed("writing", "branches", "steps");
  }
}

/** One event of a stream, into the branch that it names. */
export function adoptEvent(event, data) {
  if (event === "branch" || event === "done") {
    adopt(data.data);
    return;
  }
  const branch = state.branches.get(data.branch);
  if (!branch) return;
  if (event === "step") {
    branch.steps[data.index] = data;
    branch.length = branch.steps.length;
    branch.told = true;
  } else if (event === "error") branch.error = data.error;
  else if ("to" in data) {
    branch.retracted.push({ at: data.to, steps: branch.steps.splice(data.to), verb: event });
    branch.length = data.to;
  }
  if (branch.id === state.current) changed("steps");
  else changed("branches");
}

// -- looking and moving -----------------------------------------------------------------------

export function select(position) {
  state.selected = position;
  state.sheet = position !== null;
  changed("selection", "panel");
}

export function show(panel) {
  state.panel = panel;
  state.sheet = true;
  changed("panel");
}

/** Put the sheet of a narrow screen away; the text has the keys again. */
export function closeSheet() {
  state.sheet = false;
  changed("panel");
  document.getElementById("text")?.focus({ preventScroll: true });
}

export function open(view) {
  state.view = view;
  changed("view");
}

export function useSettings(some) {
  Object.assign(state.settings, some);
  changed("settings");
}

export async function setSpeed(speed) {
  state.speed = speed;
  changed("speed");
  if (!state.writing) return;
  if (speed === 0) await pause();
  else await tried(() => api.setPace(state.writing.branch, speed));
}

export function display(id, selected = null) {
  state.current = id;
  state.selected = selected;
  state.hovered = null;
  state.comparing = null;
  state.part = null;
  changed("current", "selection", "hover", "steps", "comparing", "part");
}

/** Show another branch. */
export async function jump(id, selected = null) {
  if (id !== state.current) await pause();
  if (!state.branches.has(id)) {
    display(null);
    return;
  }
  await tried(() => ensureSteps(id));
  display(id, selected);
}

/** Fetch a branch's prompt and steps, if they are not here. */
export async function ensureSteps(id) {
  const branch = state.branches.get(id);
  if (!branch || branch.recorded || (branch.prompt && branch.told)) return branch;
  return adopt(await api.get(`/v1/tree/${id}`));
}

export async function rename(id, name) {
  const branch = state.branches.get(id);
  const before = branch.name;
  const put = (value) => tried(async () => {
    if (!branch.recorded) await api.patch(`/v1/tree/${id}`, { name: value || null });
    branch.name = value || null;
    changed("branches");
  });
  if (await put(name)) {
    pushUndo({ label: `name “${short(name)}”`, undo: () => put(before), redo: () => put(name) });
  }
}

/** Let a branch go. The server keeps it until this can no longer be undone. */
export async function remove(id) {
  const branch = state.branches.get(id);
  if (!branch) return;
  if (state.writing?.branch === id) await pause();
  const wasCurrent = state.current === id;
  const children = [...state.branches.values()].filter((child) => child.parent === id);
  const before = children.map(({ forked_at }) => forked_at);
  const takeAway = async () => {
    state.branches.delete(id);
    state.removed.set(id, branch);
    children.forEach(settle);
    changed("branches");
    if (state.comparing === id) state.comparing = null;
    if (state.current === id) {
      const next = state.branches.get(branch.parent) ?? [...state.branches.values()].at(-1);
      await jump(next?.id ?? null);
    }
  };
  const putBack = async () => {
    state.removed.delete(id);
    state.branches.set(id, branch);
    children.forEach((child, at) => Object.assign(child, { parent: id, forked_at: before[at] }));
    changed("branches");
    if (wasCurrent) await jump(id);
  };
  await takeAway();
  pushUndo({
    label: `delete “${short(branch.name || branch.preview || "branch")}”`,
    undo: putBack,
    redo: takeAway,
    forget: () => state.branches.has(id) || forgotten(id),
  });
}

/** Delete on the server what was deleted here; also as the page goes away. */
function forgotten(id) {
  const headers = api.key ? { authorization: `Bearer ${api.key}` } : {};
  fetch(`/v1/tree/${id}`, { method: "DELETE", headers, keepalive: true }).catch(() => {});
}
