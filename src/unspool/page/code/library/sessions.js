// Sessions: the texts of the library. A session is the branches of one text, with a title, tags and what the page shows
// of it. And branches that the server lost in a restart: created again from what the page still has.

import { attempt, CANDIDATES, jump, pauseWriting } from "../actions.js";
import { api } from "../api.js";
import { adopt, changed, on, samePrompt, state } from "../state.js";
import { loadHistory, saveHistory } from "../write/history.js";
import { loadParts, saveParts } from "../write/parts.js";

const pathOf = (id) => `/v1/tree/sessions/${encodeURIComponent(id)}`;

/** Sessions that contain all words of `query`, newest first: `{data, has_more}`. `before`: the last one of the page before. */
export function listSessions({ query = "", tag = null, limit = 50, before = null } = {}, options = {}) {
  const values = Object.entries({ query, tag, limit, before }).filter(([, value]) => value !== null && value !== "");
  return api.get(`/v1/tree/sessions?${new URLSearchParams(values)}`, options);
}

/** Those of these branches that the server has. */
export async function existingBranches(ids) {
  const branches = [];
  for (let at = 0; at < ids.length; at += 100) {
    const query = ids.slice(at, at + 100).map((id) => `&id=${encodeURIComponent(id)}`).join("");
    branches.push(...(await api.get(`/v1/tree?limit=100${query}`)).data);
  }
  return branches;
}

/** Show a session: the branch that was shown last, or the one with this id. */
export function openSession(id, branchId = null) {
  return attempt(async () => {
    const session = await api.get(pathOf(id));
    await pauseWriting();
    if (state.session !== id) {
      for (const [key, branch] of state.branches) if (branch.session && branch.session !== id) state.branches.delete(key);
    }
    const isOther = state.session !== id;
    state.session = id;
    const { current, selected = null, runs = {} } = session.view;
    for (const branch of session.branches) {
      const isLoaded = state.branches.has(branch.id);
      const adopted = adopt(branch);
      if (!isLoaded && Array.isArray(runs[branch.id])) adopted.runs = runs[branch.id];
    }
    if (isOther) {
      loadHistory(session.view.history);
      loadParts(session.view.parts);
    }
    const [last] = session.branches.toSorted((a, b) => (b.updated ?? b.created) - (a.updated ?? a.created));
    const target = branchId ?? (state.branches.has(current) ? current : last?.id ?? null);
    await jump(target, target === current ? selected : null);
    changed("session");
  });
}

/** Show the newest session; false if there is none. */
export async function openLatest() {
  const { data } = await listSessions({ limit: 10 }).catch(() => ({ data: [] }));
  const latest = data.find(({ branches }) => branches > 0);
  const isFree = state.current === null && !state.draft; // nothing was typed meanwhile
  return latest !== undefined && isFree && openSession(latest.id);
}

export const updateSession = (id, fields) => api.patch(pathOf(id), fields);
export const deleteSession = (id) => api.delete(pathOf(id));
export const restoreSession = (id) => api.post(`${pathOf(id)}/restore`);
export const duplicateSession = (id) => api.post(`${pathOf(id)}/duplicate`);

/** Keep a branch that a view created: give it a session, so that it is in the library. */
export async function keepBranch(id) {
  const branch = state.branches.get(id);
  if (!branch || branch.recorded || branch.session) return;
  const { id: session } = await api.post("/v1/tree/sessions");
  adopt(await api.patch(`/v1/tree/${id}`, { session }));
}

// -- what the page shows of a session is saved with it ----------------------------------------------

const SAVE_MS = 500;
const MAX_VIEW_CHARS = 200_000; // with more, the settings of earlier runs are left out

/** Save the current branch, the selection and the settings of each run, whenever they change. */
export function saveSessionOnChanges() {
  let timer = 0;
  let saved = "";
  const save = (isClosing = false) => {
    clearTimeout(timer);
    timer = 0;
    const { session, current, selected } = state;
    const branch = state.branches.get(current);
    if (!session || branch?.session !== session || !state.server.ready) return;
    const branches = [...state.branches.values()].filter((other) => other.session === session);
    const view = { current, selected, runs: Object.fromEntries(branches.map(({ id, runs }) => [id, runs])), history: saveHistory(), parts: saveParts() };
    if (JSON.stringify(view).length > MAX_VIEW_CHARS) view.runs = {};
    const text = JSON.stringify([session, view]);
    if (text === saved) return;
    saved = text;
    if (isClosing) return api.sendLater("PATCH", pathOf(session), { view });
    updateSession(session, { view }).catch(() => { saved = ""; }); // offline: saved with the next change
  };
  for (const topic of ["current", "selection", "writing", "history", "parts"]) on(topic, () => { timer ||= setTimeout(save, SAVE_MS); });
  addEventListener("pagehide", () => timer && save(true), { capture: true });
  on("current", () => {
    const session = state.branches.get(state.current)?.session;
    if (session) state.session = session;
  });
}

