// The layers of the model as rows: the vector behind each, what was added to it, how long it is.

import { useTheme } from "../colors.js";
import { clamp, html, useChanges, useMemo, useState, useWidth } from "../lib.js";
import { cellText, painted, rounded } from "./cells.js";
import { choose, chooseLayer, chosenIn } from "./choice.js";
import { mixerOf } from "./states.js";

const NUMBERS = 24; // for the layers' numbers at the left
const TOP = 18; // for the words over the columns

export function Layers({ look }) {
  useChanges("inside");
  const [frame, width] = useWidth();
  const theme = useTheme();
  const [pointed, point] = useState(null); // {layer, cell}
  const { layers, norms, part_norms: parts, vectors } = look;
  const { layer: chosen } = chosenIn(look);
  const high = clamp(372 / layers, 6, 18);
  const source = useMemo(() => painted(vectors.cells.slice(1)), [vectors, theme]);
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
    const from = chosen ?? (event.key === "ArrowUp" ? layers + 1 : 0);
    const to = { ArrowDown: from + 1, ArrowUp: from - 1, Home: 1, End: layers }[event.key];
    if (to !== undefined) choose({ layer: clamp(to, 1, layers), head: null });
    else if (event.key === "Enter" || event.key === " ") choose({ layer: null, head: null });
    else return;
    event.preventDefault();
    event.stopPropagation(); // these keys mean something else to the page
  };
  const shown = pointed?.layer ?? chosen;
  return html`<div ref=${frame}>
    <svg class="inside-layers" width=${width} height=${TOP + layers * high + 2} role="listbox" tabindex="0"
      aria-label="Layers" aria-activedescendant=${chosen ? `inside-layer-${chosen}` : null}
      onKeyDown=${press} onPointerMove=${(event) => point(locate(event))} onPointerLeave=${() => point(null)}
      onClick=${(event) => { const found = locate(event); if (found) chooseLayer(found.layer); }}>
      <text x=${columns.strip.x} y="11" aria-hidden="true">vector</text>
      <text x=${columns.added.x} y="11" aria-hidden="true">added</text>
      <text x=${columns.length.x} y="11" aria-hidden="true">length</text>
      ${picture}
      ${shown && html`<rect class="inside-at" x="0.5" y=${TOP + (shown - 1) * high - 0.5}
        width=${width - 1} height=${high + 1} rx="2" />`}
      ${parts.map((_, at) => html`<rect role="option" id=${`inside-layer-${at + 1}`} data-layer=${at + 1}
        class="inside-row" x="0" y=${TOP + at * high} width=${width} height=${high}
        aria-selected=${chosen === at + 1} aria-label=${layerText(look, at + 1)} />`)}
    </svg>
    <p class="small inside-told" aria-hidden="true">${shown
      ? layerText(look, shown) + (pointed?.cell == null ? "" : `; ${cellText(vectors, shown, pointed.cell)}`)
      : html`<span class="quiet">Bars and curve on a root scale: the early layers are small.</span>`}</p>
  </div>`;
}

function layerText(look, layer) {
  const [attended, fed] = look.part_norms[layer - 1];
  const added = [[mixerOf(look, layer), attended], ["feed-forward", fed]]
    .filter(([, much]) => much > 0) // in some models a layer has only one of the two
    .map(([name, much], at) => `${name}${at ? "" : " added"} ${rounded(much)}`);
  return `Layer ${layer}: ${added.join(", ") || "nothing was added"}; the vector is ${rounded(look.norms[layer])} long`;
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
    const y = TOP + clamp(at - 0.5, 0, norms.length) * high; // the embedding lies on the upper edge
    return `${(x + width * Math.sqrt(norm / most)).toFixed(1)} ${y.toFixed(1)}`;
  });
  const bottom = TOP + (norms.length - 1.5) * high;
  return html`<path class="inside-length" d=${`M${x} ${TOP}L${points.join("L")}L${x} ${bottom}Z`} />`;
}

/** As many numbers as there is room for: each, or every fifth or tenth, and the last. */
function numbers(layers, high) {
  const every = high >= 13 ? 1 : high >= 9 ? 2 : 5;
  return Array.from({ length: layers }, (_, at) => at + 1)
    .filter((layer) => layer === layers || (layer % every === 0 && layers - layer >= every) || layer === 1)
    .map((layer) => html`<text class="inside-number" aria-hidden="true" x=${NUMBERS - 5}
      y=${TOP + (layer - 0.5) * high} dy="0.35em" text-anchor="end">${layer}</text>`);
}
