// The Write view: prompt and text on the left, the side panel on the right.

import {
  clearFault, connect, pauseWriting, resumeWriting, sendReply, setMode, setSpeed, showPanel, stopWriting,
  writeOneToken, writePrompt,
} from "../actions.js";
import {
  count, Fold, html, Lazy, ModeSegments, render, useChanges, useEffect, useRef, useState, useThrottledChanges,
} from "../lib.js";
import { DefaultModelNote, OtherModelNote } from "../models.js";
import { changed, currentBranch, currentModel, modelOf, promptLength, state } from "../state.js";
import { loadDoubt } from "./edits.js";
import { isHighlighted, mountPane, TINT_SCALES, TINTS } from "./pane.js";
import { SidePanel } from "./side.js";

const EXAMPLE = "Why do leaves change color in fall?";

function Composer() {
  useChanges("mode", "draft", "server", "system");
  const isChat = state.mode === "chat";

  const submit = (event) => {
    event.preventDefault();
    if (!state.draft && isChat) state.draft = EXAMPLE;
    changed("draft");
    writePrompt();
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  const update = (name) => (event) => {
    state[name] = event.target.value;
    changed(name);
  };
  return html`<form class="composer" onSubmit=${submit} aria-label="Prompt">
    ${isChat && state.system !== null && html`<input class="field small" aria-label="System message" id="system"
      placeholder="System message: how the model should behave" value=${state.system} onInput=${update("system")} />`}
    <div class="composer-row">
      <textarea id="prompt" class="field" rows="1" value=${state.draft} dir="auto"
        aria-label=${isChat ? "Your message" : "Text to continue"}
        placeholder=${isChat ? EXAMPLE : "Once upon a time"} onInput=${update("draft")} onKeyDown=${onKey}></textarea>
      <button id="write" class="button main" type="submit" disabled=${!state.server.ready}>Write</button>
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
    ${isChat && html`<button type="button" class="button plain tiny folds" aria-pressed=${state.system !== null}
      title="Set a system message" onClick=${toggleSystem}>System</button>`}`;
}

// -- controls -----------------------------------------------------------------------------------

const SPEEDS = [0, 1, 2, 4, 8, 15, 30, 60, 120, null];

function speedText(speed) {
  if (speed === 0) return "step by step";
  return speed === null ? "full speed" : `${speed} tokens/s`;
}

function Controls() {
  useChanges("writing", "current", "speed", "server");
  const branch = currentBranch();
  const isWriting = state.writing !== null;
  const isPaused = !isWriting && Boolean(branch?.remaining);
  const can = branch !== null && !branch.recorded && state.server.ready;
  const place = SPEEDS.indexOf(state.speed);
  return html`<div class="controls row" role="group" aria-label="Writing">
    ${isWriting
      ? html`<button id="pause" class="button" onClick=${pauseWriting}>Pause</button>`
      : html`<button id="go-on" class="button" disabled=${!can} onClick=${() => resumeWriting()}>
          ${isPaused ? "Resume" : "Continue"}</button>`}
    <button id="one-step" class="button folds" disabled=${!can || isWriting} onClick=${writeOneToken}>Step</button>
    <button id="stop" class="button folds" disabled=${!isWriting && !isPaused} onClick=${stopWriting}>Stop</button>
    <label class="speed small folds" title="One token per key press (Space), a number of tokens a second, or full speed"><span class="visually-hidden">Speed</span>
      <input id="speed" type="range" min="0" max=${SPEEDS.length - 1} step="1" value=${place < 0 ? SPEEDS.length - 1 : place}
        aria-valuetext=${speedText(state.speed)} onInput=${(event) => setSpeed(SPEEDS[event.target.value])} />
      <span class="quiet">${speedText(state.speed)}</span>
    </label>
  </div>`;
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
  const tints = Object.entries(TINTS).filter(([tint]) => doubts || tint !== "doubt");
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

// -- the view -----------------------------------------------------------------------------------

export function WriteView() {
  return html`<div class="write">
    <section class="paper" aria-label="The text">
      <${Composer} />
      <${Fold} class="bar row" name="More controls"><${ModeChoice} /><${Controls} /><${ReadSwitch} /><${TintChoice} doubts /><${ReviseButton} /><//>
      <${OtherModelNote} />
      <${Text} />
      <${Revision} />
      <${Fault} />
      <${Reply} />
      <${Foot} />
    </section>
    <${SidePanel} />
  </div>`;
}

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
  render(html`<${Lazy} file="./write/rewrite.js" name="RewritePopup" quiet />`, place);
  return () => render(null, place);
}

/** Request proposed edits; they are listed below the text and marked in it. */
function ReviseButton() {
  useChanges("current", "writing", "revision", "server", "steps");
  const branch = currentBranch();
  const can = branch?.steps.length > 0 && !branch.recorded && !state.writing && state.server.ready;
  const start = async () => (await import("./rewrite.js")).revise();
  return html`<button id="revise" class="button tiny folds" disabled=${!can || state.revision?.looking} onClick=${start}
    title="Find doubtful words and propose better ones, to accept or reject">Revise</button>`;
}

function Revision() {
  useChanges("revision", "current");
  useChanges("tint", "writing");
  useEffect(loadDoubt, [state.tint, state.current, state.writing]);
  if (!state.revision || state.revision.branch !== state.current) return null;
  return html`<${Lazy} file="./write/rewrite.js" name="RevisionPanel" quiet />`;
}

function Welcome() {
  return html`<div class="welcome quiet">
    <p>A language model generates one token at a time: it gives every token of its vocabulary a probability, one is
      sampled and appended, and the next step follows.</p>
    <p>Enter a prompt above. Then point at any token to see the candidates and how one was sampled; click another
      candidate to continue from there.</p>
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

const ENDS = {
  stop: "Finished: the model generated its end-of-text token.",
  context: "The context window is full. Go back to an earlier token, or start a new text.",
  interrupted: "Paused.",
};

/** Why the text ended, and a field for the user's next words. */
function Reply() {
  useChanges("current", "writing", "steps", "server");
  const [words, setWords] = useState("");
  const branch = currentBranch();
  if (!branch || state.writing || branch.recorded) return null;
  const isChat = Boolean(branch.prompt?.messages);
  const submit = async (event) => {
    event.preventDefault();
    if (words && (await sendReply(words))) setWords("");
    else if (!words) resumeWriting();
  };
  const name = isChat ? "Reply" : "Your text";
  return html`<form class="reply" onSubmit=${submit}>
    <span class="quiet small" id="ending"><${Ending} branch=${branch} /></span>
    <div class="composer-row"><input class="field" id="reply" dir="auto" value=${words} aria-label=${name}
      placeholder=${isChat ? "Reply …" : "Add your own text …"} onInput=${(event) => setWords(event.target.value)} />
    <button class="button" disabled=${!words || !state.server.ready}>${isChat ? "Reply" : "Add"}</button></div>
  </form>`;
}

function Ending({ branch }) {
  if (branch.finish_reason !== "length") return ENDS[branch.finish_reason] ?? "";
  const wrote = branch.steps.filter((step) => !step.chosen).length;
  return html`Stopped at ${count(wrote)} ${wrote === 1 ? "token" : "tokens"} · <button type="button" class="link"
    disabled=${!state.server.ready} onClick=${() => resumeWriting()}>Continue</button>`;
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
