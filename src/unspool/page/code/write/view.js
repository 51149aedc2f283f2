// The Write view: the library on the left, the text with its toolbar and the composer, and the panel on the right.

import {
  canRedo, canUndo, clearFault, connect, newText, pauseWriting, redo, redoLabel, resumeWriting, sendReply, setMode,
  setSpeed, showPanel, stopWriting, toggleLibrary, undo, undoLabel, writeOneToken, writePrompt,
} from "../actions.js";
import { Fold, html, Lazy, ModeSegments, render, useChanges, useEffect, useRef, useThrottledChanges } from "../lib.js";
import { DefaultModelNote, OtherModelNote } from "../models.js";
import { changed, currentBranch, currentModel, modelOf, promptLength, state } from "../state.js";
import { isTab } from "../tab/client.js";
import { loadDoubt } from "./edits.js";
import { Examples, EXAMPLES, FirstSteps } from "./first.js";
import { isHighlighted, mountPane, TINT_SCALES, TINTS } from "./pane.js";
import { SidePanel } from "./side.js";

export function WriteView() {
  useChanges("library");
  return html`<div class=${`write ${state.library ? "with-library" : ""}`}>
    ${state.library && html`<${Lazy} file="./library/drawer.js" name="Library" />`}
    <section class="paper" aria-label="The text">
      <${Toolbar} />
      <${OtherModelNote} />
      <${Steered} />
      <${Text} />
      <${Revision} />
      <${Fault} />
      <${FirstSteps} />
      <${Composer} />
      <${Foot} />
    </section>
    <${SidePanel} />
  </div>`;
}

/** What changes the model in this text; most texts have nothing. */
function Steered() {
  useChanges("current", "branches");
  return currentBranch()?.settings?.interventions?.length > 0 && html`<${Lazy} file="./steer/chips.js" name="SteerNote" quiet />`;
}

// -- toolbar ------------------------------------------------------------------------------------

function Toolbar() {
  return html`<${Fold} class="bar row" name="More controls">
    <${LibraryButton} />
    <${History} />
    <${ReadSwitch} />
    <${TintChoice} doubts />
    <${Speed} />
    <span class="grow"></span>
    ${!isTab && html`<${ReviseButton} />`}
  <//>`;
}

function LibraryButton() {
  useChanges("library");
  return html`<button type="button" class="button tiny" id="library-button" aria-expanded=${state.library}
    title="All texts: search, open, rename, delete (l)" onClick=${() => toggleLibrary()}>Library</button>`;
}

/** Undo and redo, named after what they change. */
export function History() {
  useChanges("history");
  const button = (verb, icon, can, label, act) => {
    const title = can ? `${verb}: ${label}` : verb;
    return html`<button class="button tiny map-history" type="button" disabled=${!can} title=${title} aria-label=${title} onClick=${act}>${icon}</button>`;
  };
  return html`<div class="row map-undo">
    ${button("Undo", "↶", canUndo(), undoLabel(), undo)}${button("Redo", "↷", canRedo(), redoLabel(), redo)}</div>`;
}

/** What the token colors mean; while attention is shown, its own scale. Doubt is available in the Write view only. */
export function TintChoice({ doubts = false }) {
  useChanges("tint", "light");
  const set = (event) => {
    state.tint = event.target.value;
    changed("tint");
  };
  if (isHighlighted()) {
    return html`<div class="row tint-choice small folds"><span class="scale quiet">Attention: low
      <span class="ramp" aria-hidden="true">${[1, 2, 3, 4, 5, 6, 7, 8, 9].map((n) => html`<i class="t lit"
        style=${{ "--lit": n / 9 }}></i>`)}</span> high</span></div>`;
  }
  const tints = Object.entries(TINTS).filter(([tint]) => (doubts && !isTab) || tint !== "doubt");
  const tint = !doubts && state.tint === "doubt" ? "none" : state.tint;
  const scale = TINT_SCALES[tint];
  return html`<div class="row tint-choice small folds">
    <label>Color by <select id="tint" class="field" value=${tint} onChange=${set}>
      ${tints.map(([value, name]) => html`<option value=${value}>${name}</option>`)}
    </select></label>
    ${scale && html`<span class="scale quiet">${scale[0]}
      <span class="ramp" aria-hidden="true">${[1, 2, 3, 4, 5, 6, 7, 8, 9].map((n) => html`<i class=${`tint-${n}`}></i>`)}</span>
      ${scale[1]}</span>`}
  </div>`;
}

// -- the text -----------------------------------------------------------------------------------

