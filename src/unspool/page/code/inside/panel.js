// The Inside panel: what happened in the model for the selected token. Sections load their data when they are open.

// -- logit lens -------------------------------------------------------------------------------------

import { Attention, States } from "./attention.js";
import { ForwardPass } from "./layers.js";
import {
  formatNumber, formatSigned, options, Pending, placeInText, selectedIn, setOptions, sidesOf, useInspection,
} from "./lookups.js";
import { count, html, Lazy, ordinal, percent, Piece, useChanges, useMemo, useWidth } from "../lib.js";
import { currentBranch, state, stepAt } from "../state.js";
import { isTab } from "../tab/client.js";

const HIGH = 96;
const EDGE = { left: 44, right: 14, top: 8, bottom: 18 };

const LENS_TEXTS = {
  logit: "The output head applied to the residual stream after every layer.",
  tuned: "The residual stream after every layer, translated to the last layer's terms by regression (tuned lens), "
    + "then the output head.",
  jacobian: "The residual stream after every layer, multiplied with the mean Jacobian of the last layer, then the output head.",
  compare: "The most likely token after every layer by each lens.",
};

/** The logit lens, or the lens that was chosen of those that the model has. */
function Lens({ place }) {
  useChanges("inside");
  const response = useInspection(place, "include=lens&top=3");
  const names = response.answer?.lenses;
  if (!names) return html`<${Pending} ...${response} />`;
  const choices = names.length > 1 ? [...names, "compare"] : names;
  const chosen = choices.includes(options.lens) ? options.lens : "logit";
  const label = (name) => name[0].toUpperCase() + name.slice(1);
  return html`
    ${choices.length > 1 && html`<div class="segments small" role="group" aria-label="Lens">
      ${choices.map((name) => html`<button type="button" aria-pressed=${name === chosen}
        onClick=${() => setOptions({ lens: name })}>${label(name)}</button>`)}</div>`}
    <p class="quiet small">${LENS_TEXTS[chosen] ?? LENS_TEXTS.tuned} The rank of
      ${" "}<${Piece} text=${response.answer.lens.text} class="piece followed" /> is tracked.</p>
    <${Lenses} key=${chosen} place=${place} names=${chosen === "compare" ? names : [chosen]} />`;
}

function Lenses({ place, names }) {
  useChanges("inside");
  const responses = names.map((name) => useInspection(place, `include=lens&top=3${name === "logit" ? "" : `&lens=${encodeURIComponent(name)}`}`));
  const looks = responses.map(({ answer }) => answer);
  const layer = looks[0] ? selectedIn(looks[0]).layer : null;
  return useMemo(() => {
    const missing = responses.find(({ answer }) => !answer);
    if (missing) return html`<${Pending} ...${missing} />`;
    const lenses = looks.map(({ lens }) => lens);
    return html`<${Ranks} lenses=${lenses} names=${names} layer=${layer} />
      ${names.length > 1 ? html`<${SideBySide} lenses=${lenses} names=${names} layer=${layer} />`
        : html`<${Table} lens=${lenses[0]} layer=${layer} />`}`;
  }, [...looks, ...responses.map(({ fault }) => fault), layer]);
}

