// Two texts: one grows at its end, a token a pass; the other is filled where the model is sure.

import { duration, html, nats, percent, plural } from "../lib.js";
import { state } from "../state.js";
import { openInWrite } from "../compare/popover.js";
import { TokenText } from "../compare/text.js";
import { meanSurprise, repeatedFours } from "../measures.js";
import { Board, boardSize } from "./board.js";
import { Canvas } from "./canvas.js";
import { PlacePanel } from "./place.js";
import { causalNow, maskedNow, passNow, shownNow, twins } from "./runs.js";

export function Written() {
  const { left } = twins;
  const branch = state.branches.get(left.id);
  const steps = branch?.steps ?? [];
  const shown = steps.slice(0, Math.min(shownNow(), steps.length));
  const size = boardSize(branch?.prompt?.text ?? "");
  return html`<section class="panel stack" aria-label="Left to right">
    <h3>Left to right <${Verdict} solved=${left.solved} /></h3>
    ${left.fault && html`<p class="fault" role="alert">${left.fault.message}</p>`}
    ${!branch ? html`<p class="quiet">${causalNow() ? "Nothing is written yet." : "No causal model is in memory."}</p>`
      : size ? html`<${Board} size=${size} puzzle=${branch.prompt.text} cells=${shown.map(({ text }, at) => ({ number: -1 - at, token: 0, text,
          change: at === shown.length - 1 ? "set" : null }))} />`
        : html`<${TokenText} steps=${shown} label="Written left to right" writing=${left.writing}
          pick=${(at) => openInWrite(left.id, at)} />`}
    ${branch && html`<${Numbers} passes=${steps.length} tokens=${steps.length} seconds=${left.seconds} steps=${steps} />
      <button class="button" disabled=${!steps.length || left.writing} onClick=${() => openInWrite(left.id)}>Open in Write</button>`}
  </section>`;
}

const ENDS = { stop: "It ended by itself", length: "All places are full", interrupted: "Stopped", context: "The context is full" };

export function Filled() {
  const { right } = twins;
  const { start, passes, done, judged } = right;
  const runs = passes.filter(({ kind }) => kind !== "hand");
  const seconds = runs.reduce((sum, pass) => sum + pass.seconds, 0);
  const tokens = done?.tokens.length ?? passes.at(-1)?.tokens.filter((token) => token !== null).length ?? 0;
  const steps = state.branches.get(judged)?.steps ?? null;
  return html`<section class="panel stack" aria-label="In any order">
    <h3>In any order <${Verdict} solved=${right.solved} /></h3>
    ${right.fault && html`<p class="fault" role="alert">${right.fault.message}</p>`}
    ${!start ? html`<p class="quiet" role="status">${right.writing ? "The first pass is on its way …"
      : maskedNow() ? "Nothing is filled in yet." : "This needs a model with a mask token."}</p>`
      : html`<${Canvas} /><${Happened} /><${PlacePanel} />
        <${Numbers} passes=${runs.length} tokens=${tokens} seconds=${seconds} steps=${steps} />
        ${done && html`<p class="quiet small">${ENDS[done.finish_reason] ?? done.finish_reason}. ${done.notes.join(" ")}</p>`}
        ${judged && html`<button class="button" onClick=${() => openInWrite(judged)}>Open in Write</button>`}`}
  </section>`;
}

/** What the judge of a puzzle says of the whole answer. */
function Verdict({ solved }) {
  return solved !== null && html`<span class=${`twins-verdict ${solved ? "right" : "wrong"}`} role="status">${solved ? "Solved" : "Not solved"}</span>`;
}

const WAYS = { text: "The text before guessed the first place", look: "One more look at what was set at once", hand: "By hand" };

/** What the pass that is shown did. */
function Happened() {
  const pass = twins.right.passes[passNow() - 1];
  if (!pass) return html`<p class="small quiet" role="status">All places are masked, but for what was given.</p>`;
  const back = pass.taken_back ? `, ${pass.taken_back} taken back` : "";
  const masked = pass.tokens.filter((token) => token === null).length;
  const did = pass.kind === "hand" ? plural(pass.places.length, "place") : `${plural(pass.set, "place")} set${back}`;
  return html`<p class="small" role="status">${WAYS[pass.kind] ? `${WAYS[pass.kind]}: ` : ""}${did}; ${masked} still masked.</p>`;
}

function Numbers({ passes, tokens, seconds, steps }) {
  return html`<dl class="cmp-numbers">
    <dt title="Runs of the model">Passes</dt><dd data-number="passes">${passes}</dd>
    <dt>Tokens</dt><dd data-number="tokens">${tokens}</dd>
    <dt>Tokens a pass</dt><dd data-number="rate">${passes ? (tokens / passes).toFixed(2) : "–"}</dd>
    <dt>Time</dt><dd data-number="time">${duration(seconds)}</dd>
    <dt title="How unlikely the causal model holds each token, on average">Surprise, by the causal model</dt>
    <dd data-number="surprise">${nats(steps?.length ? meanSurprise(steps) : null)} nats</dd>
    <dt title="Share of runs of four tokens that had been there before">Repeated 4-grams</dt>
    <dd data-number="repeated">${percent(steps ? repeatedFours(steps) : null)}</dd>
  </dl>`;
}
