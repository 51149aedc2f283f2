// The shell of the page: header, views, keyboard shortcuts, and what survives a reload of the tab.

import {
  closeSheet, connect, newText, openView, pauseWriting, redo, resumeWriting, selectToken, showPanel, stopWriting,
  toggleLibrary, undo, writeOneToken,
} from "./actions.js";
import { api } from "./api.js";
import { rebuildOnLoss, saveSessionOnChanges } from "./library/sessions.js";
import { html, isNarrow, Lazy, listenForDrops, render, storage, useChanges, useEffect, useRef, useState } from "./lib.js";
import { ModelNotice, restoreModel, shortName } from "./models.js";
import { followAddress, hrefOf, restoreTab, saveTabOnChanges } from "./navigation.js";
import { changed, currentBranch, on, state } from "./state.js";
import { isTab } from "./tab/client.js";
import { missingViews, PANELS, PLACES, viewNamed, viewsOf } from "./views.js";
import { clearSpan, selectSpan } from "./write/edits.js";
import { WriteView } from "./write/view.js";

function App() {
  useChanges("view");
  const [dialog, setDialog] = useState(null); // "share", "keys", "help" or "models"
  const close = () => setDialog(null);
  useEffect(() => listenForKeys(() => setDialog("keys")), []);
  useEffect(() => listenForDrops(() => setDialog("share")), []);
  const view = viewNamed(state.view);
  const views = viewsOf(view.place);
  return html`
    ${view.name === "write" ? html`<a class="skip" href="#prompt" onClick=${focusPrompt}>Skip to the prompt</a>`
      : html`<a class="skip" href="#view">Skip to the content</a>`}
    <${Header} openDialog=${setDialog} place=${view.place} />
    ${isTab ? html`<${Lazy} file="./tab/notice.js" name="TabNotice" />` : html`<${ServerNotice} />`}
    <${ModelNotice} />
    <main id="view" class=${`place-${view.place} view-${view.name}`} tabindex="-1">
      ${(views.length > 1 || missingViews(view.place).length > 0) && html`<${ViewTabs} views=${views} now=${view} />`}
      ${view.name === "write" ? html`<${WriteView} />`
        : html`<${Lazy} key=${view.component} file=${view.file} name=${view.component} ...${view.props} />`}
    </main>
    ${dialog === "share" && html`<${Lazy} file="./share/dialog.js" name="ShareDialog" close=${close} />`}
    ${dialog === "models" && isTab && html`<${Lazy} file="./tab/notice.js" name="TabModelDialog" close=${close} />`}
    ${dialog === "models" && !isTab && html`<${Lazy} file="./model_dialog.js" name="ModelDialog" close=${close} />`}
    ${dialog === "keys" && html`<${KeysDialog} close=${close} />`}
    ${dialog === "help" && html`<${HelpDialog} close=${close} />`}
    <${TourPlace} />`;
}

/** The tour; its code is loaded when it starts. */
function TourPlace() {
  const [isStarted, setStarted] = useState(false);
  useEffect(() => on("tour", () => setStarted(true)), []);
  return isStarted && html`<${Lazy} file="./tour.js" name="Tour" quiet />`;
}

/** A link to a view; a plain click shows it without loading the page again. */
function ViewLink({ view, children, ...attributes }) {
  useChanges("current");
  const open = (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    openView(view);
  };
  return html`<a href=${hrefOf(view)} onClick=${open} ...${attributes}>${children}</a>`;
}

const lastViews = {}; // place -> the view of it that was shown last

