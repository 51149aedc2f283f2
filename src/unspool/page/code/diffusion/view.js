// The Diffusion and Sudoku views: the same prompt generated left to right and by diffusion, side by side and pass by pass.

import { connect } from "../actions.js";
import { api, ApiError } from "../api.js";
import { PromptBar, readPrompt } from "../compare/prompt.js";
import { Board, boardSize, Canvas, PlacePanel } from "./canvas.js";
import {
  causalModels, currentCausal, currentMasked, diffusion, isWriting, maskedModels, mostPasses, notify, otherModels,
  setDiffusion, shownCanvasPass, shownPass, showPass, showPuzzle, stopBoth, writeBoth,
} from "./runs.js";
import { duration, html, nats, percent, plural, useChanges, useEffect } from "../lib.js";
import { shortName } from "../models.js";
import { currentModel, state } from "../state.js";
import { meanSurprisal, openInWrite, repeatedFourGrams, TokenText } from "../token_text.js";
import { TintChoice } from "../write/view.js";

const EMPTY = [30, 40, 48, 54]; // cells

/** Create a Sudoku and solve it with both models of its pair. */
async function newSudoku() {
  if (isWriting()) return;
  setDiffusion({ making: true, fault: null });
  let request = null;
  try {
    const { prompt, places, models } = await api.post("/v1/puzzles", { puzzle: "sudoku", empty: diffusion.empty });
    request = { prompt, max_tokens: places };
    if (diffusion.puzzle) Object.assign(diffusion, { threshold: "0.99", causal: models.causal, masked: models.whole });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    diffusion.fault = { message: error.message };
  } finally {
    diffusion.making = false;
    notify();
  }
  if (diffusion.puzzle) await writeBoth(request);
}

function SudokuChoice() {
  const set = (event) => setDiffusion({ empty: Number(event.target.value) });
  return html`<div class="row twins-row">
    ${isWriting() ? html`<button class="button" type="button" id="run-stop" onClick=${stopBoth}>Stop</button>`
      : html`<button class="button main" type="button" id="sudoku" onClick=${newSudoku}>${diffusion.request ? "Solve another Sudoku" : "Solve a Sudoku"}</button>`}
    <label class="row"><span class="small">Empty cells</span>
      <select class="field" name="empty" value=${diffusion.empty} disabled=${isWriting()} onChange=${set}>
        ${EMPTY.map((count) => html`<option key=${count} value=${count}>${count}</option>`)}</select></label>
  </div>`;
}

// -- the two columns ------------------------------------------------------------------------------------

function CausalColumn() {
  const { causalRun } = diffusion;
  const branch = state.branches.get(causalRun.id);
  const steps = branch?.steps ?? [];
  const visibleSteps = steps.slice(0, Math.min(shownPass(), steps.length));
  const size = boardSize(branch?.prompt?.text ?? "");
  return html`<section class="panel stack" aria-label="Left to right">
    <h3>Left to right <${Verdict} solved=${causalRun.solved} /></h3>
    ${causalRun.fault && html`<p class="fault" role="alert">${causalRun.fault.message}</p>`}
    ${!branch ? html`<p class="quiet">${currentCausal() ? "Nothing generated yet." : "No causal model is loaded."}</p>`
      : size ? html`<${Board} size=${size} puzzle=${branch.prompt.text} cells=${visibleSteps.map(({ text }, at) => ({ number: -1 - at, token: 0, text,
          change: at === visibleSteps.length - 1 ? "set" : null }))} />`
        : html`<${TokenText} steps=${visibleSteps} label="Generated left to right" writing=${causalRun.writing}
          pick=${(at) => openInWrite(causalRun.id, at)} />`}
    ${branch && html`<${Numbers} passes=${steps.length} tokens=${steps.length} seconds=${causalRun.seconds} steps=${steps} />
      <button class="button" disabled=${!steps.length || causalRun.writing} onClick=${() => openInWrite(causalRun.id)}>Open in Write</button>`}
  </section>`;
}

const ENDS = { stop: "End of text", length: "All places are set", interrupted: "Stopped", context: "The context is full" };