/** The rank of the tracked token over the layers, on a logarithmic scale; a curve for each lens. */
function Ranks({ lenses, names, layer }) {
  const [frame, width] = useWidth();
  const lens = lenses[0];
  const last = lens.layers.length - 1;
  const tens = Math.max(1, Math.ceil(Math.log10(Math.max(...lenses.flatMap(({ layers }) => layers.map(({ rank }) => rank + 1))))));
  const x = (at) => EDGE.left + ((width - EDGE.left - EDGE.right) * at) / last;
  const y = (rank) => HIGH - EDGE.bottom - ((HIGH - EDGE.top - EDGE.bottom) * Math.log10(rank + 1)) / tens;
  const curves = lenses.map(({ layers }) => layers.map(({ layer: at, rank }) => [x(at), y(rank)]));
  const first = lens.layers.findIndex((_, at) => lens.layers.slice(at).every(({ rank }) => rank === 0));
  const settled = first === -1 ? `It ends ${ordinal(lens.layers[last].rank + 1)}.`
    : `It is 1st from layer ${first} on.`;
  const steps = Array.from({ length: tens + 1 }, (_, at) => 10 ** at).filter((_, at) => tens < 4 || at % 2 === 0);
  return html`<div ref=${frame}>
    <svg class="inside-ranks" width=${width} height=${HIGH} role="img" aria-label=${`Rank of the tracked token: ${
      ordinal(lens.layers[0].rank + 1)} before the first layer, ${ordinal(lens.layers[last].rank + 1)} after the last. ${settled}`}>
      ${steps.map((rank) => html`<g>
        <line class="grid" x1=${EDGE.left} x2=${width - EDGE.right} y1=${y(rank - 1)} y2=${y(rank - 1)} />
        <text x=${EDGE.left - 6} y=${y(rank - 1)} dy="0.35em" text-anchor="end">${rank === 1 ? "1st" : count(rank)}</text>
      </g>`)}
      ${layer !== null && html`<line class="inside-here" x1=${x(layer)} x2=${x(layer)} y1=${EDGE.top} y2=${HIGH - EDGE.bottom} />`}
      ${curves.map((spots, number) => html`<g class=${lensHue(number, lenses)}>
        <path d=${`M${spots.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L")}`} />
        ${spots.map(([a, b], at) => html`<circle cx=${a} cy=${b} r=${at === last ? 3.5 : 1.8} />`)}
      </g>`)}
      <text x=${EDGE.left} y=${HIGH - 3}>embedding</text>
      <text x=${width - EDGE.right} y=${HIGH - 3} text-anchor="end">layer ${last}</text>
    </svg>
    ${lenses.length > 1
      ? html`<p class="small row"><span class="quiet">Rank by layer:</span>${names.map((name, number) =>
        html`<b class=${`inside-curve ${lensHue(number, lenses)}`}>${name}</b>`)}</p>`
      : html`<p class="small quiet">Rank by layer. ${settled}</p>`}
  </div>`;
}

const lensHue = (number, lenses) => (lenses.length > 1 ? `hue-${(number % 6) + 1}` : "");

/** The most likely token after each layer, by each lens. */
function SideBySide({ lenses, names, layer }) {
  return html`<div class="inside-scroll" tabindex="0" role="region" aria-label="Lenses side by side">
    <table class="inside-lens inside-lenses">
      <thead><tr><th scope="col">Layer</th>${names.map((name, number) =>
        html`<th scope="col" class=${lensHue(number, lenses)}>${name}</th>`)}</tr></thead>
      <tbody>${lenses[0].layers.map(({ layer: at }) => html`<tr data-layer=${at} class=${at === layer ? "here" : ""}>
        <th scope="row">${at}</th>
        ${lenses.map((lens) => html`<td><${Said} candidate=${lens.layers[at].candidates[0]} lens=${lens} /></td>`)}
      </tr>`)}</tbody>
    </table>
  </div>`;
}

/** A candidate with its probability; the tracked token is marked. */
const Said = ({ candidate, lens }) => html`<span class=${candidate.token === lens.token ? "said followed" : "said"}
  data-token=${candidate.token} style=${{ "--p": candidate.probability.toFixed(3) }}
  title=${percent(candidate.probability)}><${Piece} text=${candidate.text} />
  <small>${percent(candidate.probability)}</small></span>`;

