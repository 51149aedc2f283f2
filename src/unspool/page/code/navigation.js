// The address of what is shown: view, text, model and run; Back and Forward move between views and texts. And what
// survives a reload of the tab.

import { ensureSteps, jump, openView } from "./actions.js";
import { api } from "./api.js";
import { existingBranches, openLatest, openSession } from "./library/sessions.js";
import { adopt, changed, currentBranch, on, state } from "./state.js";
import { PANELS, viewNamed } from "./views.js";
import { writeFirstText } from "./write/first.js";

/** The id of the text that is shown; null for one that the server does not have. A text that is played is its original. */
const shownId = () => currentBranch()?.copyOf ?? (currentBranch()?.recorded ? null : state.current);

/** The address of a view with the current text. */
export function hrefOf(view) {
  const query = new URLSearchParams(location.search);
  const values = { view: view === "write" ? null : view, text: shownId() };
  for (const [name, value] of Object.entries(values)) {
    if (value) query.set(name, value);
    else query.delete(name);
  }
  if (view !== "training") query.delete("run");
  return query.size ? `?${query}` : location.pathname;
}

let isRestoring = true; // until the page has read its address

/** Add an entry to the history whenever another view or text is shown. Back and Forward show it again. */
export function followAddress() {
  const follow = () => {
    const href = hrefOf(state.view);
    const now = location.search || location.pathname;
    if (isRestoring || href === now) return;
    history.pushState(null, "", href);
  };
  on("view", follow);
  on("current", follow);
  addEventListener("popstate", showAddress);
}

const requested = () => {
  const query = new URLSearchParams(location.search);
  const view = query.get("view") ?? (query.has("run") ? "training" : "write");
  return { view: viewNamed(view) ? view : "write", text: query.get("text") };
};

/** Show the view and text that the address names. */
async function showAddress() {
  isRestoring = true;
  const { view, text } = requested();
  openView(view);
  if (text !== state.current) await openText(text);
  finishRestoring();
}

/** The address now names what is shown. */
function finishRestoring() {
  isRestoring = false;
  history.replaceState(history.state, "", hrefOf(state.view));
}

/** Show a text of this tab or of the server; false if there is no such text. */
async function openText(id) {
  if (id && !state.branches.has(id)) {
    const branch = await api.get(`/v1/tree/${encodeURIComponent(id)}`).catch(() => null);
    if (!branch) return false;
    if (branch.session && branch.session !== state.session) return openSession(branch.session, id);
    adopt(branch);
  }
  await jump(id);
  if (!id) state.session = null; // a new text
  return true;
}

// -- what survives a reload of the tab ----------------------------------------------------------

const STORAGE_KEY = "unspool.session";
const SAVED_FIELDS = ["mode", "draft", "system", "settings", "current", "tint", "speed", "panel", "library", "session"];

/** Save the branches of this tab and its state in the session storage, whenever they change. */
export function saveTabOnChanges() {
  let timer = 0;
  const saveNow = () => {
    const branches = [...state.branches.values()].filter((branch) => !branch.recorded);
    const saved = Object.fromEntries(SAVED_FIELDS.map((name) => [name, state[name]]));
    saved.current = shownId();
    saved.branches = branches.map(({ id, runs }) => [id, runs]);
    try {
      sessionStorage.setItem(STORAGE_KEY, JSON.stringify(saved));
    } catch {
      /* no storage: a reload starts with the latest text of the library */
    }
  };
  addEventListener("pagehide", saveNow); // for changes of the last 300 ms
  for (const topic of [...SAVED_FIELDS, "branches"]) {
    on(topic, () => {
      clearTimeout(timer);
      timer = setTimeout(saveNow, 300);
    });
  }
}

function savedTab() {
  try {
    return JSON.parse(sessionStorage.getItem(STORAGE_KEY));
  } catch {
    return null; // not readable
  }
}

/** Show what the address names, with what was saved for this tab. */
export async function restoreTab() {
  const saved = savedTab();
  const { view, text } = requested();
  state.view = view;
  if (saved && !state.branches.size) {
    for (const name of SAVED_FIELDS) if (name in saved && !["current", "session"].includes(name)) state[name] = saved[name];
    if (!PANELS.some(({ name }) => name === state.panel)) state.panel = PANELS[0].name;
    const data = await existingBranches((saved.branches ?? []).map(([id]) => id)).catch(() => []);
    const onServer = new Map(data.map((branch) => [branch.id, branch]));
    for (const [id, runs] of saved.branches ?? []) { // those of the session come with it, and with what can be undone
      if (onServer.has(id) && onServer.get(id).session !== saved.session) adopt(onServer.get(id)).runs = runs;
    }
  }
  changed("view", ...SAVED_FIELDS, "branches");
  const id = text ?? saved?.current ?? null;
  if (state.branches.has(id)) await ensureSteps(id).catch(() => {});
  const isShown = id !== null && await openText(id);
  const isNewTab = !isShown && !saved;
  const { hash } = location;
  const isLatest = isNewTab && !hash && await openLatest();
  finishRestoring();
  if (hash) {
    const { isLink, openLink } = await import("./share/link.js");
    if (isLink(hash)) return void openLink(hash);
  }
  if (isNewTab && !isLatest && state.view === "write") writeFirstText();
}