function DiffusionColumn() {
  const { canvasRun } = diffusion;
  const { start, passes, done, judged } = canvasRun;
  const runs = passes.filter(({ kind }) => kind !== "hand");
  const seconds = runs.reduce((sum, pass) => sum + pass.seconds, 0);
  const tokens = done?.tokens.length ?? passes.at(-1)?.tokens.filter((token) => token !== null).length ?? 0;
  const steps = state.branches.get(judged)?.steps ?? null;
  return html`<section class="panel stack" aria-label="In any order">
    <h3>In any order <${Verdict} solved=${canvasRun.solved} /></h3>
    ${canvasRun.fault && html`<p class="fault" role="alert">${canvasRun.fault.message}</p>`}
    ${!start ? html`<p class="quiet" role="status">${canvasRun.writing ? "Running the first pass …"
      : currentMasked() ? "Nothing generated yet." : "This needs a model with a mask token."}</p>`
      : html`<${Canvas} /><${PassSummary} /><${PlacePanel} />
        <${Numbers} passes=${runs.length} tokens=${tokens} seconds=${seconds} steps=${steps} />
        ${done && html`<p class="quiet small">${ENDS[done.finish_reason] ?? done.finish_reason}. ${done.notes.join(" ")}</p>`}
        ${judged && html`<button class="button" onClick=${() => openInWrite(judged)}>Open in Write</button>`}`}
  </section>`;
}

/** Whether the answer solves the puzzle. */
function Verdict({ solved }) {
  return solved !== null && html`<span class=${`twins-verdict ${solved ? "right" : "wrong"}`} role="status">${solved ? "Solved" : "Not solved"}</span>`;
}

const PASS_KINDS = { text: "First place predicted from the text before", look: "Check of the tokens just set", hand: "Edited" };

/** What the shown pass did. */
function PassSummary() {
  const pass = diffusion.canvasRun.passes[shownCanvasPass() - 1];
  if (!pass) return html`<p class="small quiet" role="status">All places are masked, except given ones.</p>`;
  const back = pass.taken_back ? `, ${pass.taken_back} remasked` : "";
  const masked = pass.tokens.filter((token) => token === null).length;
  const did = pass.kind === "hand" ? plural(pass.places.length, "place") : `${plural(pass.set, "place")} set${back}`;
  return html`<p class="small" role="status">${PASS_KINDS[pass.kind] ? `${PASS_KINDS[pass.kind]}: ` : ""}${did}; ${masked} still masked.</p>`;
}

function Numbers({ passes, tokens, seconds, steps }) {
  return html`<dl class="cmp-numbers">
    <dt title="Forward passes of the model">Passes</dt><dd data-number="passes">${passes}</dd>
    <dt>Tokens</dt><dd data-number="tokens">${tokens}</dd>
    <dt>Tokens per pass</dt><dd data-number="rate">${passes ? (tokens / passes).toFixed(2) : "–"}</dd>
    <dt>Time</dt><dd data-number="time">${duration(seconds)}</dd>
    <dt title="Mean of −ln(probability) by the causal model">Surprisal by the causal model</dt>
    <dd data-number="surprise">${nats(steps?.length ? meanSurprisal(steps) : null)} nats</dd>
    <dt title="Share of 4-grams that occurred before">Repeated 4-grams</dt>
    <dd data-number="repeated">${percent(steps ? repeatedFourGrams(steps) : null)}</dd>
  </dl>`;
}

// -- the view -------------------------------------------------------------------------------------------

const ORDERS = {
  threshold: "all above a threshold", factor: "as many as are likely together", entropy: "lowest entropy first",
  margin: "largest margin first", fixed: "most likely first", left: "left to right", random: "random order",
};

export function DiffusionView() {
  useDiffusion(null);
  const model = maskedModels().find(({ id }) => id === currentMasked()) ?? currentModel();
  const canChat = model?.unspool.chat !== false;
  return html`<section class="twins stack" aria-label="Diffusion">
    <h2 class="visually-hidden">Diffusion</h2>
    <${PromptBar} running=${isWriting()} start=${() => writeBoth(readPrompt(canChat))} stop=${stopBoth}
      canStart=${Boolean(currentCausal() || currentMasked())} canChat=${canChat} />
    <p class="quiet small">A causal model generates one token per pass and never changes one. A diffusion model predicts all masked
      places in each denoising pass and keeps the most certain ones. Both run here, one after the other.</p>
    ${!currentMasked() && html`<${NoMaskedModel} />`}
    <${Settings} />
    <${TintChoice} />
    <${Results} />
  </section>`;
}

