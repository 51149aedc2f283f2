// The shell of the page: header, views, keyboard shortcuts, and what survives a reload of the tab.

import {
  closeSheet, connect, ensureSteps, jump, openView, pauseWriting, redo, resumeWriting, selectToken, showPanel,
  stopWriting, undo, writeOneToken,
} from "./actions.js";
import { api } from "./api.js";
import { Fold, html, Lazy, listenForDrops, render, storage, useChanges, useEffect, useRef, useState } from "./lib.js";
import { restoreModel, shortName } from "./models.js";
import { adopt, changed, currentBranch, on, state } from "./state.js";
import { PANELS, VIEWS } from "./views.js";
import { clearSpan, selectSpan } from "./write/edits.js";
import { WriteView } from "./write/view.js";

function App() {
  useChanges("view");
  const [dialog, setDialog] = useState(null); // "share", "keys" or "models"
  const close = () => setDialog(null);
  useEffect(() => listenForKeys(() => setDialog("keys")), []);
  useEffect(() => listenForDrops(() => setDialog("share")), []);
  const view = VIEWS.find(({ name }) => name === state.view);
  return html`
    <a class="skip" href="#view">Skip to the text</a>
    <${Header} openDialog=${setDialog} />
    <${ServerNotice} />
    <main id="view" class=${`view-${state.view}`} tabindex="-1">
      ${state.view === "write" ? html`<${WriteView} />`
        : html`<${Lazy} key=${view.file} file=${view.file} name=${view.component} />`}
    </main>
    ${dialog === "share" && html`<${Lazy} file="./share/dialog.js" name="ShareDialog" close=${close} />`}
    ${dialog === "models" && html`<${Lazy} file="./models.js" name="ModelDialog" close=${close} />`}
    ${dialog === "keys" && html`<${KeysDialog} close=${close} />`}
    <${Lazy} file="./tour.js" name="Tour" quiet />`;
}

function Header({ openDialog }) {
  useChanges("view");
  return html`<${Fold} as="header" class="head" name="Menu">
    <h1><a href="/" aria-label="Unspool"><img src="/page/icon.svg" alt="" width="26" height="26" /> <span>Unspool</span></a></h1>
    <nav class="segments" aria-label="Views">
      ${VIEWS.map(({ name, title }) => html`<button aria-pressed=${state.view === name}
        id=${`view-${name}`} onClick=${() => openView(name)}>${title}</button>`)}
    </nav>
    <span class="grow"></span>
    <${ModelChoice} pick=${() => openDialog("models")} />
    <button class="button plain folds" id="share" onClick=${() => openDialog("share")}>Share</button>
    <button class="button plain folds" id="tour" onClick=${startTour}>Tour</button>
    <button class="button plain folds" id="keys" onClick=${() => openDialog("keys")} aria-label="Keyboard shortcuts"
      title="Keyboard shortcuts (?)">?</button>
    <${ThemeChoice} />
  <//>`;
}

async function startTour() {
  (await import("./tour.js")).startTour();
}

/** The name of the model in use; a click lists the others on this machine. */
function ModelChoice({ pick }) {
  useChanges("models");
  const id = state.loading?.id ?? state.model;
  return html`<button class="button plain small model-name folds" id="model" onClick=${pick} aria-haspopup="dialog"
    title="The model in use; click to choose another">${id && html`<span class="visually-hidden">Model: </span>`}<span>${
      shortName(id)}</span>${state.loading && html` <span class="quiet">loading …</span>`}</button>`;
}

const THEMES = { system: "System", light: "Light", dark: "Dark" };

function ThemeChoice() {
  const [theme, setTheme] = useState(storage.get("theme", "system"));
  useEffect(() => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    storage.set("theme", theme);
    changed("theme", "layout");
  }, [theme]);
  return html`<label class="folds"><span class="visually-hidden">Theme</span>
    <select class="field" id="theme" value=${theme} onChange=${(event) => setTheme(event.target.value)}>
      ${Object.entries(THEMES).map(([value, name]) => html`<option value=${value}>${name}</option>`)}
    </select></label>`;
}

/** Shown while the server does not answer, or requires an API key. */
function ServerNotice() {
  useChanges("server");
  const { ready, connecting, keyNeeded } = state.server;
  if (ready || connecting) return null;
  if (!keyNeeded) {
    return html`<p class="notice bad" role="alert">The server does not answer. Trying again every second; nothing on this
      page is lost.</p>`;
  }
  const submit = (event) => {
    event.preventDefault();
    api.useKey(event.target.elements.key.value);
    connect().then((ok) => ok && restorePage());
  };
  return html`<form class="notice row" onSubmit=${submit}>
    <label for="key">This server requires an API key.</label>
    <input class="field" id="key" name="key" type="password" autocomplete="off" />
    <button class="button main">Use key</button>
    ${api.key && html`<span class="bad" role="alert">The key was rejected.</span>`}
  </form>`;
}

// -- keyboard shortcuts -----------------------------------------------------------------------

const KEYS = [
  ["Enter", "in the prompt: generate; Shift+Enter inserts a line break"],
  ["Space", "pause or resume; at speed “step by step”: generate one token"],
  [".", "generate one token"],
  ["s", "stop"],
  ["← →", "in the text: previous or next token; ↑ ↓ previous or next line"],
  ["Shift+← →", "in the text: select a span; r rewrites the span, or the selected token"],
  ["Ctrl+Z", "undo; with Shift: redo"],
  [`1 – ${PANELS.length}`, `panels: ${PANELS.map(({ name }) => name).join(", ")}`],
  ["/", "focus the prompt"],
  ["Escape", "leave a field, clear the selection, close the panel"],
  ["?", "this list"],
];

