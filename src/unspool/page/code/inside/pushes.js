// Attribution: which parts of the model pushed the token's score up, and which held it back.

import { html, Piece, useChanges, useMemo, useWidth } from "../lib.js";
import { rounded, signed } from "./cells.js";
import { choice, choose, chosenIn } from "./choice.js";
import { Missing, useLook } from "./looks.js";

const NAMES = {
  embedding: "embedding", attention: "attention", feed_forward: "feed-forward",
  norm_bias: "bias of the norm", head_bias: "bias of the head",
};
const partName = ({ name, layer }) => (layer === null ? NAMES[name] : `${NAMES[name]} ${layer}`);

export function Pushes({ place, runner }) {
  useChanges("inside");
  const query = { runner: runner && `&against=${runner.id}`, mean: "&against=mean", none: "" }[choice.against];
  const found = useLook(place, query === null ? null : `include=attribution${query}`);
  const look = found.answer;
  const layer = look ? chosenIn(look).layer : null;
  const told = useMemo(
    () => (look ? html`<${Told} told=${look.attribution} layers=${look.layers} layer=${layer} />`
      : html`<${Missing} ...${found} />`),
    [look, found.fault, layer],
  );
  return html`
    <p class="quiet small">A token's score is a sum: each part of the model adds to it or takes from it. This is the
      direct push only; what works through later layers is counted there.</p>
    <label class="small">Against${" "}<select class="field inside-choice" value=${choice.against}
      onChange=${(event) => choose({ against: event.target.value })}>
      <option value="runner">its strongest rival</option>
      <option value="mean">the mean of all tokens</option>
      <option value="none">nothing: its own score</option>
    </select></label>
    ${told}`;
}

function Told({ told, layers, layer }) {
  const sorted = [...told.parts].sort((a, b) => b.value - a.value);
  const list = (parts, title) => html`<div><h4>${title}</h4><ol class="inside-list">
    ${parts.map((part) => html`<li><span>${partName(part)}</span><b class="mono">${signed(part.value)}</b></li>`)}
    ${!parts.length && html`<li class="quiet">none</li>`}</ol></div>`;
  return html`
    <p class="small" data-fact="lead">${lead(told)}</p>
    <${Bars} parts=${told.parts} layers=${layers} layer=${layer} />
    <div class="inside-sides">
      ${list(sorted.slice(0, 4).filter(({ value }) => value > 0), "Pushed most")}
      ${list(sorted.reverse().slice(0, 4).filter(({ value }) => value < 0), "Held back most")}
    </div>`;
}

/** What the parts sum to, and what it means. */
function lead(told) {
  const token = html`<${Piece} text=${told.text} />`;
  const sum = html`<b class="mono">${signed(told.logit)}</b>`;
  if (told.against === null) return html`All parts together give ${token} the logit ${sum}. Only differences between tokens count.`;
  if (told.against === "mean") return html`All parts together lift ${token} ${sum} over the mean logit of all tokens.`;
  const rival = html`<${Piece} text=${told.against_text} />`;
  const times = Math.exp(Math.abs(told.said));
  return html`All parts together put ${token} ${sum} ${told.logit < 0 ? "behind" : "ahead of"} ${rival}: it was
    ${" "}${rounded(times)} times as ${told.said < 0 ? "unlikely" : "likely"} (e to the ${rounded(Math.abs(told.said))}).`;
}

const TOP = 16;
const LEFT = 24;

/** One row for the embedding, one for each layer with attention over feed-forward; zero in the middle. */
function Bars({ parts, layers, layer }) {
  const [frame, width] = useWidth();
  const high = Math.min(18, Math.max(6, 372 / layers));
  const most = Math.max(...parts.map(({ value }) => Math.abs(value)), 1e-9);
  const middle = LEFT + (width - LEFT) / 2;
  const reach = (width - LEFT) / 2 - 2;
  const loose = parts.filter((part) => part.layer === null);
  const rowOf = (part) => (part.layer === null ? (part.name === "embedding" ? 0 : layers + loose.indexOf(part)) : part.layer);
  const rows = layers + loose.length;
  const bar = (part) => {
    const long = Math.max(0.5, (Math.abs(part.value) / most) * reach);
    const down = part.name === "feed_forward" ? 0.5 : 0.08;
    return html`<rect class=${CLASS[part.name] ?? "inside-loose"} x=${part.value < 0 ? middle - long : middle}
      y=${TOP + (rowOf(part) + down) * high} width=${long} height=${high * (part.layer === null ? 0.8 : 0.38)}>
      <title>${partName(part)} ${signed(part.value)}</title></rect>`;
  };
  const every = high >= 13 ? 1 : high >= 9 ? 2 : 5;
  const numbers = Array.from({ length: layers }, (_, at) => at + 1).filter((n) => n === 1 || n % every === 0);
  return html`<div ref=${frame}>
    <p class="small row"><span class="quiet">by</span><b class="inside-attention">attention</b>
      <b class="inside-forward">feed-forward</b><b class="inside-loose">other</b></p>
    <svg class="inside-pushes" width=${width} height=${TOP + rows * high + 2} role="img"
      aria-label="Pushes of the embedding and of each layer: to the right for the token, to the left against it">
      <text x=${middle - 8} y="11" text-anchor="end">against</text><text x=${middle + 8} y="11">for</text>
      ${layer !== null && html`<rect class="inside-at" x="0.5" y=${TOP + layer * high} width=${width - 1} height=${high} rx="2" />`}
      <text x=${LEFT - 5} y=${TOP + high / 2} dy="0.35em" text-anchor="end"><title>embedding</title>E</text>
      ${numbers.map((n) => html`<text x=${LEFT - 5} y=${TOP + (n + 0.5) * high} dy="0.35em" text-anchor="end">${n}</text>`)}
      ${parts.map(bar)}
      <line class="inside-axis" x1=${middle} x2=${middle} y1=${TOP} y2=${TOP + rows * high} />
    </svg>
  </div>`;
}

const CLASS = { attention: "inside-attention", feed_forward: "inside-forward" };
