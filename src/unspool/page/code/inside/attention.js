// Where the token that is read looks: the weights as arcs over the text, as a list, and all heads as a map.

import { Piece, html, percent, spelled, useChanges, useMemo } from "../lib.js";
import { strongest, useArcs } from "./arcs.js";
import { choice, choose, chosenIn } from "./choice.js";
import { HeadMap } from "./heads.js";
import { Missing, useLook } from "./looks.js";
import { attends } from "./states.js";

const A_SINK = 0.3; // from here on it is worth a word

export function Attention({ place, look }) {
  useChanges("inside");
  const { layer, head } = chosenIn(look);
  // One layer's heads come only when one of them is wanted: all of them would be megabytes in a long text.
  const heads = useLook(place, head === null ? null : `include=attention&heads=true&layer=${layer}`);
  const told = head === null ? look : heads.answer;
  // The last answer stays until the next one is there: it may be about another token or layer.
  const fits = told?.position === look.position && (head === null || told.attention.layers[0] === layer);
  const row = useMemo(() => (fits ? rowOf(told, layer, head) : null), [told, fits, layer, head]);
  const withoutFirst = choice.withoutFirst && look.position > 0;
  const shown = useMemo(() => (row && withoutFirst ? rescaled(row) : row), [row, withoutFirst]);
  useArcs(look.position, shown);
  const reader = html`<${Piece} text=${look.token.text} />`;
  return html`
    <p class="quiet small">Attention brings in what earlier tokens hold, more from some than from others: the arcs over
      the text, for ${reader}. What stands behind it is masked: while it is read, those tokens are not there yet.</p>
    <div class="row">
      <${Choice} name="Layer" value=${layer} most=${look.layers} all="all, averaged"
        pick=${(to) => choose({ layer: to, head: to === null ? null : head })} />
      <${Choice} name="Head" value=${head} most=${look.heads} all="all, averaged" disabled=${layer === null}
        pick=${(to) => choose({ head: to })} />
    </div>
    ${layer !== null && !attends(look, layer) ? html`<p class="quiet small">Layer ${layer} has no attention.</p>`
      : shown ? html`<${Targets} row=${shown} tokens=${look.tokens} />` : html`<${Missing} ...${heads} />`}
    ${look.position > 0 && html`<${First} look=${look} row=${row} />`}
    <${HeadMap} look=${look} />`;
}

function rowOf({ attention }, layer, head) {
  if (head !== null) return attention.by_head[0][head - 1];
  return layer === null ? attention.mean : attention.by_layer[layer - 1];
}

/** The first token left out, and the rest made to sum to one again. */
function rescaled(row) {
  const rest = row.reduce((sum, weight, at) => (at ? sum + weight : 0), 0);
  return row.map((weight, at) => (at && rest > 0 ? weight / rest : 0));
}

function Choice({ name, value, most, all, disabled = false, pick }) {
  return html`<label class="small">${name}${" "}
    <select class="field inside-choice" value=${value ?? ""} disabled=${disabled}
      onChange=${(event) => pick(event.target.value === "" ? null : Number(event.target.value))}>
      <option value="">${all}</option>
      ${Array.from({ length: most }, (_, at) => html`<option value=${at + 1}>${at + 1}</option>`)}
    </select></label>`;
}

function Targets({ row, tokens }) {
  const best = strongest(row, 5);
  if (!best.length) return html`<p class="quiet small">It looks nowhere else.</p>`;
  return html`<ol class="inside-targets" aria-label="What it looks at most">
    ${best.map(({ at, weight }) => html`<li data-at=${at} data-weight=${weight}>
      <${Piece} text=${tokens[at].text} />
      <span class="track"><span style=${{ width: `${100 * weight}%` }}></span></span>
      <span class="mono small">${percent(weight)}</span>
    </li>`)}
  </ol>`;
}

function First({ look, row }) {
  const weight = row?.[0] ?? 0;
  return html`<div class="small">
    ${weight >= A_SINK && html`<p data-sink="true">${percent(weight)} goes to the first token,${" "}
      ${spelled(look.tokens[0].text)}. Many heads rest there when they find nothing they need: an attention sink.</p>`}
    <label><input type="checkbox" checked=${choice.withoutFirst}
      onChange=${(event) => choose({ withoutFirst: event.target.checked })} /> Without the first token</label>
    ${choice.withoutFirst && html`<span class="quiet"> (the rest is scaled to 100 %)</span>`}
  </div>`;
}