/** Handle shortcuts wherever no field has the focus. Returns the function that stops listening. */
function listenForKeys(showHelp) {
  const onKeyDown = (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) leaveField(event);
    const isUndo = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z";
    if (inField(event.target) || document.querySelector("dialog[open]")) return;
    if (isUndo) (event.shiftKey ? redo : undo)();
    else if (event.ctrlKey || event.metaKey || event.altKey || !handleKey(event, showHelp)) return;
    event.preventDefault();
  };
  document.addEventListener("keydown", onKeyDown);
  return () => document.removeEventListener("keydown", onKeyDown);
}

/** Move the focus out of a field, so that shortcuts work again. */
function leaveField({ target }) {
  if (target.closest(".composer, .reply")) document.getElementById("text")?.focus({ preventScroll: true });
  else if (inField(target) && target.closest(".side")) closeSheet();
}

const inField = (target) => target.closest?.("input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable]");

/** Run the shortcut of a key; false if it has none here. */
function handleKey(event, showHelp) {
  const onControl = event.target.closest?.("button, a, summary, input, [role=treeitem], [role=gridcell], [role=option]");
  const { showsText = false } = VIEWS.find(({ name }) => name === state.view);
  const panel = PANELS[event.key - 1];
  if (event.key === "?") showHelp();
  else if (event.key === "Escape" && showsText) return clearSelection();
  else if (state.view !== "write") return false;
  else if (event.key === " " && !onControl) {
    if (state.writing) pauseWriting();
    else if (state.speed === 0) writeOneToken();
    else resumeWriting();
  } else if (event.key === ".") writeOneToken();
  else if (event.key === "s") stopWriting();
  else if (event.key === "r") rewriteSelection();
  else if (event.key === "/") document.getElementById("prompt")?.focus();
  else if (panel && !onControl?.matches("input")) showPanel(panel.name);
  else return false;
  return true;
}

/** Request alternatives for the selected span, or else for the selected token. */
function rewriteSelection() {
  const branch = currentBranch();
  if (!branch || state.writing) return;
  if (state.span === null && state.selected !== null) selectSpan(branch, state.selected, state.selected + 1);
  if (state.span === null) return;
  state.span = { ...state.span, isRequested: true };
  changed("span");
}

/** Clear the span, or the selected token with its panel; false if there is neither. */
function clearSelection() {
  if (clearSpan()) return true;
  if (state.selected === null && !state.sheet) return false;
  selectToken(null);
  closeSheet();
  return true;
}

function KeysDialog({ close }) {
  const dialog = useRef();
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} class="dialog" aria-labelledby="keys-title" onClose=${close}>
    <h2 id="keys-title">Keyboard shortcuts</h2>
    <table class="keys"><tbody>${KEYS.map(([key, what]) => html`<tr><th scope="row"><kbd>${key}</kbd></th><td>${what}</td></tr>`)}</tbody></table>
    <form method="dialog"><button class="button">Close</button></form>
  </dialog>`;
}

// -- what survives a reload of the tab ----------------------------------------------------------

const STORAGE_KEY = "unspool.session";
const SAVED_FIELDS = ["mode", "draft", "system", "settings", "current", "tint", "speed", "panel", "view"];

/** Save the branches of this tab and its state in the session storage, whenever they change. */
function saveTabOnChanges() {
  let timer = 0;
  const saveNow = () => {
    const branches = [...state.branches.values()].filter((branch) => !branch.recorded);
    const saved = Object.fromEntries(SAVED_FIELDS.map((name) => [name, state[name]]));
    saved.branches = branches.map(({ id, runs }) => [id, runs]);
    try {
      sessionStorage.setItem(STORAGE_KEY, JSON.stringify(saved));
    } catch {
      /* no storage: a reload starts with an empty page */
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

/** Restore what was saved; false if nothing was. */
async function restoreTab() {
  let saved = null;
  try {
    saved = JSON.parse(sessionStorage.getItem(STORAGE_KEY));
  } catch {
    /* not readable */
  }
  if (!saved || state.branches.size) return Boolean(saved);
  const { branches = [], current } = saved;
  for (const name of SAVED_FIELDS) if (name in saved && name !== "current") state[name] = saved[name];
  if (!VIEWS.some(({ name }) => name === state.view)) state.view = "write";
  changed(...SAVED_FIELDS, "branches");
  if (!branches.length) return true;
  const { data } = await api.get("/v1/tree").catch(() => ({ data: [] }));
  const onServer = new Map(data.map((branch) => [branch.id, branch]));
  for (const [id, runs] of branches) {
    if (onServer.has(id)) adopt(onServer.get(id)).runs = runs;
  }
  if (state.branches.has(current)) {
    await ensureSteps(current).catch(() => {});
    await jump(current);
  }
  return true;
}

async function restorePage() {
  const isRestored = await restoreTab();
  const query = new URLSearchParams(location.search);
  const requested = VIEWS.find((view) => query.has(view.query));
  if (!isRestored && requested) openView(requested.name);
  await restoreModel();
}

saveTabOnChanges();
render(html`<${App} />`, document.getElementById("app"));
if (await connect()) await restorePage();