export function SudokuView() {
  useDiffusion("sudoku");
  return html`<section class="twins stack" aria-label="Sudoku">
    <h2>Sudoku, left to right and in any order</h2>
    <p class="quiet">A model that writes from left to right cannot go back: its first wrong digit stays. A diffusion model fills the
      certain cells first. Both are small models shipped with Unspool, and differ only in their attention mask.</p>
    <${SudokuChoice} />
    <details><summary>Settings</summary><${Settings} /></details>
    ${diffusion.fault && html`<p class="fault" role="alert">${diffusion.fault.message}</p>`}
    ${diffusion.request && html`<${Results} />`}
  </section>`;
}

function useDiffusion(puzzle) {
  useChanges("diffusion", "models", "branches");
  showPuzzle(puzzle);
  useEffect(() => { connect(); }, []);
}

const Results = () => html`<${Passes} />
  <div class="twins-columns">
    <${CausalColumn} />
    <${DiffusionColumn} />
  </div>`;

/** Shown if no loaded model has a mask token: how to get one. */
function NoMaskedModel() {
  return html`<div class="notice twins-none" role="note">
    <p>No loaded model has a mask token. See Sudoku in Explain for the models shipped with Unspool,${
      otherModels().length > 0 ? " choose a diffusion model below," : ""} or convert a causal model:</p>
    <p><code>unspool train twin --kind block --model ${shortName(currentModel()?.id) || "MODEL"}</code></p>
    <p class="quiet small">Then start the page with it: <code>unspool page -m FOLDER</code>. LLaDA, Dream and SDAR work too.</p></div>`;
}

function Settings() {
  const { fault } = diffusion;
  const set = (event) => setDiffusion({ [event.target.name]: event.target.value, fault: null });
  const invalid = (name) => (fault?.param === name ? "true" : null);
  const number = (name, title, help) => html`<label class="twins-number" title=${help}><span class="small">${title}</span>
    <input class="field" name=${name} inputmode="decimal" autocomplete="off" value=${diffusion[name]} aria-invalid=${invalid(name)} onInput=${set} /></label>`;
  return html`<div class="twins-asking" role="group" aria-label="Settings of both">
    <div class="row twins-row">
      <${ModelPick} name="causal" title="Causal model" models=${causalModels()} now=${currentCausal()} />
      <${ModelPick} name="masked" title="Diffusion model" models=${maskedModels()} now=${currentMasked()} unloaded=${otherModels()} />
      <label><span class="small">Unmasking order</span>
        <select class="field" name="order" value=${diffusion.order} onChange=${set}>
          ${Object.entries(ORDERS).map(([order, title]) => html`<option value=${order}>${title}</option>`)}</select></label>
      ${diffusion.order === "threshold" && number("threshold", "Threshold", "Minimum probability of a token to be set")}
      ${number("remask", "Remask below", "Clear tokens whose probability falls below this. Empty: off")}
    </div>
    ${fault && !diffusion.puzzle && html`<p class="fault" role="alert">${fault.message}</p>`}
  </div>`;
}

function ModelPick({ name, title, models, now, unloaded = [] }) {
  const set = (event) => setDiffusion({ [name]: event.target.value || null });
  return html`<label><span class="small">${title}</span>
    <select class="field twins-model" name=${name} value=${now ?? ""} onChange=${set} disabled=${isWriting()}>
      ${!now && html`<option value="">none loaded</option>`}
      ${now && ![...models, ...unloaded].some(({ id }) => id === now) && html`<option value=${now}>${shortName(now)}</option>`}
      ${models.map(({ id }) => html`<option key=${id} value=${id}>${shortName(id)}</option>`)}
      ${unloaded.length > 0 && html`<optgroup label="Not loaded yet">${unloaded.map(({ id }) => html`<option key=${id} value=${id}>${
        shortName(id)}</option>`)}</optgroup>`}
    </select></label>`;
}

/** Slider through the passes of both. */
function Passes() {
  const most = mostPasses();
  if (!most) return null;
  const passes = shownPass();
  return html`<label class="twins-passes"><span>After ${plural(passes, "pass", "passes")}</span>
    <input type="range" id="twins-pass" min="0" max=${most} step="1" value=${passes} aria-valuetext=${`after ${plural(passes, "pass", "passes")} of ${most}`}
      onInput=${(event) => showPass(Number(event.target.value))} /></label>`;
}
