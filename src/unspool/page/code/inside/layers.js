// The forward pass of one token: embedding, position, layers, output head, with its real numbers.

import { mixerOf } from "./attention.js";
import { cellText, formatNumber, paintGrid, paintRows, selectedIn, setOptions, toggleLayer } from "./lookups.js";
import {
  clamp, count, html, ordinal, percent, Piece, useChanges, useMemo, useState, useTheme, useWidth,
} from "../lib.js";

const NUMBERS = 24; // px, for the layer numbers
const TOP = 18; // px, for the column titles

function Layers({ look }) {
  useChanges("inside");
  const [frame, width] = useWidth();
  const theme = useTheme();
  const [pointed, point] = useState(null); // {layer, cell}
  const { layers, norms, part_norms: parts, vectors } = look;
  const { layer: selected } = selectedIn(look);
  const high = clamp(372 / layers, 6, 18);
  const source = useMemo(() => paintRows(vectors.cells.slice(1)), [vectors, theme]);
  const columns = columnsOf(width);
  const picture = useMemo(
    () => html`<g>
      <image href=${source} x=${columns.strip.x} y=${TOP} width=${columns.strip.width}
        height=${layers * high} preserveAspectRatio="none" />
      ${parts.map((pair, at) => bars(pair, TOP + at * high, high, columns.added, longest(parts)))}
      ${curve(norms, high, columns.length)}
      ${numbers(layers, high)}
    </g>`,
    [look, source, width],
  );
  const locate = (event) => {
    const layer = Math.floor((event.offsetY - TOP) / high) + 1;
    if (layer < 1 || layer > layers) return null;
    const cells = vectors.cells[0].length;
    const cell = Math.floor(((event.offsetX - columns.strip.x) / columns.strip.width) * cells);
    return { layer, cell: cell >= 0 && cell < cells ? cell : null };
  };
  const press = (event) => {
    const from = selected ?? (event.key === "ArrowUp" ? layers + 1 : 0);
    const to = { ArrowDown: from + 1, ArrowUp: from - 1, Home: 1, End: layers }[event.key];
    if (to !== undefined) setOptions({ layer: clamp(to, 1, layers), head: null });
    else if (event.key === "Enter" || event.key === " ") setOptions({ layer: null, head: null });
    else return;
    event.preventDefault();
    event.stopPropagation(); // no shortcuts of the page
  };
  const focused = pointed?.layer ?? selected;
  return html`<div ref=${frame}>
    <svg class="inside-layers" width=${width} height=${TOP + layers * high + 2} role="listbox" tabindex="0"
      aria-label="Layers" aria-activedescendant=${selected ? `inside-layer-${selected}` : null}
      onKeyDown=${press} onPointerMove=${(event) => point(locate(event))} onPointerLeave=${() => point(null)}
      onClick=${(event) => { const row = locate(event); if (row) toggleLayer(row.layer); }}>
      <text x=${columns.strip.x} y="11" aria-hidden="true">residual</text>
      <text x=${columns.added.x} y="11" aria-hidden="true">added</text>
      <text x=${columns.length.x} y="11" aria-hidden="true">norm</text>
      ${picture}
      ${focused && html`<rect class="inside-at" x="0.5" y=${TOP + (focused - 1) * high - 0.5}
        width=${width - 1} height=${high + 1} rx="2" />`}
      ${parts.map((_, at) => html`<rect role="option" id=${`inside-layer-${at + 1}`} data-layer=${at + 1}
        class="inside-row" x="0" y=${TOP + at * high} width=${width} height=${high}
        aria-selected=${selected === at + 1} aria-label=${layerText(look, at + 1)} />`)}
    </svg>
    <p class="small inside-told" aria-hidden="true">${focused
      ? layerText(look, focused) + (pointed?.cell == null ? "" : `; ${cellText(vectors, focused, pointed.cell)}`)
      : html`<span class="quiet">Bars and curve on a square-root scale.</span>`}</p>
  </div>`;
}