function Table({ lens, layer }) {
  return html`<div class="inside-scroll" tabindex="0" role="region" aria-label="Logit lens as a table">
    <table class="inside-lens">
      <thead><tr><th scope="col">Layer</th><th scope="col">Top tokens</th><th scope="col">Rank</th></tr></thead>
      <tbody>${lens.layers.map((row) => html`<tr data-layer=${row.layer} class=${row.layer === layer ? "here" : ""}>
        <th scope="row" title=${row.layer === 0 ? "the embedding, before the first layer" : null}>${row.layer}</th>
        <td>${row.candidates.map((candidate) => html`<${Said} candidate=${candidate} lens=${lens} />`)}</td>
        <td class="mono">${count(row.rank + 1)}</td>
      </tr>`)}</tbody>
    </table>
  </div>`;
}

// -- direct logit attribution -------------------------------------------------------------------------

const NAMES = {
  embedding: "embedding", attention: "attention", feed_forward: "feed-forward",
  norm_bias: "bias of the norm", head_bias: "bias of the head",
};
const partName = ({ name, layer }) => (layer === null ? NAMES[name] : `${NAMES[name]} ${layer}`);

function Attribution({ place, runner }) {
  useChanges("inside");
  const query = { runner: runner && `&against=${runner.id}`, mean: "&against=mean", none: "" }[options.against];
  const response = useInspection(place, query === null ? null : `include=attribution${query}`);
  const look = response.answer;
  const layer = look ? selectedIn(look).layer : null;
  const details = useMemo(
    () => (look ? html`<${AttributionDetails} attribution=${look.attribution} layers=${look.layers} layer=${layer} />`
      : html`<${Pending} ...${response} />`),
    [look, response.fault, layer],
  );
  return html`
    <p class="quiet small">A token's logit is a sum of contributions of all parts of the model. Only direct
      contributions are counted here; effects through later layers are counted there.</p>
    <label class="small">Against${" "}<select class="field inside-choice" value=${options.against}
      onChange=${(event) => setOptions({ against: event.target.value })}>
      <option value="runner">the runner-up</option>
      <option value="mean">the mean of all tokens</option>
      <option value="none">nothing: its own logit</option>
    </select></label>
    ${details}`;
}

function AttributionDetails({ attribution, layers, layer }) {
  const sorted = [...attribution.parts].sort((a, b) => b.value - a.value);
  const list = (parts, title) => html`<div><h4>${title}</h4><ol class="inside-list">
    ${parts.map((part) => html`<li><span>${partName(part)}</span><b class="mono">${formatSigned(part.value)}</b></li>`)}
    ${!parts.length && html`<li class="quiet">none</li>`}</ol></div>`;
  return html`
    <p class="small" data-fact="lead">${attributionSummary(attribution)}</p>
    <${Bars} parts=${attribution.parts} layers=${layers} layer=${layer} />
    <div class="inside-sides">
      ${list(sorted.slice(0, 4).filter(({ value }) => value > 0), "Largest positive")}
      ${list(sorted.reverse().slice(0, 4).filter(({ value }) => value < 0), "Largest negative")}
    </div>`;
}

/** The sum of the contributions as a sentence. */
function attributionSummary(attribution) {
  const token = html`<${Piece} text=${attribution.text} />`;
  const sum = html`<b class="mono">${formatSigned(attribution.logit)}</b>`;
  if (attribution.against === null) return html`The logit of ${token} is ${sum}. Only differences between tokens matter.`;
  if (attribution.against === "mean") return html`The logit of ${token} is ${sum} relative to the mean of all tokens.`;
  const rival = html`<${Piece} text=${attribution.against_text} />`;
  const times = Math.exp(Math.abs(attribution.said));
  return html`The logit of ${token} is ${sum} relative to ${rival}: it was
    ${" "}${formatNumber(times)} times as ${attribution.said < 0 ? "unlikely" : "likely"} (e to the ${formatNumber(Math.abs(attribution.said))}).`;
}

const TOP = 16;
const LEFT = 24;

