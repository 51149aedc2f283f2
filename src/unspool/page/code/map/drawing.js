// The map itself: lines in one picture for each prompt, with the branches over it as a tree of items.

import { count, html, plural, useLayoutEffect, useMemo, useRef, useState } from "../lib.js";
import { originWords, ownWords, promptWords } from "./facts.js";
import { layOut, scale, ticks } from "./layout.js";

const ROW = 1.85; // rem, of one lane: a label and the line below it
const LINE = 1.5; // rem, from the top of a lane to its line
const LEFT = 0.5; // rem, before step 0
const TURN = 0.5; // rem, the radius with which a line leaves its parent
const SIDES = 1; // rem, left and right of a label, as in the style
const HINT_WAIT = 120; // ms, so that a pointer on its way does not open every hint

/** The width of an element and the size of a letter, in px; told again when they change. */
function useMeasures(ref) {
  const [measures, set] = useState(null);
  useLayoutEffect(() => {
    const look = () => {
      const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
      const width = Math.floor(ref.current.clientWidth);
      set((old) => (old?.rem === rem && old.width === width ? old : { rem, width }));
    };
    const observer = new ResizeObserver(look);
    observer.observe(ref.current);
    look();
    return () => observer.disconnect();
  }, []);
  return measures;
}

/**
 * `trees` as `layout.js` makes them; `current` and `comparing` are ids; `hits` are the branches that
 * a filter found, or null; `inHand` is where the keys are. `onHand(id)`, `onJump(id)` and
 * `onKey(event, id)` say what a person does.
 */
export function Drawing({ trees, current, comparing, hits, inHand, onHand, onJump, onKey }) {
  const box = useRef(null);
  const measures = useMeasures(box);
  const [hint, setHint] = useState(null);
  const timer = useRef(0);
  const items = trees.flatMap((tree) => tree.items);
  const byId = new Map(items.map((item) => [item.id, item]));
  const drawn = measures && arranged(trees, items, measures);
  const path = pathTo(current, byId);
  const stop = byId.has(inHand) ? inHand : byId.has(current) ? current : items[0]?.id;

  const showHint = (item, target, wait) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setHint(item && { id: item.id, target }), wait);
  };
  useLayoutEffect(() => () => clearTimeout(timer.current), []);

  // The current branch stays in sight, without moving anything but the map.
  const isThere = Boolean(drawn && byId.has(current));
  useLayoutEffect(() => {
    if (!isThere) return;
    const [view, item] = [box.current, itemOf(box.current, current)].map((part) => part.getBoundingClientRect());
    const margin = 2 * item.height;
    if (item.top < view.top + margin) box.current.scrollTop -= view.top + margin - item.top;
    else if (item.bottom > view.bottom - margin) box.current.scrollTop += item.bottom - view.bottom + margin;
  }, [current, isThere]);

  function pressed(event) {
    const id = event.target.dataset.branch;
    const item = byId.get(id);
    if (!item || event.altKey || event.ctrlKey || event.metaKey) return;
    const place = items.indexOf(item);
    const next = {
      ArrowDown: items[place + 1], ArrowUp: items[place - 1],
      ArrowLeft: byId.get(item.from), ArrowRight: item.children.find((child) => byId.has(child.id)),
      Home: items[0], End: items.at(-1),
    };
    if (event.key in next) {
      event.preventDefault();
      if (next[event.key]) itemOf(box.current, next[event.key].id)?.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      onJump(id);
    } else if (event.key === "Escape" && hint) {
      event.stopPropagation();
      setHint(null);
    } else onKey(event, id);
  }

  const shown = hint && byId.get(hint.id);
  return html`<div class="map-view" ref=${box} onKeyDown=${pressed} onScroll=${() => setHint(null)}>
    ${drawn && html`
      <${Scale} marks=${drawn.marks} left=${drawn.left} />
      ${drawn.trees.map((tree) => html`<section class="map-tree" key=${tree.key}>
        <h2 id=${`map-${tree.items[0].id}`} title=${tree.words}><span class="quiet">Prompt</span> ${tree.words}</h2>
        <${Lines} tree=${tree} drawn=${drawn} path=${path} current=${current} comparing=${comparing} />
        <div role="tree" aria-labelledby=${`map-${tree.items[0].id}`}
             style=${{ height: `${tree.height}px` }}>
          ${tree.items.map((item) => html`<${Item} key=${item.id} item=${item} drawn=${drawn}
            from=${byId.get(item.from)?.branch} isCurrent=${item.id === current}
            kind=${[path.has(item.id) && "on-path", item.id === comparing && "compared",
              hits && !hits.has(item.id) && "passed"].filter(Boolean).join(" ")}
            isStop=${item.id === stop} onHand=${onHand} onJump=${onJump} onHint=${showHint} />`)}
        </div>
      </section>`)}`}
    ${shown && html`<${Hint} item=${shown} from=${byId.get(shown.from)?.branch} target=${hint.target} />`}
  </div>`;
}