function Header({ openDialog, place }) {
  lastViews[place] = state.view;
  return html`<header class="head">
    <h1><a href="./" aria-label="Unspool"><img src=${new URL("../icon.svg", import.meta.url).pathname} alt="" width="26" height="26" /> <span>Unspool</span></a></h1>
    <nav class="places" aria-label="Places">
      ${PLACES.map(({ name, title }) => html`<${ViewLink} key=${name} id=${`place-${name}`} view=${lastViews[name] ?? viewsOf(name)[0].name}
        aria-current=${place === name ? "page" : null}>${title}<//>`)}
    </nav>
    <span class="grow"></span>
    <${ModelChoice} pick=${() => openDialog("models")} />
    <button class="button plain" id="share" onClick=${() => openDialog("share")}>Share</button>
    <${Menu} openDialog=${openDialog} />
  </header>`;
}

/** The views of a place. */
function ViewTabs({ views, now }) {
  const nav = useRef();
  const missing = missingViews(now.place);
  useEffect(() => nav.current.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }), [now.name]);
  return html`<nav class="views" aria-label="Views" ref=${nav}>${views.map(({ name, title }) => html`<${ViewLink} key=${name} view=${name}
    id=${`view-${name}`} aria-current=${name === now.name ? "page" : null}>${title}<//>`)}
    ${missing.length > 0 && html`<span class="quiet small missing">${missing.join(", ")}: with a server</span>`}</nav>`;
}

function focusPrompt(event) {
  event.preventDefault(); // keep the address
  document.getElementById("prompt").focus();
}

async function startTour() {
  (await import("./tour.js")).startTour();
}

/** The name of the model in use; a click lists the others. */
function ModelChoice({ pick }) {
  useChanges("models");
  const id = state.loading?.id ?? state.model;
  return html`<button class="button plain small model-name" id="model" onClick=${pick} aria-haspopup="dialog"
    title="The model in use; click to choose or download another">${id && html`<span class="visually-hidden">Model: </span>`}<span>${
      shortName(id)}</span>${state.loading && html` <span class="quiet">loading …</span>`}</button>`;
}

const THEMES = { system: "System theme", light: "Light theme", dark: "Dark theme" };

function Menu({ openDialog }) {
  const menu = useRef();
  const [theme, setTheme] = useState(storage.get("theme", "system"));
  useEffect(() => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    storage.set("theme", theme);
    changed("theme", "layout");
  }, [theme]);
  const item = (id, title, action) => html`<button class="button plain" id=${id} type="button" onClick=${() => {
    menu.current.hidePopover();
    action();
  }}>${title}</button>`;
  return html`<button class="button plain" id="menu-button" popovertarget="menu" aria-label="Menu" title="Menu">☰</button>
    <div class="panel menu" id="menu" popover ref=${menu}>
      <label><span class="visually-hidden">Theme</span>
        <select class="field" id="theme" value=${theme} onChange=${(event) => setTheme(event.target.value)}>
          ${Object.entries(THEMES).map(([value, name]) => html`<option value=${value}>${name}</option>`)}
        </select></label>
      ${item("keys", "Keyboard shortcuts", () => openDialog("keys"))}
      ${item("tour", "Tour", startTour)}
      ${item("help", "Help", () => openDialog("help"))}
    </div>`;
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
  ["Ctrl+Enter", "in the text: continue from the caret"],
  ["Ctrl+Space", "in the text: suggest continuations at the caret"],
  ["Ctrl+Z", "undo; with Shift: redo"],
  [`1 – ${PANELS.length}`, `panels: ${PANELS.map(({ title }) => title).join(", ")}`],
  ["l", "open or close the library"],
  ["n", "new text"],
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
  if (target.closest(".composer")) {
    const text = document.getElementById("text");
    (text?.offsetParent ? text : document.getElementById("view")).focus({ preventScroll: true }); // an empty text is hidden
  } else if (inField(target) && target.closest(".side")) closeSheet();
}

const inField = (target) => target.closest?.("input:not([type=range]):not([type=checkbox]), textarea, select, [contenteditable]");

/** Run the shortcut of a key; false if it has none here. */
function handleKey(event, showHelp) {
  const onControl = event.target.closest?.("button, a, summary, input, [role=treeitem], [role=gridcell], [role=option]");
  const { showsText = false } = viewNamed(state.view);
  const panel = PANELS[event.key - 1];
  if (event.key === "?") showHelp();
  else if (event.key === "Escape" && showsText) return clearSelection();
  else if (!document.getElementById("text")) return false; // no text to act on
  else if (event.key === " " && !onControl) {
    if (state.writing) pauseWriting();
    else if (state.speed === 0) writeOneToken();
    else resumeWriting();
  } else if (event.key === ".") writeOneToken();
  else if (event.key === "s") stopWriting();
  else if (event.key === "r") rewriteSelection();
  else if (event.key === "/") document.getElementById("prompt")?.focus();
  else if (event.key === "n") newText();
  else if (event.key === "l") toggleLibrary();
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
  if (state.library && isNarrow()) { // it is over the text
    toggleLibrary(false);
    return true;
  }
  if (clearSpan()) return true;
  if (state.selected === null && !state.sheet) return false;
  selectToken(null);
  closeSheet();
  return true;
}

function Dialog({ name, title, close, children }) {
  const dialog = useRef();
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} class="dialog" aria-labelledby=${`${name}-title`} onClose=${close}>
    <h2 id=${`${name}-title`}>${title}</h2>
    ${children}
    <form method="dialog"><button class="button">Close</button></form>
  </dialog>`;
}

const KeysDialog = ({ close }) => html`<${Dialog} name="keys" title="Keyboard shortcuts" close=${close}>
  <table class="keys"><tbody>${KEYS.map(([key, what]) => html`<tr><th scope="row"><kbd>${key}</kbd></th><td>${what}</td></tr>`)}</tbody></table><//>`;

const HelpDialog = ({ close }) => html`<${Dialog} name="help" title="Help" close=${close}>
  <table class="keys"><tbody>${PLACES.map(({ title, about }) => html`<tr><th scope="row"><b>${title}</b></th><td>${about}</td></tr>`)}</tbody></table>
  <p>Point at a token to see the candidates and how one was sampled. Click another candidate to continue from there. Every
    text is kept in the library.</p>
  ${isTab ? html`<p>The model runs in this browser tab: nothing that you write leaves it. Training, search, diffusion and
      steering need a server: <code>pip install unspool</code>, then <code>unspool page</code>.</p>`
    : html`<p>The page uses only the server's HTTP API: <a href="/docs">its reference</a>.</p>`}<//>`;

async function restorePage() {
  await restoreTab();
  await restoreModel();
}

saveTabOnChanges();
saveSessionOnChanges();
rebuildOnLoss();
followAddress();
render(html`<${App} />`, document.getElementById("app"));
if (await connect()) await restorePage();