/** One row for the embedding and one for each layer, with attention above feed-forward; zero in the middle. */
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
    return html`<rect class=${BAR_CLASSES[part.name] ?? "inside-loose"} x=${part.value < 0 ? middle - long : middle}
      y=${TOP + (rowOf(part) + down) * high} width=${long} height=${high * (part.layer === null ? 0.8 : 0.38)}>
      <title>${partName(part)} ${formatSigned(part.value)}</title></rect>`;
  };
  const every = high >= 13 ? 1 : high >= 9 ? 2 : 5;
  const numbers = Array.from({ length: layers }, (_, at) => at + 1).filter((n) => n === 1 || n % every === 0);
  return html`<div ref=${frame}>
    <p class="small row"><span class="quiet">by</span><b class="inside-attention">attention</b>
      <b class="inside-forward">feed-forward</b><b class="inside-loose">other</b></p>
    <svg class="inside-pushes" width=${width} height=${TOP + rows * high + 2} role="img"
      aria-label="Contributions of the embedding and of each layer: to the right for the token, to the left against it">
      <text x=${middle - 8} y="11" text-anchor="end">against</text><text x=${middle + 8} y="11">for</text>
      ${layer !== null && html`<rect class="inside-at" x="0.5" y=${TOP + layer * high} width=${width - 1} height=${high} rx="2" />`}
      <text x=${LEFT - 5} y=${TOP + high / 2} dy="0.35em" text-anchor="end"><title>embedding</title>E</text>
      ${numbers.map((n) => html`<text x=${LEFT - 5} y=${TOP + (n + 0.5) * high} dy="0.35em" text-anchor="end">${n}</text>`)}
      ${parts.map(bar)}
      <line class="inside-axis" x1=${middle} x2=${middle} y1=${TOP} y2=${TOP + rows * high} />
    </svg>
  </div>`;
}

const BAR_CLASSES = { attention: "inside-attention", feed_forward: "inside-forward" };

// -- the panel ------------------------------------------------------------------------------------------

export function InsidePanel() {
  useChanges("selection", "steps", "current", "inside");
  const branch = currentBranch();
  const sides = branch ? sidesOf(branch, state.selected) : null;
  if (sides && branch.recorded) {
    return html`<p class="quiet">This text was loaded from a file and is not on the server. Replay the session to inspect
      it.</p>`;
  }
  if (sides) return html`<${Selected} branch=${branch} sides=${sides} />`;
  return html`<p class="quiet">Select a token in the text to inspect the model: forward pass, attention, logit lens,
    attribution and nearest embeddings.</p>`;
}

function Selected({ branch, sides }) {
  const name = sides.written ? "written" : "prompt";
  const side = sides.picked < 0 ? "read" : options[name];
  const place = useSame(placeInText(branch, sides[side]));
  const ownPlace = useSame(placeInText(branch, sides.read));
  return html`<div class="inside stack" data-looked-at=${place.at}>
    <h2 class="visually-hidden">Look inside</h2>
    <${Sides} sides=${sides} side=${side} name=${name} step=${stepAt(branch, sides.read)} />
    <${Parts} place=${place} ownPlace=${ownPlace} side=${side} text=${sides.token.text} />
  </div>`;
}

/** The same object as long as the key is the same. */
const useSame = (place) => useMemo(() => place, [place.key]);

function Sides({ sides, side, name, step }) {
  const token = html`<${Piece} text=${sides.token.text} />`;
  const button = (which, label) => html`<button type="button" aria-pressed=${side === which}
    disabled=${which === "picked" && sides.picked < 0}
    onClick=${() => setOptions({ [name]: which })}>${label}</button>`;
  return html`<div class="segments small" role="group" aria-label="Position to inspect">
      ${button("picked", sides.written ? "As output" : "As prediction")}
      ${button("read", "As input")}
    </div>
    <p class="quiet small">${sideText(sides, side, token, step)}</p>`;
}

