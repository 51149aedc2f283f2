// Attention over the text: an arc from the token that is read to those it looks at.

import { useEffect } from "../lib.js";
import { on } from "../state.js";
import { light, overlay, placeOf } from "../write/pane.js";

const MOST_ARCS = 25;
const LEAST = 0.002; // thinner ones could not be seen

/** The strongest of a row of attention, strongest first: `{at, weight}`. */
export function strongest(row, most = MOST_ARCS) {
  return row
    .map((weight, at) => ({ at, weight }))
    .filter(({ weight }) => weight >= LEAST)
    .sort((a, b) => b.weight - a.weight)
    .slice(0, most);
}

/** Light what the token at `from` looks at, mask what lies behind it, and put all away at the end. */
export function useArcs(from, row) {
  useEffect(() => {
    if (!row) return undefined;
    const most = Math.max(...row);
    // The root lets weak looks be seen beside a strong one; the numbers stand in the panel.
    const shades = row.map((weight) => (weight < LEAST ? 0 : Math.sqrt(weight / most)));
    const targets = strongest(row);
    const draw = () => {
      light(shades, from); // once more: tokens that were written since are masked too
      drawn(from, targets, most);
    };
    draw();
    const leave = on("layout", draw);
    return () => {
      leave();
      light(null);
      drawn(from, [], 1);
    };
  }, [from, row]);
}

function drawn(from, targets, most) {
  const over = overlay();
  over?.querySelector(".inside-arcs")?.remove();
  const start = over && targets.length ? placeOf(from) : null;
  if (!start) return;
  const group = shape("g", { class: "inside-arcs" });
  group.append(shape("rect", {
    class: "inside-reader", x: start.x - 1, y: start.y - 1,
    width: start.width + 2, height: start.height + 2, rx: 4,
  }));
  // The weak ones first, so that the strong lie on top.
  for (const { at, weight } of [...targets].reverse()) {
    const end = at === from ? null : placeOf(at);
    if (!end) continue;
    const strength = Math.sqrt(weight / most);
    group.append(shape("path", {
      d: way(start, end),
      "data-at": at,
      "stroke-width": (0.6 + 3.4 * Math.sqrt(weight)).toFixed(2),
      "stroke-opacity": (0.12 + 0.68 * strength).toFixed(2),
    }));
  }
  over.append(group);
}

/** From the upper edge of one token to that of the other, over what lies between. */
function way(start, end) {
  const [x, to] = [start.x + start.width / 2, end.x + end.width / 2];
  const rise = Math.min(start.height * 1.5, 5 + Math.hypot(x - to, start.y - end.y) * 0.25);
  const top = Math.max(1, end.y - rise); // not beyond the upper edge of the text
  return `M${x} ${start.y}C${x} ${top} ${to} ${top} ${to} ${end.y}`;
}

function shape(name, attributes) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  return found;
}
