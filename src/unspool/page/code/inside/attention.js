// Attention of one token: arcs over the text, a list, and the map of all heads; and the states of recurrent layers.

import { formatNumber, options, Pending, selectedIn, setOptions, useInspection } from "./lookups.js";
import {
  clamp, html, percent, Piece, useChanges, useEffect, useMemo, useState, useWidth, visibleText,
} from "../lib.js";
import { on } from "../state.js";
import { highlightTokens, overlay, tokenBox } from "../write/pane.js";

const NAMES = { conv: "convolution", delta: "gated DeltaNet", mamba2: "Mamba-2" };

/** The name of a layer's token mixer. */
export function mixerOf({ states = [] }, layer) {
  const match = states.find((state) => state.layer === layer);
  return match ? NAMES[match.mixer] ?? match.mixer : "attention";
}

/** Whether a layer has attention; others have a recurrent state, or neither. */
const hasAttention = ({ attention }, layer) => attention.map.weight[layer - 1].some((weight) => weight > 0);

export function States({ look }) {
  useChanges("inside");
  const { states } = look;
  const { layer } = selectedIn(look);
  const fades = states.some(({ mixer }) => mixer !== "conv"); // a convolution has no decay
  const gates = states.some(({ mixer }) => mixer === "delta") ? 1 : Math.max(...states.map(({ gate }) => gate), 1e-9);
  const longest = Math.max(...states.map(({ state_norm: norm }) => norm), 1e-9);
  return html`
    <p class="quiet small">These layers have no attention; each carries a state of fixed size. For this token, averaged over
      heads: ${gateText(states)} <b>Norm</b>: of the state after this token.</p>
    <div class="inside-scroll" tabindex="0" role="region" aria-label="States of recurrent layers, as a table">
      <table class="inside-states">
        <thead><tr><th scope="col">Layer</th><th scope="col">Gate</th>${fades && html`<th scope="col">Decay</th>`}
          <th scope="col">Norm</th></tr></thead>
        <tbody>${states.map((state) => html`<tr data-layer=${state.layer} class=${state.layer === layer ? "here" : ""}
          title=${mixerOf(look, state.layer)}>
          <th scope="row">${state.layer}</th>
          <${Bar} share=${state.gate / gates} text=${formatNumber(state.gate)} />
          ${fades && html`<${Bar} share=${state.decay} text=${percent(state.decay)} />`}
          <${Bar} share=${Math.sqrt(state.state_norm / longest)} text=${formatNumber(state.state_norm)} />
        </tr>`)}</tbody>
      </table>
    </div>`;
}

/** What gate and decay mean for these layers. */
function gateText(states) {
  const kinds = new Set(states.map(({ mixer }) => mixer));
  if (kinds.has("conv")) return html`<b>Gate</b>: how much of the convolution is passed on.`;
  const writes = kinds.has("delta") ? "how much it corrects the state" : "how much it adds to the state";
  return html`<b>Gate</b>: ${writes}. <b>Decay</b>: the share of the previous state that remains.`;
}

const Bar = ({ share, text }) => html`<td><div>
  <span class="track"><span style=${{ width: `${Math.min(100, 100 * share).toFixed(1)}%` }}></span></span>
  <span class="mono">${text}</span></div></td>`;

// -- arcs over the text ---------------------------------------------------------------------------

const MOST_ARCS = 25;
const MIN_WEIGHT = 0.002; // thinner arcs would be invisible

/** The largest weights of a row of attention, largest first: `{at, weight}`. */
function strongest(row, most = MOST_ARCS) {
  return row
    .map((weight, at) => ({ at, weight }))
    .filter(({ weight }) => weight >= MIN_WEIGHT)
    .sort((a, b) => b.weight - a.weight)
    .slice(0, most);
}

/** Shade the tokens that `from` attends to, dim those after it, and draw the arcs; removed on unmount. */
export function useArcs(from, row) {
  useEffect(() => {
    if (!row) return undefined;
    const most = Math.max(...row);
    // The square root keeps small weights visible beside a large one.
    const shades = row.map((weight) => (weight < MIN_WEIGHT ? 0 : Math.sqrt(weight / most)));
    const targets = strongest(row);
    const draw = () => {
      highlightTokens(shades, from); // also dims tokens generated since
      drawArcs(from, targets, most);
    };
    draw();
    const leave = on("layout", draw);
    return () => {
      leave();
      highlightTokens(null);
      drawArcs(from, [], 1);
    };
  }, [from, row]);
}

function drawArcs(from, targets, most) {
  const over = overlay();
  over?.querySelector(".inside-arcs")?.remove();
  const start = over && targets.length ? tokenBox(from) : null;
  if (!start) return;
  const group = svgElement("g", { class: "inside-arcs" });
  group.append(svgElement("rect", {
    class: "inside-reader", x: start.x - 1, y: start.y - 1,
    width: start.width + 2, height: start.height + 2, rx: 4,
  }));
  // Small weights first, so that large ones are on top.
  for (const { at, weight } of [...targets].reverse()) {
    const end = at === from ? null : tokenBox(at);
    if (!end) continue;
    const strength = Math.sqrt(weight / most);
    group.append(svgElement("path", {
      d: arcPath(start, end),
      "data-at": at,
      "stroke-width": (0.6 + 3.4 * Math.sqrt(weight)).toFixed(2),
      "stroke-opacity": (0.12 + 0.68 * strength).toFixed(2),
    }));
  }
  over.append(group);
}