function sideText(sides, side, token, step) {
  if (sides.picked < 0) {
    return html`${token} is the first token: there is no earlier position that predicts it. Shown as input.`;
  }
  if (side === "read") {
    return html`The forward pass at ${token}, and the next token that it predicts.`;
  }
  if (!sides.written) {
    return html`${token} is part of the prompt. This is the forward pass at the token before it, which predicts it.`;
  }
  if (step?.chosen) {
    return html`You chose ${token}. This is the forward pass at the token before it, which predicts this position.`;
  }
  return html`The forward pass at the token before ${token}, whose output was sampled.`;
}

function Parts({ place, ownPlace, side, text }) {
  const base = useInspection(place, "include=vectors,attention&top=8");
  const runner = base.answer?.position === place.at ? runnerUp(base.answer) : null;
  const next = side === "picked" ? "picked" : "next";
  const part = (name, title, draw) => html`<${Part} name=${name} title=${title} draw=${draw} />`;
  return useMemo(() => {
    const withBase = (draw) => () => (base.answer ? draw(base.answer) : html`<${Pending} ...${base} />`);
    return html`<div class="inside-parts">
      <${FoldAll} />
      ${part("way", "Forward pass", withBase((look) => html`<${ForwardPass} look=${look} next=${next} />`))}
      ${part("attention", "Attention", withBase((look) => html`<${Attention} place=${place} look=${look} />`))}
      ${base.answer?.states && part("states", "Recurrent states", withBase((look) => html`<${States} look=${look} />`))}
      ${part("lens", "Logit lens", () => html`<${Lens} place=${place} />`)}
      ${!isTab && part("pushes", "Logit attribution", () => html`<${Attribution} place=${place} runner=${runner} />`)}
      ${!isTab && part("steer", "Steer", () => html`<${Lazy} file="./steer/panel.js" name="Steer" />`)}
      ${!isTab && part("patching", "Patching", () => html`<${Lazy} file="./steer/patch.js" name="Patching" />`)}
      ${!isTab && part("neighbours", "Nearest embeddings", () => html`<${Neighbours} place=${ownPlace} text=${text} />`)}
      ${isTab && html`<p class="quiet small">Logit attribution, steering, patching and nearest embeddings need a server.</p>`}
    </div>`;
  }, [place, ownPlace, base.answer, base.fault, next]);
}

/** The most likely token besides the tracked one. */
function runnerUp({ head }) {
  return head.candidates.find(({ id }) => id !== head.followed.id) ?? null;
}

/** Opens or closes all sections. */
function FoldAll() {
  useChanges("inside");
  const isAll = Object.values(options.open).every(Boolean);
  const set = () => setOptions({ open: Object.fromEntries(Object.keys(options.open).map((name) => [name, !isAll])) });
  return html`<button type="button" class="link small" id="inside-fold" onClick=${set}>${isAll ? "Fold all" : "Open all"}</button>`;
}

/** A section that can be closed; closed, it sends no requests. */
function Part({ name, title, draw }) {
  useChanges("inside");
  const open = options.open[name];
  const toggle = (event) => {
    if (event.currentTarget.open !== open) setOptions({ open: { ...options.open, [name]: !open } });
  };
  return html`<details class="inside-part" data-part=${name} open=${open} onToggle=${toggle}>
    <summary><h3>${title}</h3></summary>
    ${open && html`<div class="stack inside-body">${draw()}</div>`}
  </details>`;
}

function Neighbours({ place, text }) {
  const response = useInspection(place, "include=neighbours&top=14");
  if (!response.answer) return html`<${Pending} ...${response} />`;
  return html`
    <p class="quiet small">Tokens with the embeddings most similar to that of <${Piece} text=${text} />, by cosine similarity.</p>
    <ul class="inside-near">
      ${response.answer.neighbours.map((near) => html`<li class="chip" data-token=${near.token}
        style=${{ "--p": Math.max(0, near.similarity).toFixed(3) }}>
        <${Piece} text=${near.text} /><span class="mono">${near.similarity.toFixed(2)}</span></li>`)}
    </ul>`;
}