function layerText(look, layer) {
  const [attended, fed] = look.part_norms[layer - 1];
  const added = [[mixerOf(look, layer), attended], ["feed-forward", fed]]
    .filter(([, norm]) => norm > 0) // some layers have only one of the two
    .map(([name, norm], at) => `${name}${at ? "" : " added"} ${formatNumber(norm)}`);
  return `Layer ${layer}: ${added.join(", ") || "nothing added"}; norm of the residual stream ${formatNumber(look.norms[layer])}`;
}

function columnsOf(width) {
  const free = width - NUMBERS - 20;
  const strip = { x: NUMBERS, width: Math.round(free * 0.48) };
  const added = { x: strip.x + strip.width + 10, width: Math.round(free * 0.32) };
  const length = { x: added.x + added.width + 10, width: Math.round(free * 0.2) - 2 };
  return { strip, added, length };
}

const longest = (parts) => Math.max(...parts.flat());

function bars([attended, fed], y, high, { x, width }, most) {
  const bar = (value, at, name) => html`<rect class=${name} x=${x} y=${y + at * high}
    width=${Math.max(0.5, width * Math.sqrt(value / most))} height=${high * 0.38} />`;
  return [bar(attended, 0.08, "inside-attention"), bar(fed, 0.5, "inside-forward")];
}

function curve(norms, high, { x, width }) {
  const most = Math.max(...norms);
  const points = norms.map((norm, at) => {
    const y = TOP + clamp(at - 0.5, 0, norms.length) * high; // the embedding is on the upper edge
    return `${(x + width * Math.sqrt(norm / most)).toFixed(1)} ${y.toFixed(1)}`;
  });
  const bottom = TOP + (norms.length - 1.5) * high;
  return html`<path class="inside-length" d=${`M${x} ${TOP}L${points.join("L")}L${x} ${bottom}Z`} />`;
}

/** Layer numbers, thinned to the room there is. */
function numbers(layers, high) {
  const every = high >= 13 ? 1 : high >= 9 ? 2 : 5;
  return Array.from({ length: layers }, (_, at) => at + 1)
    .filter((layer) => layer === layers || (layer % every === 0 && layers - layer >= every) || layer === 1)
    .map((layer) => html`<text class="inside-number" aria-hidden="true" x=${NUMBERS - 5}
      y=${TOP + (layer - 0.5) * high} dy="0.35em" text-anchor="end">${layer}</text>`);
}

// -- the forward pass ---------------------------------------------------------------------------

export function ForwardPass({ look, next }) {
  const { token, vectors, head, position, position_told: encoding, layers, norms } = look;
  return html`<ol class="inside-way">
    <li>
      <h4>Token <span class="quiet">→ id</span></h4>
      <p class="row"><${Piece} text=${token.text} /><span class="quiet">→</span>
        <b class="mono" data-fact="id">${token.id}</b></p>
      <p class="quiet small">Its id in the vocabulary of ${count(head.vocabulary)} tokens.</p>
    </li>
    <li>
      <h4>Embedding <span class="quiet">· ${count(vectors.width)} dimensions</span></h4>
      <${Embedding} vectors=${vectors} token=${token} />
      <p class="quiet small">Row ${count(token.id)} of the embedding matrix; norm ${formatNumber(norms[0])}.
        Each cell is one dimension: <b class="inside-above">above</b> or <b class="inside-below">below</b> zero.</p>
    </li>
    <li>
      <h4>Position ${position}</h4>
      <${Position} encoding=${encoding} position=${position} />
    </li>
    <li>
      <h4>${layers} layers</h4>
      <p class="quiet small">Each adds to the residual stream${look.states ? "" : " twice"}: the output of <b class="inside-attention">attention</b>
        ${" "}over earlier tokens${look.states && " or of a recurrent state"}, then that of the${" "}
        <b class="inside-forward">feed-forward</b> network. Click a layer to select it in the sections below.</p>
      <${Layers} look=${look} />
    </li>
    <li>
      <h4>Output head <span class="quiet">→ probabilities</span></h4>
      <p class="quiet small">The last vector is normalized${head.norm === undefined ? "" : ` (norm ${formatNumber(head.norm)})`} and multiplied with the output
        matrix: one logit for each of ${count(head.vocabulary)} tokens. Softmax gives the probabilities, here before
        temperature and other sampling stages.</p>
      <${Probabilities} head=${head} picked=${look.picked} next=${next} />
    </li>
  </ol>`;
}

