// The logit lens: what each layer would have said, had it been the last.

import { count, html, ordinal, percent, Piece, useChanges, useMemo, useWidth } from "../lib.js";
import { chosenIn } from "./choice.js";
import { Missing, useLook } from "./looks.js";

const HIGH = 96;
const EDGE = { left: 44, right: 14, top: 8, bottom: 18 };

export function Lens({ place }) {
  useChanges("inside");
  const found = useLook(place, "include=lens&top=3");
  const look = found.answer;
  const layer = look ? chosenIn(look).layer : null;
  return useMemo(() => {
    if (!look) return html`<${Missing} ...${found} />`;
    return html`
      <p class="quiet small">The head is put onto the vector after every layer, as if it were the last one. Row by row
        the answer comes up; ${html`<${Piece} text=${look.lens.text} class="piece followed" />`} is followed.</p>
      <${Ranks} lens=${look.lens} layer=${layer} />
      <${Table} lens=${look.lens} layer=${layer} />`;
  }, [look, found.fault, layer]);
}

/** The followed token's rank as a curve over the layers, on a scale of tens. */
function Ranks({ lens, layer }) {
  const [frame, width] = useWidth();
  const last = lens.layers.length - 1;
  const tens = Math.max(1, Math.ceil(Math.log10(Math.max(...lens.layers.map(({ rank }) => rank + 1)))));
  const x = (at) => EDGE.left + ((width - EDGE.left - EDGE.right) * at) / last;
  const y = (rank) => HIGH - EDGE.bottom - ((HIGH - EDGE.top - EDGE.bottom) * Math.log10(rank + 1)) / tens;
  const spots = lens.layers.map(({ layer: at, rank }) => [x(at), y(rank)]);
  const first = lens.layers.findIndex((_, at) => lens.layers.slice(at).every(({ rank }) => rank === 0));
  const settled = first === -1 ? `It ends ${ordinal(lens.layers[last].rank + 1)}.`
    : `It is 1st from layer ${first} on.`;
  const steps = Array.from({ length: tens + 1 }, (_, at) => 10 ** at).filter((_, at) => tens < 4 || at % 2 === 0);
  return html`<div ref=${frame}>
    <svg class="inside-ranks" width=${width} height=${HIGH} role="img" aria-label=${`Rank of the followed token: ${
      ordinal(lens.layers[0].rank + 1)} before the first layer, ${ordinal(lens.layers[last].rank + 1)} after the last. ${settled}`}>
      ${steps.map((rank) => html`<g>
        <line class="grid" x1=${EDGE.left} x2=${width - EDGE.right} y1=${y(rank - 1)} y2=${y(rank - 1)} />
        <text x=${EDGE.left - 6} y=${y(rank - 1)} dy="0.35em" text-anchor="end">${rank === 1 ? "1st" : count(rank)}</text>
      </g>`)}
      ${layer !== null && html`<line class="inside-here" x1=${x(layer)} x2=${x(layer)} y1=${EDGE.top} y2=${HIGH - EDGE.bottom} />`}
      <path d=${`M${spots.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}`} />
      ${spots.map(([a, b], at) => html`<circle cx=${a} cy=${b} r=${at === last ? 3.5 : 1.8} />`)}
      <text x=${EDGE.left} y=${HIGH - 3}>embedding</text>
      <text x=${width - EDGE.right} y=${HIGH - 3} text-anchor="end">layer ${last}</text>
    </svg>
    <p class="small quiet">Its rank, layer by layer. ${settled}</p>
  </div>`;
}

function Table({ lens, layer }) {
  return html`<div class="inside-scroll" tabindex="0" role="region" aria-label="What each layer would have said, as a table">
    <table class="inside-lens">
      <thead><tr><th scope="col">Layer</th><th scope="col">Would have said</th><th scope="col">Rank</th></tr></thead>
      <tbody>${lens.layers.map((said) => html`<tr data-layer=${said.layer} class=${said.layer === layer ? "here" : ""}>
        <th scope="row" title=${said.layer === 0 ? "the embedding, before the first layer" : null}>${said.layer}</th>
        <td>${said.candidates.map((candidate) => html`<span class=${candidate.token === lens.token ? "said followed" : "said"}
          data-token=${candidate.token} style=${{ "--p": candidate.probability.toFixed(3) }}
          title=${percent(candidate.probability)}><${Piece} text=${candidate.text} />
          <small>${percent(candidate.probability)}</small></span>`)}</td>
        <td class="mono">${count(said.rank + 1)}</td>
      </tr>`)}</tbody>
    </table>
  </div>`;
}
