// Actions: everything that changes the text. Errors end in `state.fault` and are shown beside the text.

import { api, ApiError } from "./api.js";
import { requestSettings } from "./settings.js";
import { adopt, changed, currentBranch, on, promptLength, reparent, state } from "./state.js";
import { loadHistory, placeOf, pushGeneration, pushUndo } from "./write/history.js";
import { loadParts, partsBody } from "./write/parts.js";

export { canRedo, canUndo, pushUndo, redo, redoLabel, undo, undoLabel } from "./write/history.js";

export const CANDIDATES = 12; // sent with each step; the step panel can request more
const DEFAULT_MAX_TOKENS = 200;

// -- errors -----------------------------------------------------------------------------------

export function setFault(error, where = "text") {
  if (error?.name === "AbortError") return;
  if (!(error instanceof ApiError)) console.error(error);
  const { message = String(error), param = null, code = null, status = null } = error ?? {};
  state.fault = { message, param, code, status, where };
  if (error?.isOffline) onServerLost();
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

/** Run an action; show its error and return false if it fails. */
export async function attempt(action, where) {
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

let reconnectTimer = 0;

/** Load the list of models; retry every second while the server does not answer. */
export async function connect() {
  clearTimeout(reconnectTimer);
  try {
    const { data } = await api.get("/v1/models");
    // Keep the details of models that were unloaded since.
    const before = new Map(state.models.map((model) => [model.id, model.unspool]));
    state.models = data.map((model) => ({ ...model, unspool: { ...before.get(model.id), ...model.unspool } }));
    if (!data.some((model) => model.id === state.model)) state.model = data[0]?.id ?? null;
    Object.assign(state.server, { ready: true, connecting: false, keyNeeded: false });
    if (state.fault?.status === 0 || state.fault?.status === 401) clearFault();
    changed("models", "server");
    return true;
  } catch (error) {
    state.server.connecting = false;
    if (error.status === 401) {
      Object.assign(state.server, { ready: false, keyNeeded: true });
      changed("server");
    } else onServerLost();
    return false;
  }
}

function onServerLost() {
  state.server.ready = false;
  changed("server");
  clearTimeout(reconnectTimer);
  reconnectTimer = setTimeout(connect, 1000);
}

// -- writing ----------------------------------------------------------------------------------

/** The prompt fields of a request, by mode. */
export function promptBody(words) {
  if (state.mode !== "chat") return { prompt: words };
  const system = state.system?.trim();
  const messages = [{ role: "user", content: words }];
  return { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
}

/** The user's words in the prompt of a text: the last message of a chat, or the whole prompt. */
export function promptWords(branch) {
  const { messages, text = "" } = branch?.prompt ?? {};
  return messages ? messages.findLast(({ role }) => role === "user")?.content ?? "" : text;
}

/** Start a new text from the prompt in the composer. */
export async function writePrompt() {
  const words = state.draft;
  if (!words.trim() && state.mode === "chat") return;
  await writeFrom(promptBody(words));
}

/** Start again from the prompt of the current text, with the model in use. */
export async function rewritePrompt() {
  const { messages, text } = currentBranch().prompt;
  await writeFrom(messages ? { messages } : { prompt: text });
}

async function writeFrom(prompt) {
  await pauseWriting();
  await attempt(async () => {
    const settings = { ...requestSettings(), seed: state.settings.seed ?? null };
    const body = { model: state.model, top: CANDIDATES, ...settings, ...partsBody(), ...prompt };
    const created = await createInSession(body);
    const before = placeOf(currentBranch());
    const branch = adopt(created);
    state.draft = "";
    changed("draft");
    setCurrent(branch.id);
    pushUndo({ label: "write", before, after: { id: branch.id, length: null } });
    await streamInto(branch);
  });
}

/** Create a branch in the session that is open, or else in a new one. */
export async function createInSession(body) {
  const isNew = state.session === null;
  if (isNew) state.session = (await api.post("/v1/tree/sessions")).id;
  try {
    return await api.post("/v1/tree", { ...body, session: state.session });
  } catch (error) {
    if (isNew) api.delete(`/v1/tree/sessions/${state.session}`).catch(() => {}); // it would be empty
    if (isNew || error.code === "session_not_found") state.session = null;
    if (isNew || error.code !== "session_not_found") throw error;
    return createInSession(body); // it was deleted elsewhere
  }
}

/** Show an empty page for a new text, with the focus in the prompt; the current one stays in the library. */
export async function newText() {
  await clearText();
  requestAnimationFrame(() => document.getElementById("prompt")?.focus());
}

/** Show an empty page for a new text. */
export async function clearText() {
  await pauseWriting();
  openView("write");
  loadHistory(null);
  loadParts(null);
  for (const [id, branch] of state.branches) if (branch.session) state.branches.delete(id);
  state.session = null;
  state.isFirstVisit = false;
  setCurrent(null);
  changed("branches", "session");
}

export function toggleLibrary(isOpen = !state.library) {
  state.library = isOpen;
  changed("library");
}

/** Resume the current branch, for `n` tokens or the default number; `isPart`: of an action that undo has already. */
export async function resumeWriting({ n = null, isPart = false } = {}) {
  const branch = currentBranch();
  if (!branch || state.writing) return;
  const from = branch.steps.length;
  await attempt(() => streamInto(branch, n));
  if (!isPart) pushGeneration(branch, from);
}

export const writeOneToken = () => resumeWriting({ n: 1 });

/** Pause generation; the text stays and can be resumed. */
export async function pauseWriting() {
  const writing = state.writing;
  if (!writing) return;
  await api.stop(writing.branch).catch((error) => {
    writing.control.abort();
    setFault(error);
  });
  await writing.over;
}

/** Stop generation and forget how many tokens were left to write. */
export async function stopWriting() {
  const branch = currentBranch();
  await pauseWriting();
  if (branch) branch.remaining = null;
  changed("writing");
}

/** Append the user's words (a chat turn, or plain text) and resume. */
export async function sendReply(words) {
  const branch = currentBranch();
  if (!branch || !words) return false;
  await pauseWriting();
  const isChat = Boolean(branch.prompt?.messages);
  const body = isChat ? { message: { role: "user", content: words } } : { text: words };
  const length = branch.steps.length;
  const appendWords = async () => {
    adopt(await api.post(`/v1/tree/${branch.id}/append`, body));
  };
  const goes = await attempt(appendWords);
  if (!goes) return false;
  pushUndo({
    label: `add “${shorten(words)}”`, before: { id: branch.id, length }, after: { id: branch.id, length: null },
  });
  return attempt(() => streamInto(branch));
}

/** Fork at a position with another token or text, and resume; the old text stays as a branch. */
export async function chooseToken(position, { token, text }) {
  const branch = currentBranch();
  if (!branch) return;
  await pauseWriting();
  await attempt(async () => {
    const at = position - promptLength(branch);
    const what = text === undefined ? { token } : { text };
    const rest = restOfTurn(branch, at); // read before `choose`: a lost branch gets another id
    const fork = adopt(await api.post(`/v1/tree/${branch.id}/choose`, { at, ...what }));
    if (rest.length) adopt(await api.post(`/v1/tree/${fork.id}/append`, { tokens: rest }));
    fork.isFromChoice = true;
    setCurrent(fork.id, position);
    const words = fork.steps.slice(at).map((step) => step.piece).join("");
    pushUndo({
      label: `choose “${shorten(words)}”`,
      before: { ...placeOf(branch), selected: position },
      after: { id: fork.id, length: null, selected: position },
    });
    await streamInto(fork);
  });
}

/** The tokens after a step in a turn of the user, up to the start of the model's; none if the step is not in such a turn. */
function restOfTurn(branch, at) {
  if (!branch.prompt?.messages || !branch.steps[at]?.chosen) return [];
  const end = branch.steps.findIndex((step, index) => index > at && !step.chosen);
  const turn = (branch.turns ?? []).find(({ start, end: turnEnd }) => start <= at && at < turnEnd);
  if (!turn || turn.role === "assistant") return [];
  return branch.steps.slice(at + 1, end < 0 ? undefined : end).map(({ token }) => token);
}

export const shorten = (words) => (words.length > 24 ? `${words.slice(0, 23)}…` : words).trim();

/** Resume a branch on the server and apply the events of the stream to it. */
async function streamInto(branch, n = null) {
  const most = state.speed === 0 ? 1 : n ?? branch.remaining ?? state.settings.max_tokens ?? DEFAULT_MAX_TOKENS;
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
      ...settings, ...partsBody(), stream: true, max_tokens: most, top: CANDIDATES,
      ...(state.speed ? { pace: state.speed } : {}),
    };
    for await (const { event, data } of api.resume(branch.id, body, { signal: control.signal })) {
      applyEvent(event, data);
      if (event === "step" && writing.first === null) {
        writing.first = (performance.now() - writing.began) / 1000;
        changed("writing"); // show the first token without delay
      }
    }
    if (branch.error) throw new ApiError(500, branch.error.message, branch.error);
  } finally {
    const wrote = branch.steps.length - from;
    const isPaused = branch.finish_reason === "interrupted" && wrote < most;
    branch.remaining = isPaused && n === null ? most - wrote : null;
    branch.writing = false;
    branch.progress = null;
    state.writing = null;
    over();
    changed("writing", "branches", "steps");
  }
}

/** Apply one event of a stream to the branch that it names. */
export function applyEvent(event, data) {
  if (event === "branch" || event === "done") {
    adopt(data.data);
    return;
  }
  const branch = state.branches.get(data.branch);
  if (!branch) return;
  if (event === "step") {
    branch.steps[data.index] = data;
    branch.progress = null;
    branch.length = branch.steps.length;
    branch.isLoaded = true;
  } else if (event === "error") branch.error = data.error;
  else if (event === "prompt") branch.progress = data;
  else if ("to" in data) {
    branch.retracted.push({ at: data.to, steps: branch.steps.splice(data.to), verb: event });
    branch.length = data.to;
  }
  if (branch.id === state.current) changed("steps");
  else changed("branches");
}

// -- looking and moving -----------------------------------------------------------------------

export function selectToken(position) {
  state.selected = position;
  state.sheet = position !== null;
  changed("selection", "panel");
}

export function showPanel(panel) {
  state.panel = panel;
  state.sheet = true;
  changed("panel");
}

/** Close the side panel on a narrow screen and focus the text. */
export function closeSheet() {
  state.sheet = false;
  changed("panel");
  document.getElementById("text")?.focus({ preventScroll: true });
}

export function openView(view) {
  state.view = view;
  changed("view");
}

export function updateSettings(some) {
  Object.assign(state.settings, some);
  changed("settings");
}

export function setMode(mode) {
  state.mode = mode;
  changed("mode");
}

export async function setSpeed(speed) {
  state.speed = speed;
  changed("speed");
  if (!state.writing) return;
  if (speed === 0) await pauseWriting();
  else await attempt(() => api.setPace(state.writing.branch, speed));
}

export function setCurrent(id, selected = null) {
  state.current = id;
  state.selected = selected;
  state.hovered = null;
  state.comparing = null;
  state.span = null;
  changed("current", "selection", "hover", "steps", "comparing", "span");
}

/** Make another branch the current one, with its steps loaded. */
export async function jump(id, selected = null) {
  id = state.renamed.get(id) ?? id;
  if (id !== state.current) await pauseWriting();
  if (!state.branches.has(id)) {
    setCurrent(null);
    return;
  }
  await attempt(() => ensureSteps(id));
  setCurrent(id, selected);
}

/** Load a branch's prompt and steps if they are missing. */
export async function ensureSteps(id) {
  const branch = state.branches.get(id);
  if (!branch || branch.recorded || (branch.prompt && branch.isLoaded)) return branch;
  return adopt(await api.get(`/v1/tree/${id}`));
}

/** Set the name of a branch; false if that failed. */
export const setName = (id, name) => attempt(async () => {
  const branch = state.branches.get(id);
  if (!branch) return;
  if (!branch.recorded) await api.patch(`/v1/tree/${id}`, { name: name || null });
  branch.name = name || null;
  changed("branches");
});

export async function renameBranch(id, name) {
  const before = state.branches.get(id).name;
  if (await setName(id, name)) pushUndo({ label: `rename to “${shorten(name)}”`, kind: "name", id, before, after: name });
}

/** Delete a branch from the page. The server deletes it when this can no longer be undone. */
export async function removeBranch(id) {
  const branch = state.branches.get(id);
  if (!branch) return;
  if (state.writing?.branch === id) await pauseWriting();
  await hideBranch(id);
  pushUndo({ label: `delete “${shorten(branch.name || branch.preview || "branch")}”`, kind: "delete", id });
}

/** Take a branch off the page; its children are shown as those of its parent. */
export async function hideBranch(id) {
  const branch = state.branches.get(id);
  if (!branch) return;
  const children = [...state.branches.values()].filter((child) => child.parent === id);
  branch.hidden = { wasCurrent: state.current === id, children: children.map((child) => [child.id, child.forked_at]) };
  state.branches.delete(id);
  state.removed.set(id, branch);
  children.forEach(reparent);
  changed("branches");
  if (state.comparing === id) state.comparing = null;
  if (state.current === id) {
    const next = state.branches.get(branch.parent) ?? [...state.branches.values()].at(-1);
    await jump(next?.id ?? null);
  }
}

/** Put a branch back on the page that `hideBranch` took away. */
export async function showBranch(id) {
  const branch = state.removed.get(id);
  if (!branch) return;
  state.removed.delete(id);
  state.branches.set(id, branch);
  for (const [child, forked_at] of branch.hidden?.children ?? []) {
    if (state.branches.has(child)) Object.assign(state.branches.get(child), { parent: id, forked_at });
  }
  changed("branches");
  if (branch.hidden?.wasCurrent) await jump(id);
}

/** Delete a branch on the server, also when the page closes. */
export function deleteOnServer(id) {
  api.sendLater("DELETE", `/v1/tree/${id}`);
}

// -- branches that views create: dropped when they are no longer shown, unless the user did something with them

const visited = new Set(); // branches that were the current one
on("current", () => visited.add(state.current));
const originalNames = new Map(); // id -> the name that the view gave

/** Add a new branch to those of the page and return its id. */
export function addBranch(branch, settings) {
  const added = adopt(branch);
  added.runs = [{ from: 0, settings }];
  originalNames.set(added.id, added.name);
  return added.id;
}

/** Load the details of a model that is in no list: a checkpoint, a puzzle solver. */
export async function loadModelInfo(model, signal) {
  if (state.unlisted.has(model) || state.models.some(({ id }) => id === model)) return;
  state.unlisted.set(model, await api.get(`/v1/models/${encodeURIComponent(model)}`, { signal }));
  changed("models");
}

/** Delete branches that are no longer shown, but none that the user visited, renamed or forked. */
export function dropUnused(ids) {
  for (const id of ids) {
    const branch = state.branches.get(id);
    if (!branch || visited.has(id) || id === state.comparing || branch.name !== originalNames.get(id)) continue;
    if ([...state.branches.values()].some((other) => other.parent === id)) continue;
    state.branches.delete(id);
    api.delete(`/v1/tree/${id}`).catch(() => {}); // already deleted
  }
  changed("branches");
}
