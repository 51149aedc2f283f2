// The view in which a text is written: prompt and text on the left, what is behind it on the right.

import { count, Fold, html, render, useCalmChanges, useChanges, useEffect, useRef, useState } from "../lib.js";
import { branchNow, modelOf, promptLength, state } from "../state.js";
import { clearFault, connect, goOn, say, show } from "../actions.js";
import { Lazy } from "../lazy.js";
import { Composer, ModeChoice } from "./composer.js";
import { Controls, TintChoice } from "./controls.js";
import { loadDoubts } from "./doubt.js";
import { mountPane } from "./pane.js";
import { OtherModel, TinyNote } from "../models/notes.js";
import { Side } from "./side.js";

export function WriteView() {
  return html`<div class="write">
    <section class="paper" aria-label="The text">
      <${Composer} />
      <${Fold} class="bar row" name="More controls"><${ModeChoice} /><${Controls} /><${TintChoice} doubts /><${ReviseButton} /><//>
      <${OtherModel} />
      <${Text} />
      <${Revision} />
      <${Fault} />
      <${Reply} />
      <${Foot} />
    </section>
    <${Side} />
  </div>`;
}

function Text() {
  useChanges("comparing");
  if (state.comparing) return html`<${Lazy} file="./map/sidebyside.js" name="SideBySide" />`;
  return html`<${Pane} />`;
}

/** The current text, each of its tokens open. */
export function Pane() {
  useChanges("current", "writing");
  const box = useRef();
  useEffect(() => mountPane(box.current), []);
  useEffect(() => mountRewrite(box.current), []);
  return html`<div class="text-box" id="text" ref=${box} tabindex="0" role="group" data-branch=${state.current ?? ""}
      aria-label="The text, token by token; arrow keys move from token to token" aria-busy=${state.writing !== null}></div>
    ${state.current === null && html`<${Welcome} />`}`;
}

/** Where the words that are marked are written anew: inside the text, so that it scrolls with it. */
function mountRewrite(box) {
  const place = document.createElement("div");
  box.append(place);
  render(html`<${Lazy} file="./write/rewrite.js" name="Rewrite" quiet />`, place);
  return () => render(null, place);
}

/** Ask what would fit better; the proposals come below the text, and are drawn in it. */
function ReviseButton() {
  useChanges("current", "writing", "revision", "server", "steps");
  const branch = branchNow();
  const can = branch?.steps.length > 0 && !branch.recorded && !state.writing && state.server.ready;
  const start = async () => (await import("./revision.js")).revise();
  return html`<button id="revise" class="button tiny folds" disabled=${!can || state.revision?.looking} onClick=${start}
    title="Doubtful words, and what would fit better: as changes to accept or reject">Revise</button>`;
}

function Revision() {
  useChanges("revision", "current");
  useChanges("tint", "writing");
  useEffect(loadDoubts, [state.tint, state.current, state.writing]);
  if (!state.revision || state.revision.branch !== state.current) return null;
  return html`<${Lazy} file="./write/revision.js" name="RevisionPanel" quiet />`;
}

function Welcome() {
  return html`<div class="welcome quiet">
    <p>A language model writes one token at a time. It weighs every token it knows, one is picked, and round again.</p>
    <p>Ask something above and watch. Then point at any word: what else was weighed, why this one came, and what
      would have come after another.</p>
    <${TinyNote} />
  </div>`;
}

/** What went wrong, where the person looks, and what to do about it. */
function Fault() {
  useChanges("fault", "server");
  const fault = state.fault;
  if (!fault || fault.status === 401) return null;
  const isGone = fault.status === 0;
  return html`<div class="notice bad row" role="alert" id="fault"><span class="grow">${fault.message}</span>
    ${isGone && html`<button class="button tiny" onClick=${connect}>Ask again</button>`}
    ${fault.param && html`<button class="button tiny" onClick=${() => show("settings")}>Settings</button>`}
    <button class="button tiny" onClick=${clearFault}>Close</button></div>`;
}

const ENDS = {
  stop: "The model ended its text here.",
  context: "The context window is full: the model cannot see more than this. Take words back, or begin anew.",
  interrupted: "Paused.",
};

/** The end of the text: why it ended, and the person's own words. */
function Reply() {
  useChanges("current", "writing", "steps", "server");
  const [words, setWords] = useState("");
  const branch = branchNow();
  if (!branch || state.writing || branch.recorded) return null;
  const isChat = Boolean(branch.prompt?.messages);
  const submit = async (event) => {
    event.preventDefault();
    if (words && (await say(words))) setWords("");
    else if (!words) goOn();
  };
  const name = isChat ? "Reply" : "Your own words";
  return html`<form class="reply" onSubmit=${submit}>
    <span class="quiet small" id="ending"><${Ending} branch=${branch} /></span>
    <div class="composer-row"><input class="field" id="reply" dir="auto" value=${words} aria-label=${name}
      placeholder=${isChat ? "Reply …" : "Go on in your own words …"} onInput=${(event) => setWords(event.target.value)} />
    <button class="button" disabled=${!words || !state.server.ready}>${isChat ? "Reply" : "Add"}</button></div>
  </form>`;
}

function Ending({ branch }) {
  if (branch.finish_reason !== "length") return ENDS[branch.finish_reason] ?? "";
  const wrote = branch.steps.filter((step) => !step.chosen).length;
  return html`Stopped at ${count(wrote)} ${wrote === 1 ? "token" : "tokens"} · <button type="button" class="link"
    disabled=${!state.server.ready} onClick=${() => goOn()}>Go on</button>`;
}

function Foot() {
  useCalmChanges("current", "models", "steps");
  const branch = branchNow();
  const total = modelOf(branch)?.unspool?.context;
  if (!branch?.prompt || !total) return null;
  const own = promptLength(branch);
  const added = branch.prompt.tokens.filter((token) => token.added).length;
  const parts = [
    { name: "template", tokens: added, color: "var(--edge)" },
    { name: "prompt", tokens: own - added, color: "var(--d1)" },
    { name: "written", tokens: branch.steps.length, color: "var(--accent)" },
  ];
  return html`<footer class="foot">
    <${Lazy} file="./costs/live.js" name="LiveFigures" quiet />
    <${Lazy} file="./tokens/contextbar.js" name="ContextBar" quiet used=${own + branch.steps.length} total=${total} parts=${parts} />
  </footer>`;
}