/** Path from the upper edge of one token to that of the other. */
function arcPath(start, end) {
  const [x, to] = [start.x + start.width / 2, end.x + end.width / 2];
  const rise = Math.min(start.height * 1.5, 5 + Math.hypot(x - to, start.y - end.y) * 0.25);
  const top = Math.max(1, end.y - rise); // inside the text box
  return `M${x} ${start.y}C${x} ${top} ${to} ${top} ${to} ${end.y}`;
}

function svgElement(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// -- map of all heads: a column for each layer, a row for each head -----------------------------------
const LEFT = 22; // for the heads' numbers
const TOP = 16; // for the layers' numbers
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function HeadMap({ look }) {
  useChanges("inside");
  const [frame, width] = useWidth();
  const [active, setActive] = useState({ layer: 1, head: 1 });
  const [pointed, point] = useState(null);
  const { layers, heads, attention, tokens, position } = look;
  const there = active.layer <= layers && active.head <= heads;
  const map = (options.withoutFirst && attention.map_without_first) || attention.map;
  const selected = selectedIn(look);
  const size = { wide: (width - LEFT) / layers, high: clamp((width - LEFT) / layers, 4, 15) };
  const x = (layer) => LEFT + (layer - 1) * size.wide;
  const y = (head) => TOP + (head - 1) * size.high;
  const shade = (layer, head) => shadeOf(map, options.shade, layer, head, position);
  const says = (layer, head) => {
    if (!hasAttention(look, layer)) return `layer ${layer} has no attention`;
    const at = map.place[layer - 1][head - 1];
    const most = percent(map.weight[layer - 1][head - 1]);
    return `layer ${layer} head ${head} attends most to ${visibleText(tokens[at].text)} ${most}`;
  };
  const cells = useMemo(
    () => Array.from({ length: heads }, (_, row) => html`<g role="row">
      ${Array.from({ length: layers }, (_, column) => html`<rect role="gridcell" id=${`inside-head-${column + 1}-${row + 1}`}
        data-layer=${column + 1} data-head=${row + 1} x=${x(column + 1) + 0.5} y=${y(row + 1) + 0.5}
        width=${Math.max(1, size.wide - 1)} height=${Math.max(1, size.high - 1)} rx="1.5"
        fill-opacity=${shade(column + 1, row + 1).toFixed(3)} aria-label=${says(column + 1, row + 1)} />`)}
    </g>`),
    [map, options.shade, width],
  );
  const locate = ({ target }) => (target.dataset.head
    ? { layer: Number(target.dataset.layer), head: Number(target.dataset.head) } : null);
  const pick = (cell) => {
    const again = cell.layer === selected.layer && cell.head === selected.head;
    setOptions(again ? { layer: null, head: null } : cell);
  };
  const press = (event) => {
    const move = MOVES[event.key];
    if (move) {
      const to = { layer: clamp(active.layer + move[0], 1, layers), head: clamp(active.head + move[1], 1, heads) };
      setActive(to);
      point(to);
    } else if (event.key === "Enter" || event.key === " ") pick(active);
    else return;
    event.preventDefault();
    event.stopPropagation(); // no shortcuts of the page
  };
  const described = pointed ?? (selected.head === null ? null : selected);
  const ring = (at, name) => html`<rect class=${name} x=${x(at.layer)} y=${y(at.head)}
    width=${size.wide} height=${size.high} rx="2" />`;
  return html`<div ref=${frame} class="inside-map">
    <div class="row spread"><h4>All heads</h4>
      <label class="small">shade by${" "}<select class="field inside-choice" value=${options.shade}
        onChange=${(event) => setOptions({ shade: event.target.value })}>
        <option value="weight">largest weight</option><option value="entropy">entropy</option>
      </select></label></div>
    <svg width=${width} height=${TOP + heads * size.high + 1} role="grid" tabindex="0"
      aria-label="Heads: a column for each layer, a row for each head" aria-colcount=${layers} aria-rowcount=${heads}
      aria-activedescendant=${there ? `inside-head-${active.layer}-${active.head}` : null}
      onFocus=${() => there && point(active)} onBlur=${() => point(null)} onKeyDown=${press}
      onPointerOver=${(event) => point(locate(event))} onPointerLeave=${() => point(null)}
      onClick=${(event) => {
        const cell = locate(event);
        if (cell) { setActive(cell); pick(cell); }
      }}>
      ${marks(layers, size.wide, 26).map((layer) => html`<text aria-hidden="true" x=${x(layer) + size.wide / 2} y="11"
        text-anchor="middle">${layer}</text>`)}
      ${marks(heads, size.high, 11).map((head) => html`<text aria-hidden="true" x=${LEFT - 5} y=${y(head) + size.high / 2}
        dy="0.35em" text-anchor="end">${head}</text>`)}
      ${cells}
      ${selected.layer !== null && selected.head === null && html`<rect class="inside-at" x=${x(selected.layer)} y=${TOP}
        width=${size.wide} height=${heads * size.high} rx="2" />`}
      ${selected.head !== null && ring(selected, "inside-at")}
      ${pointed && ring(pointed, "inside-pointed")}
    </svg>
    <p class="small inside-told" role="status">${described ? says(described.layer, described.head)
      : html`<span class="quiet">Point at a head to see which token it attends to most; click it to draw its arcs.</span>`}</p>
  </div>`;
}

/** 0 to 1; entropy is relative to that of uniform attention. */
function shadeOf(map, shade, layer, head, position) {
  if (shade === "weight") return map.weight[layer - 1][head - 1];
  return position === 0 ? 0 : clamp(map.entropy[layer - 1][head - 1] / Math.log(position + 1), 0, 1);
}

/** Axis numbers for which there is room: 1, and every n-th. */
function marks(most, size, room) {
  const every = [1, 2, 5, 10, 20, 50].find((step) => step * size >= room) ?? 100;
  return Array.from({ length: most }, (_, at) => at + 1).filter((n) => n === 1 || n % every === 0)
    .filter((n, at, all) => at !== 1 || (n - all[0]) * size >= room);
}

// -- the section ----------------------------------------------------------------------------------

const SINK_WEIGHT = 0.3; // from here on a note is shown

export function Attention({ place, look }) {
  useChanges("inside");
  const { layer, head } = selectedIn(look);
  // Heads are requested for one layer only: all layers would be megabytes for a long text.
  const heads = useInspection(place, head === null ? null : `include=attention&heads=true&layer=${layer}`);
  const source = head === null ? look : heads.answer;
  // Until the next answer arrives, the last one may be about another token or layer.
  const fits = source?.position === look.position && (head === null || source.attention.layers[0] === layer);
  const row = useMemo(() => (fits ? rowOf(source, layer, head) : null), [source, fits, layer, head]);
  const withoutFirst = options.withoutFirst && look.position > 0;
  const weights = useMemo(() => (row && withoutFirst ? withoutFirstToken(row) : row), [row, withoutFirst]);
  useArcs(look.position, weights);
  const reader = html`<${Piece} text=${look.token.text} />`;
  return html`
    <p class="quiet small">Attention weights from ${reader} to the tokens before it, drawn as arcs over the text. Later
      tokens are dimmed: the causal mask hides them.</p>
    <div class="row">
      <${Choice} name="Layer" value=${layer} most=${look.layers} all="all, averaged"
        pick=${(to) => setOptions({ layer: to, head: to === null ? null : head })} />
      <${Choice} name="Head" value=${head} most=${look.heads} all="all, averaged" disabled=${layer === null}
        pick=${(to) => setOptions({ head: to })} />
    </div>
    ${layer !== null && !hasAttention(look, layer) ? html`<p class="quiet small">Layer ${layer} has no attention.</p>`
      : weights ? html`<${Targets} row=${weights} tokens=${look.tokens} />` : html`<${Pending} ...${heads} />`}
    ${look.position > 0 && html`<${First} look=${look} row=${row} />`}
    <${HeadMap} look=${look} />`;
}

function rowOf({ attention }, layer, head) {
  if (head !== null) return attention.by_head[0][head - 1];
  return layer === null ? attention.mean : attention.by_layer[layer - 1];
}

/** Weights without the first token, rescaled to sum to one. */
export function withoutFirstToken(row) {
  const sum = row.reduce((sum, weight, at) => (at ? sum + weight : 0), 0);
  return row.map((weight, at) => (at && sum > 0 ? weight / sum : 0));
}

function Choice({ name, value, most, all, disabled = false, pick }) {
  return html`<label class="small">${name}${" "}
    <select class="field inside-choice" value=${value ?? ""} disabled=${disabled}
      onChange=${(event) => pick(event.target.value === "" ? null : Number(event.target.value))}>
      <option value="">${all}</option>
      ${Array.from({ length: most }, (_, at) => html`<option value=${at + 1}>${at + 1}</option>`)}
    </select></label>`;
}

export function Targets({ row, tokens }) {
  const best = strongest(row, 5);
  if (!best.length) return html`<p class="quiet small">No other weights.</p>`;
  return html`<ol class="inside-targets" aria-label="Largest attention weights">
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
    ${weight >= SINK_WEIGHT && html`<p data-sink="true">${percent(weight)} goes to the first token,${" "}
      ${visibleText(look.tokens[0].text)}: an attention sink, used by heads that find nothing relevant.</p>`}
    <label><input type="checkbox" checked=${options.withoutFirst}
      onChange=${(event) => setOptions({ withoutFirst: event.target.checked })} /> Without the first token</label>
    ${options.withoutFirst && html`<span class="quiet"> (the rest is scaled to 100 %)</span>`}
  </div>`;
}
