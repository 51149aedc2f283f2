// The loop meter, and what the guard has taken back.

import { Piece, html, percent, plural } from "../lib.js";
import { goOn, select, useSettings } from "../actions.js";
import { promptLength, state } from "../state.js";
import { WINDOW } from "./loops.js";
import { Switch } from "./parts.js";
import { tallyOf } from "./tally.js";

const SHOWN = 12; // repairs listed at once, the last ones
const SOME = 0.25, MUCH = 0.6; // from where on the gauge warns

export function Repeats({ branch }) {
  const { loops } = tallyOf(branch);
  const share = loops.share();
  const level = share >= MUCH ? "much" : share >= SOME ? "some" : "little";
  return html`<section class="cost" aria-labelledby="cost-loops">
    <h3 id="cost-loops">Loops</h3>
    <div class="loop-meter ${level}">
      <div class="loop-gauge" role="meter" aria-label="Loop meter" aria-valuemin="0" aria-valuemax="100"
        aria-valuenow=${Math.round(share * 100)} aria-valuetext="${Math.round(share * 100)} % of the last tokens repeat">
        <span style=${{ width: `${share * 100}%` }}></span></div>
      <b data-figure="loops">${percent(share)}</b>
    </div>
    <${Cells} loops=${loops} />
    <p>${told(branch, loops, share)}</p>
    <p class="quiet small">Of the last ${WINDOW} tokens, those count that have stood before together with the three in
      front of them.</p>
    <div class="row">
      <${Switch} setting="guard" on="loop" off=${null} usual=${null}>Guard against loops<//>
      <button class="button" disabled=${state.writing !== null || branch.recorded} onClick=${goOnGuarded}>
        Write on with the guard</button>
    </div>
    <${Repairs} branch=${branch} />
  </section>`;
}

function goOnGuarded() {
  useSettings({ guard: "loop" });
  return goOn();
}

/** The last tokens side by side; those that repeat are filled. */
function Cells({ loops }) {
  const from = Math.max(0, loops.repeats.length - WINDOW);
  let fresh = "", again = "";
  loops.repeats.slice(from).forEach((repeats, i) => {
    const cell = `M${i * 5} 0h4v10h-4z`;
    if (repeats) again += cell;
    else fresh += cell;
  });
  const many = loops.sums.at(-1) - loops.sums[from];
  return html`<svg class="loop-cells" viewBox="0 0 ${WINDOW * 5 - 1} 10" preserveAspectRatio="none" role="img"
    aria-label="Of the last ${plural(loops.repeats.length - from, "token")}, ${many} repeat."><path class="fresh" d=${fresh}/><path
    class="again" d=${again}/></svg>`;
}

function told(branch, loops, share) {
  const { length, distance, times } = loops.tail();
  if (times > 1) {
    const words = branch.steps.slice(-distance).map((step) => step.piece).join("");
    return html`The text is going round: the last ${distance === 1 ? "token" : `${distance} tokens`},${" "}
      <${Piece} text=${shortened(words)} />, came ${times} times in a row.`;
  }
  if (length) return `The last ${length} tokens have stood before in the same order, ${distance} tokens earlier.`;
  if (share >= SOME) return "Much of the end has stood before in the same order.";
  return "The end of the text does not repeat itself.";
}

/** What the guard took back: the words where they are known, and the place in the text. */
function repairsOf(branch) {
  const known = branch.retracted.filter(({ verb }) => verb === "retract");
  const seen = new Set(known.map(({ at }) => at));
  const marked = branch.steps
    .filter((step) => step.retracts > 0 && !seen.has(step.index))
    .map((step) => ({ at: step.index, steps: [], taken: step.retracts }));
  return [...marked, ...known.map(({ at, steps }) => ({ at, steps, taken: steps.length }))];
}

function Repairs({ branch }) {
  const repairs = repairsOf(branch);
  const stopped = branch.finish_reason === "guard" ? branch.notes?.find((note) => note.startsWith("stopped:")) : null;
  if (!repairs.length) {
    return html`<p class="quiet small">When the text goes round, the guard takes the repeated tokens back and
      another way is tried. So far it took nothing back.</p>`;
  }
  const hidden = repairs.length - SHOWN;
  return html`
    <p class="small">${plural(repairs.length, "repair")}${hidden > 0 ? `, of which the last ${SHOWN} are listed` : ""}.
      ${" "}<span class="quiet">They are marked in the text; click one to see what came instead.</span></p>
    <ol class="repairs" start=${Math.max(1, hidden + 1)}>
      ${repairs.slice(-SHOWN).map((repair, k) => html`<li key=${Math.max(0, hidden) + k}><${Repair} branch=${branch} ...${repair} /></li>`)}
    </ol>
    ${stopped && html`<p class="small">The guard gave up: ${stopped.slice("stopped: ".length)}.</p>`}`;
}

function Repair({ branch, at, steps, taken }) {
  const words = steps.map((step) => step.piece).join("");
  return html`<button class="repair" disabled=${at >= branch.steps.length}
    onClick=${() => select(promptLength(branch) + at)}>
    <span class="quiet">token ${at + 1}, ${taken} taken back</span>
    ${words && html`<del>${shortened(words)}</del>`}</button>`;
}

const shortened = (words) => (words.length > 60 ? `${words.slice(0, 40)}…${words.slice(-18)}` : words);