/** Switch between the text rendered and the text token by token. */
export function ReadSwitch() {
  useChanges("reading", "current");
  if (!state.current) return null;
  const set = (reading) => () => {
    state.reading = reading;
    changed("reading");
  };
  return html`<div class="segments folds" role="group" aria-label="Show the text">
    <button type="button" id="read" aria-pressed=${state.reading} onClick=${set(true)} title="Turns with Markdown rendered">Read</button>
    <button type="button" id="tokens" aria-pressed=${!state.reading} onClick=${set(false)} title="Token by token, to edit">Tokens</button></div>`;
}

function Text() {
  useChanges("comparing", "reading", "current");
  if (state.reading && state.current && !state.comparing) return html`<${Lazy} key="reader" file="./write/read.js" name="Reader" />`;
  if (state.comparing) return html`<${Lazy} file="./map/side_by_side.js" name="SideBySide" />`;
  return html`<${Pane} key="pane" /><${Lazy} key="edit-bar" file="./write/edit_bar.js" name="EditBar" quiet />`;
}

/** The current text; every token can be selected. */
export function Pane() {
  useChanges("current", "writing");
  const box = useRef();
  useEffect(() => mountPane(box.current), []);
  useEffect(() => mountRewrite(box.current), []);
  return html`<div class="text-box" id="text" ref=${box} tabindex="0" role="group" data-branch=${state.current ?? ""}
      aria-label="Text; arrow keys move from token to token" aria-busy=${state.writing !== null}></div>
    ${state.current === null && html`<${Welcome} />`}`;
}

/** Mount the popup for the selected span inside the text, so that it scrolls along. */
function mountRewrite(box) {
  const place = document.createElement("div");
  box.append(place);
  render(html`<${SelectedSpan} />`, place);
  return () => render(null, place);
}

function SelectedSpan() {
  useChanges("span", "current");
  return !isTab && state.span && html`<${Lazy} file="./write/rewrite.js" name="RewritePopup" quiet />`;
}

/** Request proposed edits; they are listed below the text and marked in it. */
function ReviseButton() {
  useChanges("current", "writing", "revision", "server", "steps");
  const branch = currentBranch();
  const can = branch?.steps.length > 0 && !branch.recorded && !state.writing && state.server.ready;
  const start = async () => !isTab && (await import("./rewrite.js")).revise();
  return html`<button id="revise" class="button tiny folds" disabled=${!can || state.revision?.looking} onClick=${start}
    title="Find doubtful words and propose better ones, to accept or reject">Revise</button>`;
}

function Revision() {
  useChanges("revision", "current");
  useChanges("tint", "writing");
  useEffect(loadDoubt, [state.tint, state.current, state.writing]);
  if (!state.revision || state.revision.branch !== state.current) return null;
  return !isTab && html`<${Lazy} file="./write/rewrite.js" name="RevisionPanel" quiet />`;
}

function Welcome() {
  return html`<div class="welcome quiet">
    <p>A language model generates one token at a time: it gives every token of its vocabulary a probability, one is
      sampled and appended, and the next step follows.</p>
    <p>Enter a prompt below. Then point at any token to see the candidates and how one was sampled; click another
      candidate to continue from there.</p>
    <${Examples} />
    <${DefaultModelNote} />
  </div>`;
}

/** The last error, with what can be done about it. */
function Fault() {
  useChanges("fault", "server");
  const fault = state.fault;
  if (!fault || fault.status === 401) return null;
  const isGone = fault.status === 0;
  return html`<div class="notice bad row" role="alert" id="fault"><span class="grow">${fault.message}</span>
    ${isGone && html`<button class="button tiny" onClick=${connect}>Try again</button>`}
    ${fault.param && html`<button class="button tiny" onClick=${() => showPanel("settings")}>Settings</button>`}
    <button class="button tiny" onClick=${clearFault}>Close</button></div>`;
}

// -- the composer: a prompt for a new text, or the next words of the current one ------------------

