// One token: what it is, what the model weighed, what the filters left, where the draw fell, and what
// other settings would have made of it.

import { count, duration, html, Piece, plural, useChanges, useMemo } from "../lib.js";
import { branchNow, modelOf, promptLength, state, stepAt, tokenAt } from "../state.js";
import { select, show } from "../actions.js";
import { Candidates } from "./candidates.js";
import { Chain } from "./chain.js";
import { Draw, Glance } from "./draw.js";
import { Facts, Story } from "./facts.js";
import { WhatIf } from "./whatif.js";

export function StepPanel() {
  useChanges("selection", "hover", "current", "steps");
  const branch = branchNow();
  const position = state.hovered ?? state.selected;
  const step = position === null ? null : stepAt(branch, position);
  const token = branch && position !== null ? tokenAt(branch, position) : null;
  const isSelected = position === state.selected;
  // While a text streams this is drawn at every frame: what stays the same is kept as it is.
  const shown = useMemo(() => {
    if (step) return html`<${Step} branch=${branch} step=${step} isSelected=${isSelected} />`;
    if (token) return html`<${PromptToken} token=${token} position=${position} />`;
    return html`<${Hint} />`;
  }, [branch, step, token?.id, token?.added, position, isSelected]);
  return html`<div class="step-panel">
    <${PenNote} branch=${branch} />
    ${shown}
  </div>`;
}

function Step({ branch, step, isSelected }) {
  const size = modelOf(branch)?.unspool.vocabulary ?? 0;
  return html`
    <header class="step-head">
      <div class="row">
        <h2 class="step-token"><${Piece} text=${step.piece} /></h2>
        <${InsideButton} position=${step.position} />
      </div>
      <${Story} step=${step} size=${size} />
      <${Glance} step=${step} />
    </header>
    <${Facts} step=${step} size=${size} />
    <${WhatIf} branch=${branch} step=${step} />
    <${Candidates} branch=${branch} step=${step} isSelected=${isSelected} />
    ${step.stages.length > 0 && html`<${Chain} branch=${branch} step=${step} size=${size} />`}
    ${!step.chosen && html`<${Draw} step=${step} />`}
  `;
}

function PromptToken({ token, position }) {
  return html`
    <header class="step-head">
      <div class="row">
        <h2 class="step-token"><${Piece} text=${token.text} /></h2>
        <${InsideButton} position=${position} />
      </div>
      <p class="step-story">${token.added
        ? "The chat template put this token here. It tells the model who is speaking."
        : "You wrote this. It was given to the model, so nothing was weighed or drawn."}</p>
    </header>
    <p class="quiet small">Token ${count(token.id)} at position ${count(position)}.</p>
  `;
}

function InsideButton({ position }) {
  const go = () => {
    select(position);
    show("inside");
  };
  return html`<button class="button step-inside" onClick=${go}>Look inside</button>`;
}

function Hint() {
  return html`<div class="step-hint">
    <p>Point at a written token, or click it.</p>
    <p class="quiet">You will see what else the model weighed, which filters removed what, and how chance
      picked one. Click another candidate, and the text goes on from there.</p>
  </div>`;
}

/** What it cost to write on from a person's own choice. */
function PenNote({ branch }) {
  if (!branch?.byChoice) return null;
  const { last } = branch;
  if (!last) {
    const isWritten = state.writing?.branch === branch.id;
    return isWritten && html`<p class="step-pen small" role="status">Your pen: the text goes on from there …</p>`;
  }
  // Only the first writing after the choice is told here: going on later reuses everything.
  const own = branch.steps.slice(branch.forked_at).findIndex((step) => !step.chosen);
  if (own < 0 || last.tokens_before > promptLength(branch) + branch.forked_at + own) return null;
  const { reused_tokens: reused, tokens_before: before, first_token_seconds: first } = last;
  return html`<p class="step-pen small" role="status">
    Your pen: <b>${plural(reused, "token")} of ${count(before)}</b> kept from before and not computed
    again. First new token after <b>${duration(first)}</b>.
  </p>`;
}