// -- branches that the server no longer has ---------------------------------------------------------

const rebuilding = new Map(); // id -> promise of the new id

/** Create a branch again on the server; its new id, or null if the page does not have all of it. */
export function rebuild(id) {
  if (!rebuilding.has(id)) {
    rebuilding.set(id, createAgain(id).finally(() => rebuilding.delete(id)));
  }
  return rebuilding.get(id);
}

async function createAgain(id) {
  const branch = state.branches.get(id);
  if (!branch?.prompt || branch.recorded || branch.steps.length < branch.length) return null;
  const session = await sessionFor(branch);
  const parent = state.branches.get(branch.parent);
  let created = null;
  let from = 0;
  if (parent && samePrompt(branch, parent)) {
    from = branch.forked_at;
    created = await api.post(`/v1/tree/${parent.id}/fork`, { at: from, name: branch.name });
  } else created = await createRoot(branch, session);
  const tokens = branch.steps.slice(from).map(({ token }) => token);
  if (tokens.length) await api.post(`/v1/tree/${created.id}/append`, { tokens });
  renameBranchId(branch, created.id);
  branch.session = created.session ?? null;
  return created.id;
}

async function createRoot(branch, session) {
  const { messages, tokens } = branch.prompt;
  const ids = tokens.map((token) => token.id);
  const body = { model: branch.model, name: branch.name, seed: branch.seed, top: CANDIDATES, ...(session ? { session } : {}), ...branch.runs.at(-1)?.settings };
  if (messages) {
    const created = await api.post("/v1/tree", { ...body, messages });
    if (created.prompt.tokens.map((token) => token.id).join() === ids.join()) return created;
    await api.delete(`/v1/tree/${created.id}`); // the template gives another prompt now, such as one with a date
  }
  return api.post("/v1/tree", { ...body, prompt: ids });
}

/** The session of a branch, or a new one in its place. */
async function sessionFor(branch) {
  if (!branch.session) return null;
  const before = branch.session;
  if (await api.get(pathOf(before)).catch((error) => { if (error.status !== 404) throw error; })) return before;
  const { id } = await api.post("/v1/tree/sessions");
  for (const other of state.branches.values()) if (other.session === before) other.session = id;
  if (state.session === before) state.session = id;
  return id;
}

/** The branch has another id from now on. */
function renameBranchId(branch, id) {
  const before = branch.id;
  state.branches.delete(before);
  state.renamed.set(before, id);
  branch.id = id;
  state.branches.set(id, branch);
  for (const other of state.branches.values()) if (other.parent === before) other.parent = id;
  for (const name of ["current", "comparing"]) if (state[name] === before) state[name] = id;
  for (const place of [state.writing, state.span, state.revision]) if (place?.branch === before) place.branch = id;
  changed("branches", "current");
}

/** After the server was away: create again what it lost, the current branch first. */
async function rebuildAll() {
  const onServer = new Set((await existingBranches([...state.branches.keys()])).map(({ id }) => id));
  const lost = [...state.branches.keys()].filter((id) => !onServer.has(id));
  lost.sort((a, b) => (b === state.current) - (a === state.current));
  for (const id of lost) await rebuild(state.renamed.get(id) ?? id);
  if (onServer.has(state.current)) adopt(await api.get(`/v1/tree/${state.current}`)); // it may have ended otherwise
}

/** Rebuild branches when the server is back, and when a request names one that it does not have. */
export function rebuildOnLoss() {
  api.recover = rebuild;
  let wasReady = false;
  on("server", () => {
    const isBack = state.server.ready && wasReady === "lost";
    if (state.server.ready) wasReady = true;
    else if (wasReady === true) wasReady = "lost";
    if (isBack) rebuildAll().catch(() => {}); // tried again by the next request that needs a branch
  });
}