const itemOf = (box, id) => box.querySelector(`[data-branch="${CSS.escape(id)}"]`);

/** The branches from the root to the current one, each with the step at which the path leaves it. */
function pathTo(current, byId) {
  const path = new Map();
  for (let item = byId.get(current), leaves = null; item; item = byId.get(item.from)) {
    path.set(item.id, leaves);
    leaves = item.start;
  }
  return path;
}

const pen = document.createElement("canvas").getContext("2d");

/** How wide a label is in its heaviest type; letters are of all widths, so they are measured. */
function wordsWidth(label, rem) {
  pen.font = `600 ${0.85 * rem}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(label).width;
}

/** Everything in px. */
function arranged(trees, items, { rem, width }) {
  const left = LEFT * rem;
  const within = Math.max(width - left, 12 * rem);
  const labels = Math.min(11 * rem, within * 0.42); // what a label has at the least
  const x = scale(Math.max(1, ...items.map((item) => item.end)), within - labels);
  const placed = trees.map((tree) => {
    const lanes = layOut(tree.items, {
      x, width: within, shortest: 0.8 * rem, gap: 1.2 * rem,
      labelWidth: (item) => Math.min(labels, wordsWidth(item.branch.label, rem) + SIDES * rem),
    });
    const height = (lanes - 1) * ROW * rem;
    return { ...tree, height, words: promptWords(tree.items[0].branch) };
  });
  return { trees: placed, left, rem, x, marks: ticks(x, 2.2 * rem) };
}

function Scale({ marks, left }) {
  return html`<div class="map-scale quiet" aria-hidden="true">${marks.map(({ steps, x }) => html`
    <span key=${steps} class="map-tick" style=${{ left: `${left + x}px` }}>${count(steps)}</span>`)}
    <span class="map-unit">tokens</span></div>`;
}

// -- lines ------------------------------------------------------------------------------------

const half = (px) => Math.round(px * 2) / 2;

/** From where a branch leaves the line above it, round the corner, to `x1`. */
function way(item, above, { left, rem }, x1) {
  const [x, y] = [left + item.x0, laneY(item.lane, rem)];
  const start = above === null ? 0 : laneY(above, rem);
  const turn = Math.min(TURN * rem, y - start);
  const end = Math.max(left + x1, x + turn);
  return `M${half(x)} ${half(start)}V${half(y - turn)}Q${half(x)} ${half(y)} ${half(x + turn)} ${half(y)}H${half(end)}`;
}

/** The line of a lane; lane 1 is the first below the prompt. */
const laneY = (lane, rem) => ((lane - 1) * ROW + LINE) * rem;

function Lines({ tree, drawn, path, current, comparing }) {
  const { left, rem, x } = drawn;
  const lanes = new Map(tree.items.map((item) => [item.id, item.lane]));
  const above = (item) => lanes.get(item.from) ?? null;
  const lines = tree.items.map((item) => ({ item, d: way(item, above(item), drawn, item.x1) }));
  const lit = tree.items.filter((item) => path.has(item.id)).map((item) => {
    const leaves = path.get(item.id);
    return way(item, above(item), drawn, leaves === null ? item.x1 : x(leaves));
  });
  const forks = new Map(tree.items.filter((item) => item.from).map((item) => [
    `${item.from} ${item.start}`, { x: left + item.x0, y: laneY(above(item), rem), on: path.has(item.id) },
  ]));
  const ends = tree.items.map((item) => ({
    id: item.id, x: half(left + item.x1), y: half(laneY(item.lane, rem)),
    kind: [item.id === current && "current", item.branch.writing && "growing",
      item.id === comparing && "compared"].filter(Boolean).join(" "),
  }));
  // What has not moved by half a pixel is not drawn again: a text that streams calls often.
  const key = JSON.stringify([lines.map(({ d }) => d), lit, [...forks], ends]);
  return useMemo(() => html`<svg class="map-lines" aria-hidden="true" height=${tree.height}>
    ${lines.map(({ item, d }) => html`<path key=${item.id} d=${d}
      class=${item.id === comparing ? "compared" : ""} />`)}
    ${lit.map((d, number) => html`<path key=${`lit ${number}`} class="lit" d=${d} />`)}
    <circle class=${lit.length ? "begin lit" : "begin"} cx=${left} cy=${3} r=${3} />
    ${ends.map(({ id, x: cx, y, kind }) => html`<circle key=${`end ${id}`} class=${`end ${kind}`}
      cx=${cx} cy=${y} r=${0.22 * rem} />`)}
    ${[...forks].map(([place, fork]) => html`<circle key=${place} class=${fork.on ? "fork lit" : "fork"}
      cx=${half(fork.x)} cy=${half(fork.y)} r=${0.2 * rem} />`)}
  </svg>`, [key]);
}

// -- items ------------------------------------------------------------------------------------

function Item({ item, drawn, from, isCurrent, kind, isStop, onHand, onJump, onHint }) {
  const { branch } = item;
  const place = {
    left: `${half(drawn.left + item.x0)}px`, top: `${(item.lane - 1) * ROW}rem`,
    width: `${half(item.room)}px`, height: `${ROW}rem`,
  };
  const key = JSON.stringify([place, branch.label, branch.name, branch.length, branch.writing, from?.label,
    item.start, item.level, item.place, item.siblings, isCurrent, kind, isStop]);
  return useMemo(() => html`<div role="treeitem" class=${`map-item ${kind}`} style=${place}
      data-branch=${item.id} data-from=${item.from ?? ""} data-start=${item.start}
      tabindex=${isStop ? 0 : -1} aria-selected=${isCurrent} aria-label=${spoken(item, from)}
      aria-level=${item.level} aria-posinset=${item.place} aria-setsize=${item.siblings}
      onClick=${() => onJump(item.id)}
      onFocus=${(event) => { onHand(item.id); if (event.currentTarget.matches(":focus-visible")) onHint(item, event.currentTarget, 0); }}
      onBlur=${() => onHint(null, null, 0)}
      onPointerEnter=${(event) => event.pointerType === "mouse" && onHint(item, event.currentTarget, HINT_WAIT)}
      onPointerLeave=${() => onHint(null, null, 0)}>
    <span class=${branch.name ? "named" : ""}>${branch.label}</span>
  </div>`, [key]);
}

const spoken = (item, from) => `${item.branch.label}: ${plural(item.branch.length, "token")}, ${
  originWords(item, from)}${item.branch.writing ? ", being written" : ""}`;

const HINT_WIDTH = 352; // px, as in the style

/** Beside the map if there is room, and else under or over the item: in px of the window. */
function hintPlace(item, view) {
  const isLow = item.bottom > innerHeight * 0.6;
  if (view.left > HINT_WIDTH + 24) {
    const side = { left: `${view.left - HINT_WIDTH - 16}px` };
    return isLow ? { ...side, bottom: `${innerHeight - item.bottom}px` } : { ...side, top: `${item.top}px` };
  }
  const left = `${Math.max(8, Math.min(item.left, innerWidth - 8 - HINT_WIDTH))}px`;
  return isLow ? { left, bottom: `${innerHeight - item.top + 4}px` } : { left, top: `${item.bottom + 4}px` };
}

/** The words of a branch, beside or under its label; the labels say the same to those who hear the page. */
function Hint({ item, from, target }) {
  const { branch } = item;
  const words = ownWords(branch, 280);
  const place = hintPlace(target.getBoundingClientRect(), target.closest(".map-view").getBoundingClientRect());
  return html`<div class="map-hint panel" aria-hidden="true" style=${place}>
    ${branch.name && html`<p class="map-name">${branch.name}</p>`}
    ${words && html`<p class="map-words">${item.start > 0 ? "… " : ""}${words}</p>`}
    <p class="quiet small">${plural(branch.length, "token")}, ${originWords(item, from)}</p>
  </div>`;
}
