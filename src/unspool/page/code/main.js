// The shell: header, the views, what is wrong said in place, and the keys.

import { Fold, html, kept, render, useChanges, useEffect, useState } from "./lib.js";
import { api } from "./api.js";
import { changed, on, state } from "./state.js";
import { connect, open } from "./actions.js";
import { onKey, KeysDialog } from "./keys.js";
import { Lazy } from "./lazy.js";
import { shortName } from "./models/name.js";
import { restoreModel } from "./models/picking.js";
import { listenForFiles } from "./share/drop.js";
import { keepSession, restoreSession } from "./session.js";
import { WriteView } from "./write/view.js";

const VIEWS = { write: "Write", tokens: "Tokens", compare: "Compare", learn: "Learn", twins: "Twins", think: "Think", measure: "Measure" };

function App() {
  useChanges("view");
  const [shares, setShares] = useState(false);
  const [asksKeys, setAsksKeys] = useState(false);
  const [picks, setPicks] = useState(false);
  useEffect(() => onKey({ help: () => setAsksKeys(true) }), []);
  useEffect(() => listenForFiles(() => setShares(true)), []);
  return html`
    <a class="skip" href="#view">To the text</a>
    <${Header} share=${() => setShares(true)} keys=${() => setAsksKeys(true)} models=${() => setPicks(true)} />
    <${ServerState} />
    <main id="view" class=${`view-${state.view}`} tabindex="-1">
      ${state.view === "write" && html`<${WriteView} />`}
      ${state.view === "tokens" && html`<${Lazy} file="./tokens/view.js" name="TokensView" />`}
      ${state.view === "compare" && html`<${Lazy} file="./compare/view.js" name="CompareView" />`}
      ${state.view === "twins" && html`<${Lazy} file="./twins/view.js" name="TwinsView" />`}
      ${state.view === "think" && html`<${Lazy} file="./think/view.js" name="ThinkView" />`}
      ${state.view === "measure" && html`<${Lazy} file="./measure/view.js" name="MeasureView" />`}
      ${state.view === "learn" && html`<${Lazy} file="./learn/view.js" name="LearnView" />`}
    </main>
    ${shares && html`<${Lazy} file="./share/dialog.js" name="ShareDialog" open=${shares} close=${() => setShares(false)} />`}
    ${picks && html`<${Lazy} file="./models/dialog.js" name="ModelDialog" close=${() => setPicks(false)} />`}
    <${KeysDialog} open=${asksKeys} close=${() => setAsksKeys(false)} />
    <${Lazy} file="./tour/tour.js" name="Tour" quiet />`;
}

function Header({ share, keys, models }) {
  useChanges("view");
  return html`<${Fold} as="header" class="head" name="Menu">
    <h1><a href="/" aria-label="Unspool"><img src="/page/icon.svg" alt="" width="26" height="26" /> <span>Unspool</span></a></h1>
    <nav class="segments" aria-label="Views">
      ${Object.entries(VIEWS).map(([view, name]) => html`<button aria-pressed=${state.view === view}
        id=${`view-${view}`} onClick=${() => open(view)}>${name}</button>`)}
    </nav>
    <span class="grow"></span>
    <${ModelChoice} pick=${models} />
    <button class="button plain folds" id="share" onClick=${share}>Share</button>
    <button class="button plain folds" id="tour" onClick=${startTour}>Tour</button>
    <button class="button plain folds" id="keys" onClick=${keys} aria-label="Keys" title="Keys (?)">?</button>
    <${ThemeChoice} />
  <//>`;
}

async function startTour() {
  const { startTour: start } = await import("./tour/tour.js");
  start();
}

/** Which model writes; a click shows the others on this machine. */
function ModelChoice({ pick }) {
  useChanges("models");
  const id = state.loading?.id ?? state.model;
  return html`<button class="button plain small model-name folds" id="model" onClick=${pick} aria-haspopup="dialog"
    title="The model that writes; pick another">${id && html`<span class="visually-hidden">Model: </span>`}<span>${
      shortName(id)}</span>${state.loading && html` <span class="quiet">loading …</span>`}</button>`;
}

const THEMES = { system: "As the system", light: "Light", dark: "Dark" };

function ThemeChoice() {
  const [theme, setTheme] = useState(kept.get("theme", "system"));
  useEffect(() => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    kept.set("theme", theme);
    changed("theme", "layout");
  }, [theme]);
  return html`<label class="folds"><span class="visually-hidden">Theme</span>
    <select class="field" id="theme" value=${theme} onChange=${(event) => setTheme(event.target.value)}>
      ${Object.entries(THEMES).map(([value, name]) => html`<option value=${value}>${name}</option>`)}
    </select></label>`;
}

/** Said while the server cannot be used: it is gone, or wants a key. */
function ServerState() {
  useChanges("server");
  const { ready, asking, keyNeeded } = state.server;
  if (ready || asking) return null;
  if (!keyNeeded) {
    return html`<p class="notice bad" role="alert">The server does not answer. This page asks again every second and goes on
      by itself; what you see stays.</p>`;
  }
  const give = (event) => {
    event.preventDefault();
    api.useKey(event.target.elements.key.value);
    connect().then((ok) => ok && restore());
  };
  return html`<form class="notice row" onSubmit=${give}>
    <label for="key">This server wants a key.</label>
    <input class="field" id="key" name="key" type="password" autocomplete="off" />
    <button class="button main">Use it</button>
    ${api.key && html`<span class="bad" role="alert">That key is not right.</span>`}
  </form>`;
}

async function restore() {
  const isKnown = await restoreSession();
  if (!isKnown && new URLSearchParams(location.search).has("run")) open("learn");
  await restoreModel();
}

keepSession(on);
render(html`<${App} />`, document.getElementById("app"));
if (await connect()) await restore();
