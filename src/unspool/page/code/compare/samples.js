// Many samples of one prompt, as a picture of where they part.

import { html, percent, Piece, plural, useChanges, useMemo, useState } from "../lib.js";
import { state, textOf } from "../state.js";
import { WordTree } from "./picture.js";
import { openInWrite } from "./popover.js";
import { change, compare, MOST_SAMPLES } from "./runs.js";
import { Fault, Fields, Preset } from "./settings.js";
import { TokenText } from "./text.js";
import { depthOf, distinct, firstSplit, grow, wordsOf } from "./wordtree.js";

const DEEPEST = 40; // tokens that the picture shows

export function Samples({ pick }) {
  useChanges("compare");
  const [pointed, setPointed] = useState(null); // samples under the pointer, or at the focus
  const { samples } = compare;
  const set = (values) => change({ samples: Object.assign(samples, values) });
  const setSettings = (values) => set({ settings: { ...samples.settings, ...values }, fault: null });
  const branches = samples.ids.map((id) => state.branches.get(id)).filter(Boolean);
  const texts = branches.map((branch) => branch.steps);
  const depth = depthOf(texts, branches.map((branch) => branch.writing), DEEPEST);
  // What has been written stays: the tree is another one only when it grows deeper.
  const tree = useMemo(() => (texts.length ? grow(texts, depth) : null), [samples.root, texts.length, depth]);
  const reading = pointed?.length === 1 ? pointed[0] : samples.shown ?? 0;
  return html`
    <div class="cmp-ask panel">
      <label class="cmp-how-many">
        <span>Samples: <b>${samples.number}</b></span>
        <input type="range" min="2" max=${MOST_SAMPLES} value=${samples.number} aria-label="Number of samples"
          onInput=${(event) => set({ number: Number(event.target.value) })} />
      </label>
      <${Preset} settings=${samples.settings} of="the samples" change=${setSettings} />
      <${Fields} settings=${samples.settings} fault=${samples.fault} of="the samples" change=${setSettings} />
      <${Fault} fault=${samples.fault} />
    </div>
    ${tree && html`
      <p class="cmp-summary" role="status">${samples.writing ? "Writing…" : summary(tree, samples, branches, depth)}</p>
      <p class="quiet small">Thickness is the number of samples. The numbers where they part are the model’s own
        probabilities.</p>
      <${WordTree} tree=${tree} texts=${branches.map(textOf)} stem=${stemOf(branches[0])}
        lit=${pointed ?? (samples.shown === null ? null : [samples.shown])} point=${setPointed}
        choose=${(sample) => set({ shown: sample === samples.shown ? null : sample })} shown=${samples.shown} />
      <${Reading} branch=${branches[reading]} number=${reading} pick=${pick} />
      <${FirstWords} split=${firstSplit(tree, 4)} tree=${tree} number=${branches.length} />
      <details class="cmp-all small"><summary>All samples as text</summary><ol>
        ${branches.map((branch, index) => html`<li key=${branch.id}>${textOf(branch)}
          <button class="button tiny" aria-label=${`Open sample ${index + 1} in Write`}
            onClick=${() => openInWrite(branch.id)}>Open in Write</button></li>`)}
      </ol></details>`}`;
}

/** The end of the prompt, from which all samples go. */
function stemOf(branch) {
  const own = branch?.prompt?.tokens.filter((token) => !token.added) ?? [];
  const words = own.map((token) => token.text).join("").trim().split(/\s+/);
  return words.length > 3 ? `… ${words.slice(-3).join(" ")}` : words.join(" ");
}

/** What is to be seen, in a sentence. */
function summary(tree, samples, branches, depth) {
  const all = `All ${branches.length} samples`;
  if (tree.children.length === 0) {
    const greedy = branches[0].settings.temperature === 0;
    return greedy
      ? `${all} are the same: at temperature 0 the likeliest token is always taken, so nothing is left to chance.`
      : `${all} stay together for these ${plural(depth, "token")}: the model is sure of its way.`;
  }
  const ways = tree.children.length;
  const begin = tree.steps.length
    ? `${all} begin with “${wordsOf(tree.steps)}” and then part ${ways} ways.`
    : `${all} part ${ways} ways at the first token.`;
  return `${begin} ${plural(distinct(tree), "different text")} in all.`;
}

/** One sample, whole: the one that is pointed at, or was clicked. */
function Reading({ branch, number, pick }) {
  return html`<div class="cmp-reading panel" data-sample=${number + 1}>
    <div class="row spread"><h3>Sample ${number + 1}</h3>
      <span class="quiet small grow cmp-hint">Point at another number to read it; click to keep it here.</span>
      <button class="button tiny" onClick=${() => openInWrite(branch.id)}>Open in Write</button></div>
    <${TokenText} key=${branch.id} steps=${branch.steps} label=${`Text of sample ${number + 1}`}
      pick=${(at, element) => pick({ id: branch.id, at, element })} />
  </div>`;
}

function FirstWords({ split, tree, number }) {
  if (!split) return null;
  const behind = tree.steps.length ? html`After “${wordsOf(tree.steps)}”` : "At the first token";
  const most = Math.max(...split.rows.map((row) => Math.max(row.count / number, row.after ?? 0)));
  const width = (share) => ({ width: `${(share / most) * 100}%` });
  return html`<section class="cmp-first" aria-label="Where the samples part first">
    <h3>${behind}</h3>
    <p class="quiet small">The bar is how many of the ${number} samples took a word, the line the chance it had after
      the settings. With more samples they come closer: that is all sampling does.</p>
    <table>
      <thead><tr><th scope="col">Word</th><th scope="col"><span class="visually-hidden">Bar</span></th>
        <th scope="col">Samples</th><th scope="col">After settings</th><th scope="col">Model</th></tr></thead>
      <tbody>${split.rows.map((row) => html`<tr key=${row.token} data-token=${row.token} data-count=${row.count}>
        <th scope="row"><${Piece} text=${row.text} /></th>
        <td aria-hidden="true"><div class="track"><span style=${width(row.count / number)} />
          ${row.after !== null && html`<i style=${{ left: width(row.after).width }} />`}</div></td>
        <td>${row.count} of ${number}</td>
        <td>${percent(row.after)}</td>
        <td>${percent(row.model)}</td>
      </tr>`)}</tbody>
    </table>
  </section>`;
}
