// What the model weighed, as bars; each one is a way to write on.

import { html, percent, Piece, spelled, useState } from "../lib.js";
import { choose } from "../actions.js";
import { state } from "../state.js";
import { Fault } from "../asking.js";
import { huesOf, removedBy, stageName } from "./stages.js";
import { useTried } from "./tried.js";

/** What was weighed at this place: the step's own candidates, or those of the step it stands instead of. */
function weighedAt(branch, step) {
  if (step.candidates.length) return step;
  const parent = step.index === branch.forked_at ? state.branches.get(branch.parent) : null;
  const before = parent?.steps[step.index];
  return before ? weighedAt(parent, before) : step;
}

export function Candidates({ branch, step, isSelected }) {
  const [longFor, showLong] = useState(null); // of which step more are shown
  const more = longFor === step;
  const weighed = weighedAt(branch, step);
  const isBare = weighed.candidates.length === 0; // a person put it there: the model was not asked
  const { made, fault, again } = useTried(branch, step, {}, more || (isBare && isSelected));
  const told = (more || isBare) && made ? made : weighed;
  const hues = huesOf({ ...weighed, token: step.token }, made?.candidates);
  const rows = more ? told.candidates : told.candidates.slice(0, 12);
  const most = Math.max(...rows.map((one) => Math.max(Math.exp(one.logprob), one.probability ?? 0)), 0.01);
  return html`<section class="step-part" aria-labelledby="step-weighed">
    <h3 id="step-weighed"><i aria-hidden="true">1</i> The model weighs what could come</h3>
    <p class="quiet small">
      ${told.stages.length > 0 && "Pale: what the model itself gave. Strong: what the filters made of it. "}
      ${branch.recorded ? "This text is a recording: to look at, not to write on." : "Click one to write on with it."}
    </p>
    <ol class="step-candidates ${more ? "long" : ""}">
      ${rows.map((one, rank) => html`<${Candidate} key=${one.token} one=${one} rank=${rank} step=${step}
        stages=${told.stages} isFixed=${branch.recorded} most=${most} hue=${hues.get(one.token) ?? "hue-0"} />`)}
    </ol>
    <${Fault} fault=${fault} again=${again} />
    ${!branch.recorded && html`<div class="row step-pens">
      <${OwnWords} step=${step} />
      <button class="button" aria-expanded=${more}
        onClick=${() => showLong(more ? null : step)}>${more ? "Fewer" : "More"}</button>
    </div>`}
  </section>`;
}

function Candidate({ one, rank, step, stages, isFixed, most, hue }) {
  const own = Math.exp(one.logprob ?? -Infinity);
  const isPicked = one.token === step.token;
  const stage = one.probability > 0 ? null : removedBy(one.token, rank, stages);
  const hasAfter = one.probability !== null && stages.length > 0;
  const after = stage ? stageName(stage) : hasAfter ? percent(one.probability) : "";
  const label = `Write on with ${spelled(one.text)}: ${percent(own)} by the model${
    stage ? `, removed by ${stageName(stage)}` : after && `, ${after} after the filters`}${
    isPicked ? ", picked" : ""}`;
  const width = (share) => ({ width: `${(100 * share) / most}%` });
  return html`<li>
    <button class="candidate ${hue} ${isPicked ? "picked" : ""} ${stage ? "removed" : ""}" data-token=${one.token}
      disabled=${isFixed} aria-label=${label} title=${label}
      onClick=${() => choose(step.position, { token: one.token })}>
      <${Piece} text=${one.text} />
      <span class="track"><span class="own" style=${width(own)}></span>${
        hasAfter && html`<span class="after" style=${width(one.probability)}></span>`}</span>
      <span class="number">${percent(own)}</span>
      <span class="number ${stage ? "gone" : "strong"}">${after}</span>
    </button>
  </li>`;
}

function OwnWords({ step }) {
  const [words, setWords] = useState("");
  // A word in the middle of a sentence begins with a space: it belongs to the token.
  const text = /^\s/.test(step.piece) && /^[\p{L}\p{N}]/u.test(words) ? ` ${words}` : words;
  const send = (event) => {
    event.preventDefault();
    if (!words) return;
    setWords("");
    choose(step.position, { text });
  };
  return html`<form class="step-words" onSubmit=${send}>
    <input type="text" aria-label="Your own words at this place" placeholder="or type your own words"
      value=${words} onInput=${(event) => setWords(event.target.value)} autocomplete="off" />
    ${words && html`<span class="quiet small" aria-live="polite">Enter writes <${Piece} text=${text} /></span>`}
  </form>`;
}