function Composer() {
  useChanges("mode", "draft", "server", "system", "current", "writing");
  const branch = currentBranch();
  const isChat = branch ? Boolean(branch.prompt?.messages) : state.mode === "chat";
  const isReply = branch !== null;
  const label = isReply ? (isChat ? "Reply" : "Your text") : isChat ? "Your message" : "Text to continue";
  const hint = isReply ? (isChat ? "Reply …" : "Add your own text …") : EXAMPLES[isChat ? 0 : 2][0];

  const submit = async (event) => {
    event.preventDefault();
    if (!state.server.ready || branch?.recorded) return;
    if (!isReply) {
      if (!state.draft && isChat) state.draft = hint;
      return writePrompt();
    }
    if (!state.draft) return resumeWriting();
    const words = state.draft;
    state.draft = "";
    changed("draft");
    if (!(await sendReply(words))) {
      state.draft ||= words;
      changed("draft");
    }
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const update = (name) => (event) => {
    state[name] = event.target.value;
    changed(name);
  };
  return html`<form class="composer" onSubmit=${submit} aria-label="Prompt">
    ${isReply && html`<${Ending} branch=${branch} />`}
    ${!isReply && isChat && state.system !== null && html`<textarea class="field small" aria-label="System message" id="system" rows="1" dir="auto"
      placeholder="System message: how the model should behave" value=${state.system} onInput=${update("system")}></textarea>`}
    <div class="composer-row">
      <textarea id="prompt" class="field" rows="1" value=${state.draft} dir="auto" disabled=${branch?.recorded}
        aria-label=${label} placeholder=${branch?.recorded ? "This text is a recording" : hint} onInput=${update("draft")} onKeyDown=${onKey}></textarea>
      <button id="write" class="button main" type="submit"
        disabled=${!state.server.ready || branch?.recorded || (isReply && !state.draft)}>${isReply ? (isChat ? "Reply" : "Add") : "Write"}</button>
    </div>
    <div class="row composer-controls">
      ${isReply ? html`<button id="new" type="button" class="button" title="A new text; this one stays in the library (n)" onClick=${newText}>New</button>
        <${Controls} />` : html`<${ModeChoice} />`}
    </div>
  </form>`;
}

/** Chat template or plain continuation. */
function ModeChoice() {
  useChanges("mode", "models", "system");
  const isChat = state.mode === "chat";
  const canChat = currentModel()?.unspool?.chat ?? true;

  const toggleSystem = () => {
    state.system = state.system === null ? "" : null;
    changed("system");
  };
  return html`<${ModeSegments} mode=${state.mode} pick=${setMode} canChat=${canChat} />
    ${isChat && html`<button type="button" class="button plain tiny" aria-pressed=${state.system !== null}
      title="Set a system message" onClick=${toggleSystem}>System</button>`}`;
}

const ENDS = {
  stop: "Finished: the model generated its end-of-text token.",
  length: "Stopped: max tokens reached.",
  context: "The context window is full. Go back to an earlier token, or start a new text.",
  interrupted: "Paused.",
};

/** Why the text ended. */
function Ending({ branch }) {
  if (state.writing || branch.recorded) return null;
  return html`<p class="quiet small" id="ending" role="status">${ENDS[branch.finish_reason] ?? ""}</p>`;
}

function Controls() {
  useChanges("writing", "current", "server");
  const branch = currentBranch();
  const isWriting = state.writing !== null;
  const isPaused = !isWriting && Boolean(branch?.remaining);
  const can = branch !== null && !branch.recorded && state.server.ready;
  return html`<div class="controls row" role="group" aria-label="Writing">
    ${isWriting
      ? html`<button id="pause" type="button" class="button" onClick=${pauseWriting}>Pause</button>`
      : html`<button id="go-on" type="button" class="button" disabled=${!can} onClick=${() => resumeWriting()}>
          ${isPaused ? "Resume" : "Continue"}</button>`}
    <button id="one-step" type="button" class="button" disabled=${!can || isWriting} onClick=${writeOneToken}>Step</button>
    <button id="stop" type="button" class="button" disabled=${!isWriting && !isPaused} onClick=${stopWriting}>Stop</button>
  </div>`;
}

const SPEEDS = [0, 1, 2, 4, 8, 15, 30, 60, 120, null];

function speedText(speed) {
  if (speed === 0) return "step by step";
  return speed === null ? "full speed" : `${speed} tokens/s`;
}

function Speed() {
  useChanges("speed");
  const place = SPEEDS.indexOf(state.speed);
  return html`<label class="speed small folds" title="One token per key press (Space), a number of tokens a second, or full speed"><span class="visually-hidden">Speed</span>
    <input id="speed" type="range" min="0" max=${SPEEDS.length - 1} step="1" value=${place < 0 ? SPEEDS.length - 1 : place}
      aria-valuetext=${speedText(state.speed)} onInput=${(event) => setSpeed(SPEEDS[event.target.value])} />
    <span class="quiet">${speedText(state.speed)}</span>
  </label>`;
}

function Foot() {
  useThrottledChanges("current", "models", "steps");
  const branch = currentBranch();
  const total = modelOf(branch)?.unspool?.context;
  if (!branch?.prompt || !total) return null;
  const promptTokens = promptLength(branch);
  const added = branch.prompt.tokens.filter((token) => token.added).length;
  const parts = [
    { name: "template", tokens: added, color: "var(--edge)" },
    { name: "prompt", tokens: promptTokens - added, color: "var(--d1)" },
    { name: "generated", tokens: branch.steps.length, color: "var(--accent)" },
  ];
  return html`<footer class="foot">
    <${Lazy} file="./write/footer.js" name="LiveFigures" quiet />
    <${Lazy} file="./write/footer.js" name="ContextBar" quiet used=${promptTokens + branch.steps.length} total=${total} parts=${parts} />
  </footer>`;
}