export function Embedding({ vectors, token }) {
  const [frame, width] = useWidth();
  const theme = useTheme();
  const [read, setRead] = useState(null);
  const cells = vectors.cells[0];
  const columns = Math.min(cells.length, Math.floor(width / 7));
  const size = width / columns;
  const height = Math.ceil(cells.length / columns) * size;
  const source = useMemo(() => paintGrid(cells, columns), [cells, columns, theme]);
  const point = (event) => {
    const at = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
    setRead(at >= 0 && at < cells.length ? at : null);
  };
  return html`<div ref=${frame} class="inside-cells">
    <svg width=${width} height=${height} role="img"
      aria-label=${`Embedding of token ${token.id}: ${vectors.width} values as colored cells`}
      onPointerMove=${point} onPointerLeave=${() => setRead(null)}>
      <image href=${source} width=${width} height=${height} preserveAspectRatio="none" />
    </svg>
    ${read !== null && html`<output class="inside-read mono">${cellText(vectors, 0, read)}</output>`}
  </div>`;
}

const POSITIONS = {
  rotary: "Rotary embedding (RoPE): nothing is added to the vector. In each layer, pairs of dimensions of queries and keys "
    + "are rotated by angles that grow with the position, so attention depends on the distance between tokens.",
  learned: "A learned position embedding is added; the cells above include it.",
  sinusoidal: "A sinusoidal position embedding is added; the cells above include it.",
  none: "No position embedding: the model knows positions only from the causal mask.",
};

function Position({ encoding, position }) {
  const size = 26;
  return html`${encoding.dials.length > 0 && html`<svg class="inside-dials" width=${encoding.dials.length * (size + 8)}
      height=${size + 2} role="img"
      aria-label=${`Rotation at position ${position} of pairs ${encoding.dials.map((dial) => dial.pair).join(", ")}: `
        + encoding.dials.map((dial) => `${formatNumber(dial.angle)} radians`).join(", ")}>
      ${encoding.dials.map(({ pair, angle }, at) => {
        const [x, y, r] = [at * (size + 8) + size / 2 + 1, size / 2 + 1, size / 2];
        return html`<g>
          <title>pair ${pair} of ${encoding.pairs}: ${formatNumber(angle)} radians</title>
          <circle cx=${x} cy=${y} r=${r} />
          <line x1=${x} y1=${y} x2=${x + r * Math.cos(angle)} y2=${y - r * Math.sin(angle)} />
        </g>`;
      })}
    </svg>`}
    <p class="quiet small">${POSITIONS[encoding.way]}</p>`;
}

export function Probabilities({ head, picked, next }) {
  const marked = picked ? head.followed : null;
  const candidates = head.candidates.slice(0, 6);
  if (marked && !candidates.some(({ id }) => id === marked.id)) candidates.push(marked);
  const most = Math.max(...candidates.map(({ probability }) => probability), 1e-9);
  return html`<div class="inside-chances" role="list" aria-label="Most likely next tokens">
    ${candidates.map((candidate) => {
      const followed = candidate.id === marked?.id;
      return html`<div role="listitem" class=${followed ? "followed" : ""} data-token=${candidate.id}>
        <${Piece} text=${candidate.text} />
        <span class="track"><span style=${{ width: `${(100 * candidate.probability) / most}%` }}></span></span>
        <span class="mono small">${percent(candidate.probability)}</span>
        <span class="mono small quiet" title="logit">${candidate.logit.toFixed(1)}</span>
      </div>`;
    })}
    <p class="quiet small">${marked && html`<b class="inside-above">${rankText(marked, next)}</b> · `}Right: the logit.</p>
  </div>`;
}

function rankText({ rank }, next) {
  const which = next === "picked" ? "The sampled token" : "The token that followed";
  return `${which} ranks ${ordinal(rank + 1)}`;
}
