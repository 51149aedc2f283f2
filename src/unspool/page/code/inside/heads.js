// A small map of all heads: a column for each layer, a row for each head.

import { clamp, html, percent, spelled, useChanges, useMemo, useState, useWidth } from "../lib.js";
import { choice, choose, chosenIn } from "./choice.js";
import { attends } from "./states.js";

const LEFT = 22; // for the heads' numbers
const TOP = 16; // for the layers' numbers
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export function HeadMap({ look }) {
  useChanges("inside");
  const [frame, width] = useWidth();
  const [active, setActive] = useState({ layer: 1, head: 1 });
  const [pointed, point] = useState(null);
  const { layers, heads, attention, tokens, position } = look;
  const there = active.layer <= layers && active.head <= heads;
  const map = (choice.withoutFirst && attention.map_without_first) || attention.map;
  const chosen = chosenIn(look);
  const size = { wide: (width - LEFT) / layers, high: clamp((width - LEFT) / layers, 4, 15) };
  const x = (layer) => LEFT + (layer - 1) * size.wide;
  const y = (head) => TOP + (head - 1) * size.high;
  const shade = (layer, head) => shadeOf(map, choice.shade, layer, head, position);
  const says = (layer, head) => {
    if (!attends(look, layer)) return `layer ${layer} has no attention`;
    const at = map.place[layer - 1][head - 1];
    const most = percent(map.weight[layer - 1][head - 1]);
    return `layer ${layer} head ${head} looks most at ${spelled(tokens[at].text)} ${most}`;
  };
  const cells = useMemo(
    () => Array.from({ length: heads }, (_, row) => html`<g role="row">
      ${Array.from({ length: layers }, (_, column) => html`<rect role="gridcell" id=${`inside-head-${column + 1}-${row + 1}`}
        data-layer=${column + 1} data-head=${row + 1} x=${x(column + 1) + 0.5} y=${y(row + 1) + 0.5}
        width=${Math.max(1, size.wide - 1)} height=${Math.max(1, size.high - 1)} rx="1.5"
        fill-opacity=${shade(column + 1, row + 1).toFixed(3)} aria-label=${says(column + 1, row + 1)} />`)}
    </g>`),
    [map, choice.shade, width],
  );
  const locate = ({ target }) => (target.dataset.head
    ? { layer: Number(target.dataset.layer), head: Number(target.dataset.head) } : null);
  const pick = (found) => {
    const again = found.layer === chosen.layer && found.head === chosen.head;
    choose(again ? { layer: null, head: null } : found);
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
    event.stopPropagation(); // these keys mean something else to the page
  };
  const told = pointed ?? (chosen.head === null ? null : chosen);
  const ring = (at, name) => html`<rect class=${name} x=${x(at.layer)} y=${y(at.head)}
    width=${size.wide} height=${size.high} rx="2" />`;
  return html`<div ref=${frame} class="inside-map">
    <div class="row spread"><h4>All heads</h4>
      <label class="small">shade by${" "}<select class="field inside-choice" value=${choice.shade}
        onChange=${(event) => choose({ shade: event.target.value })}>
        <option value="weight">strongest look</option><option value="entropy">how widely it looks</option>
      </select></label></div>
    <svg width=${width} height=${TOP + heads * size.high + 1} role="grid" tabindex="0"
      aria-label="Heads: a column for each layer, a row for each head" aria-colcount=${layers} aria-rowcount=${heads}
      aria-activedescendant=${there ? `inside-head-${active.layer}-${active.head}` : null}
      onFocus=${() => there && point(active)} onBlur=${() => point(null)} onKeyDown=${press}
      onPointerOver=${(event) => point(locate(event))} onPointerLeave=${() => point(null)}
      onClick=${(event) => {
        const found = locate(event);
        if (found) { setActive(found); pick(found); }
      }}>
      ${marks(layers, size.wide, 26).map((layer) => html`<text aria-hidden="true" x=${x(layer) + size.wide / 2} y="11"
        text-anchor="middle">${layer}</text>`)}
      ${marks(heads, size.high, 11).map((head) => html`<text aria-hidden="true" x=${LEFT - 5} y=${y(head) + size.high / 2}
        dy="0.35em" text-anchor="end">${head}</text>`)}
      ${cells}
      ${chosen.layer !== null && chosen.head === null && html`<rect class="inside-at" x=${x(chosen.layer)} y=${TOP}
        width=${size.wide} height=${heads * size.high} rx="2" />`}
      ${chosen.head !== null && ring(chosen, "inside-at")}
      ${pointed && ring(pointed, "inside-pointed")}
    </svg>
    <p class="small inside-told" role="status">${told ? says(told.layer, told.head)
      : html`<span class="quiet">Point at a head to read where it looks most; pick it for the arcs.</span>`}</p>
  </div>`;
}

/** 0 to 1; how widely: the entropy against that of looking at all tokens alike. */
function shadeOf(map, shade, layer, head, position) {
  if (shade === "weight") return map.weight[layer - 1][head - 1];
  return position === 0 ? 0 : clamp(map.entropy[layer - 1][head - 1] / Math.log(position + 1), 0, 1);
}

/** The numbers for which there is room: 1, and every so many. */
function marks(most, size, room) {
  const every = [1, 2, 5, 10, 20, 50].find((step) => step * size >= room) ?? 100;
  return Array.from({ length: most }, (_, at) => at + 1).filter((n) => n === 1 || n % every === 0)
    .filter((n, at, all) => at !== 1 || (n - all[0]) * size >= room);
}
