// The map of branches: labels, layout in lanes, and the drawing as SVG lines under a tree of items.

import { count, html, isBlank, plural, useLayoutEffect, useMemo, useRef, useState, visibleText } from "../lib.js";

const LABEL = 80; // characters

const oneLine = (text) => (isBlank(text) ? "" : text.replace(/\s+/g, " ").trim());
const truncate = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Number of steps, also of a branch whose steps are not loaded. */
export const lengthOf = (branch) =>
  branch.isLoaded ? branch.steps.length : Math.max(branch.length ?? 0, branch.steps.length);

/** The text of a branch after its fork, up to `most` characters. */
export function ownWords(branch, most = LABEL) {
  const words = oneLine(beginning(branch, most, "text")) || oneLine(branch.preview ?? "");
  // Only blanks or special tokens: show them visibly.
  return truncate(words || visibleText(beginning(branch, most, "piece") || branch.preview || ""), most);
}

function beginning(branch, most, part) {
  let words = "";
  for (let at = branch.forked_at ?? 0; at < branch.steps.length && words.length <= most; at += 1) {
    words += branch.steps[at][part];
  }
  return words;
}

/** The label of a branch: its name, or the start of its text. */
export const labelOf = (branch) => oneLine(branch.name ?? "") || ownWords(branch) || "(empty)";

/** The label of a branch in quotes. */
export const quoted = (branch, most = 32) => `“${truncate(branch.label ?? labelOf(branch), most)}”`;

/** The last user message of the prompt, or the whole prompt. */
export function promptWords(branch) {
  const question = branch.prompt?.messages?.findLast((message) => message.role === "user");
  const words = typeof question?.content === "string" ? question.content : branch.prompt?.text;
  if (words === undefined) return `(${plural(branch.prompt_tokens ?? 0, "token")})`;
  return oneLine(words) || "(empty)";
}

/** Where a branch was forked, as a phrase; `item` is its item in the map, `from` the branch it forks in the map. */
export function originWords(item, from) {
  if (!from) return item.branch.parent == null ? "starts at the prompt" : "shares only the prompt";
  return `shares ${plural(item.start, "token")} with ${quoted(from)}`;
}

/** Branches whose name or text contains these letters (`hits`), and with their ancestors (`visible`). */
export function matching(branches, letters, fromOf) {
  const pattern = oneLine(letters).toLowerCase();
  const hits = new Set();
  const visible = new Set();
  for (const branch of branches) {
    const words = `${branch.name ?? ""} ${ownWords(branch, Infinity)}`.toLowerCase();
    if (!words.includes(pattern)) continue;
    hits.add(branch.id);
    for (let at = branch; at && !visible.has(at.id); at = fromOf(at)) visible.add(at.id);
  }
  return { hits, visible };
}

// -- layout -------------------------------------------------------------------------------------
//
// Steps run to the right, and every branch is a line in a lane. It starts where it forks from a line in a lane above.
// Late forks are next to their parent and early ones below them, so lines never cross. In that order each branch takes
// the first lane with room for its line and label, so lanes are reused.

const BEND = 60; // steps up to which the scale is nearly linear; logarithmic after that
const ENDS = [20, 30, 50, 75, 100, 150, 200, 300, 500, 750];

/** Number of steps at the end of the scale: round, so that it rarely changes. */
function scaleEnd(longest) {
  for (let unit = 1; ; unit *= 10) {
    const end = ENDS.find((candidate) => candidate * unit >= longest);
    if (end) return end * unit;
  }
}

/** Function from a number of steps to px; long texts are compressed. */
export function scale(longest, width) {
  const end = scaleEnd(longest);
  const span = Math.log1p(end / BEND);
  const x = (steps) => (Math.log1p(Math.min(steps, end) / BEND) / span) * width;
  return Object.assign(x, { end });
}

/** Round numbers of steps along a scale, with at least `apart` between them. */
function ticks(x, apart) {
  const rounds = [0];
  for (let unit = 10; unit <= x.end; unit *= 10) rounds.push(unit, 2 * unit, 5 * unit);
  const ticks = [];
  for (const steps of rounds.filter((round) => round <= x.end)) {
    if (!ticks.length || x(steps) - x(ticks.at(-1)) >= apart) ticks.push(steps);
  }
  return ticks.map((steps) => ({ steps, x: x(steps) }));
}

/** The branch whose line a branch forks in the map; null: only the prompt is shared.
 *
 * A fork inside the steps that the parent itself inherited is drawn at the parent's parent.
 */
export function origin(branch, byId) {
  let from = byId.get(branch.parent);
  const at = branch.forked_at ?? 0;
  const passed = new Set([branch.id]);
  while (from && at <= (byId.has(from.parent) ? from.forked_at ?? 0 : 0)) {
    if (passed.has(from.id)) return null;
    passed.add(from.id);
    from = byId.get(from.parent);
  }
  return from && at > 0 ? from : null;
}

/** Trees of branches, one for each group (same prompt), the newest first.
 *
 * A branch is `{id, parent, forked_at, length, created, group, writing}`. An item is `{id, branch, from, start, end,
 * level, children}`; parents come before their children. `visible`: ids of the branches to include; null: all.
 */
export function trees(branches, visible = null) {
  const byId = new Map(branches.map((branch) => [branch.id, branch]));
  const items = new Map();
  const visibleBranches = visible ? branches.filter((branch) => visible.has(branch.id)) : [...branches];
  for (const branch of visibleBranches.sort((a, b) => a.created - b.created)) {
    items.set(branch.id, { id: branch.id, branch, end: branch.length, children: [] });
  }
  const groups = new Map();
  for (const item of items.values()) {
    const from = items.get(origin(item.branch, byId)?.id) ?? null;
    item.from = from?.id ?? null;
    // A parent that was rewound since may be shorter than what it shares.
    item.start = from ? Math.min(item.branch.forked_at, from.end) : 0;
    item.end = Math.max(item.end, item.start);
    const { group } = item.branch;
    if (from) from.children.push(item);
    else if (groups.has(group)) groups.get(group).push(item);
    else groups.set(group, [item]);
  }
  return [...groups].reverse().map(([key, roots]) => ({ key, items: inOrder(roots, 1) }));
}

function inOrder(siblings, level) {
  siblings.sort((a, b) => b.start - a.start || a.branch.created - b.branch.created);
  return siblings.flatMap((item, place) => {
    Object.assign(item, { level, place: place + 1, siblings: siblings.length });
    return [item, ...inOrder(item.children, level + 1)];
  });
}

/** Assign lanes to the items of one tree; lane 0 is the prompt's.
 *
 * `x` converts steps to px; `width`, `shortest` (line), `gap` (after it) and `labelWidth(item)` are px. Returns the
 * number of lanes and sets `lane`, `x0`, `x1` and `room` (for the label) on each item.
 */
export function assignLanes(items, { x, width, shortest, gap, labelWidth }) {
  const lanes = [[{ low: -Infinity, high: Infinity }]];
  const placed = new Map();
  for (const item of items) {
    item.x0 = x(item.start);
    item.x1 = Math.max(x(item.end), item.x0 + shortest);
    // A branch that is being generated grows: nothing else goes into its lane.
    const high = item.branch.writing
      ? Infinity : Math.max(item.x1, item.x0 + labelWidth(item)) + gap;
    const above = placed.get(item.from)?.lane ?? 0;
    const free = (lane) => lane.every((interval) => high <= interval.low || interval.high < item.x0);
    let lane = above + 1;
    while (lane < lanes.length && !free(lanes[lane])) lane += 1;
    for (let passed = above + 1; passed < lane; passed += 1) {
      lanes[passed].push({ low: item.x0, high: item.x0 });
    }
    (lanes[lane] ??= []).push({ low: item.x0, high });
    item.lane = lane;
    placed.set(item.id, item);
  }
  for (const item of items) {
    const next = lanes[item.lane].map((interval) => interval.low).filter((low) => low > item.x0);
    item.room = Math.min(width, ...next.map((low) => low - gap / 2)) - item.x0;
  }
  return lanes.length;
}

// -- drawing ------------------------------------------------------------------------------------

const ROW = 1.85; // rem, of one lane: a label and the line below it
const LINE = 1.5; // rem, from the top of a lane to its line
const LEFT = 0.5; // rem, before step 0
const TURN = 0.5; // rem, corner radius at a fork
const SIDES = 1; // rem, padding of a label, as in map.css
const HINT_WAIT = 120; // ms, so that a passing pointer opens no hint

/** The width of an element and one rem, in px; updated when they change. */
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

/** The map. `hits`: branches that match the filter, or null; `inHand`: id of the focused item. */
export function Drawing({ trees, current, comparing, hits, inHand, onHand, onJump, onKey }) {
  const box = useRef(null);
  const measures = useMeasures(box);
  const [hint, setHint] = useState(null);
  const timer = useRef(0);
  const items = trees.flatMap((tree) => tree.items);
  const byId = new Map(items.map((item) => [item.id, item]));
  const plan = measures && arrangeTrees(trees, items, measures);
  const path = pathTo(current, byId);
  const stop = byId.has(inHand) ? inHand : byId.has(current) ? current : items[0]?.id;

  const showHint = (item, target, wait) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setHint(item && { id: item.id, target }), wait);
  };
  useLayoutEffect(() => () => clearTimeout(timer.current), []);

  // Keep the current branch visible by scrolling the map only.
  const isThere = Boolean(plan && byId.has(current));
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

  const hinted = hint && byId.get(hint.id);
  return html`<div class="map-view" ref=${box} onKeyDown=${pressed} onScroll=${() => setHint(null)}>
    ${plan && html`
      <${Scale} marks=${plan.marks} leftEdge=${plan.leftEdge} />
      ${plan.trees.map((tree) => html`<section class="map-tree" key=${tree.key}>
        <h2 id=${`map-${tree.items[0].id}`} title=${tree.words}><span class="quiet">Prompt</span> ${tree.words}</h2>
        <${Lines} tree=${tree} plan=${plan} path=${path} current=${current} comparing=${comparing} />
        <div role="tree" aria-labelledby=${`map-${tree.items[0].id}`}
             style=${{ height: `${tree.height}px` }}>
          ${tree.items.map((item) => html`<${Item} key=${item.id} item=${item} plan=${plan}
            from=${byId.get(item.from)?.branch} isCurrent=${item.id === current}
            kind=${[path.has(item.id) && "on-path", item.id === comparing && "compared",
              hits && !hits.has(item.id) && "passed"].filter(Boolean).join(" ")}
            isStop=${item.id === stop} onHand=${onHand} onJump=${onJump} onHint=${showHint} />`)}
        </div>
      </section>`)}`}
    ${hinted && html`<${Hint} item=${hinted} from=${byId.get(hinted.from)?.branch} target=${hint.target} />`}
  </div>`;
}

const itemOf = (box, id) => box.querySelector(`[data-branch="${CSS.escape(id)}"]`);

/** The branches from the root to the current one, each with the step at which the path forks off. */
function pathTo(current, byId) {
  const path = new Map();
  for (let item = byId.get(current), leaves = null; item; item = byId.get(item.from)) {
    path.set(item.id, leaves);
    leaves = item.start;
  }
  return path;
}

const pen = document.createElement("canvas").getContext("2d");

/** Width of a label in bold. */
function labelWidth(label, rem) {
  pen.font = `600 ${0.85 * rem}px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(label).width;
}

/** Layout of all trees, in px. */
function arrangeTrees(trees, items, { rem, width }) {
  const leftEdge = LEFT * rem;
  const within = Math.max(width - leftEdge, 12 * rem);
  const labels = Math.min(11 * rem, within * 0.42); // minimum width of a label
  const x = scale(Math.max(1, ...items.map((item) => item.end)), within - labels);
  const placed = trees.map((tree) => {
    const lanes = assignLanes(tree.items, {
      x, width: within, shortest: 0.8 * rem, gap: 1.2 * rem,
      labelWidth: (item) => Math.min(labels, labelWidth(item.branch.label, rem) + SIDES * rem),
    });
    const height = (lanes - 1) * ROW * rem;
    return { ...tree, height, words: promptWords(tree.items[0].branch) };
  });
  return { trees: placed, leftEdge, rem, x, marks: ticks(x, 2.2 * rem) };
}

function Scale({ marks, leftEdge }) {
  return html`<div class="map-scale quiet" aria-hidden="true">${marks.map(({ steps, x }) => html`
    <span key=${steps} class="map-tick" style=${{ left: `${leftEdge + x}px` }}>${count(steps)}</span>`)}
    <span class="map-unit">tokens</span></div>`;
}

// -- lines ------------------------------------------------------------------------------------

const half = (px) => Math.round(px * 2) / 2;

/** SVG path from the fork on the line above, around the corner, to `x1`. */
function branchPath(item, above, { leftEdge, rem }, x1) {
  const [x, y] = [leftEdge + item.x0, laneY(item.lane, rem)];
  const start = above === null ? 0 : laneY(above, rem);
  const turn = Math.min(TURN * rem, y - start);
  const end = Math.max(leftEdge + x1, x + turn);
  return `M${half(x)} ${half(start)}V${half(y - turn)}Q${half(x)} ${half(y)} ${half(x + turn)} ${half(y)}H${half(end)}`;
}

/** The y of a lane's line; lane 1 is the first below the prompt. */
const laneY = (lane, rem) => ((lane - 1) * ROW + LINE) * rem;

function Lines({ tree, plan, path, current, comparing }) {
  const { leftEdge, rem, x } = plan;
  const lanes = new Map(tree.items.map((item) => [item.id, item.lane]));
  const above = (item) => lanes.get(item.from) ?? null;
  const lines = tree.items.map((item) => ({ item, d: branchPath(item, above(item), plan, item.x1) }));
  const lit = tree.items.filter((item) => path.has(item.id)).map((item) => {
    const leaves = path.get(item.id);
    return branchPath(item, above(item), plan, leaves === null ? item.x1 : x(leaves));
  });
  const forks = new Map(tree.items.filter((item) => item.from).map((item) => [
    `${item.from} ${item.start}`, { x: leftEdge + item.x0, y: laneY(above(item), rem), on: path.has(item.id) },
  ]));
  const ends = tree.items.map((item) => ({
    id: item.id, x: half(leftEdge + item.x1), y: half(laneY(item.lane, rem)),
    kind: [item.id === current && "current", item.branch.writing && "growing",
      item.id === comparing && "compared"].filter(Boolean).join(" "),
  }));
  // Redraw only if something moved by half a pixel: a text that streams calls this often.
  const key = JSON.stringify([lines.map(({ d }) => d), lit, [...forks], ends]);
  return useMemo(() => html`<svg class="map-lines" aria-hidden="true" height=${tree.height}>
    ${lines.map(({ item, d }) => html`<path key=${item.id} d=${d}
      class=${item.id === comparing ? "compared" : ""} />`)}
    ${lit.map((d, number) => html`<path key=${`lit ${number}`} class="lit" d=${d} />`)}
    <circle class=${lit.length ? "begin lit" : "begin"} cx=${leftEdge} cy=${3} r=${3} />
    ${ends.map(({ id, x: cx, y, kind }) => html`<circle key=${`end ${id}`} class=${`end ${kind}`}
      cx=${cx} cy=${y} r=${0.22 * rem} />`)}
    ${[...forks].map(([place, fork]) => html`<circle key=${place} class=${fork.on ? "fork lit" : "fork"}
      cx=${half(fork.x)} cy=${half(fork.y)} r=${0.2 * rem} />`)}
  </svg>`, [key]);
}

// -- items ------------------------------------------------------------------------------------

function Item({ item, plan, from, isCurrent, kind, isStop, onHand, onJump, onHint }) {
  const { branch } = item;
  const place = {
    left: `${half(plan.leftEdge + item.x0)}px`, top: `${(item.lane - 1) * ROW}rem`,
    width: `${half(item.room)}px`, height: `${ROW}rem`,
  };
  const key = JSON.stringify([place, branch.label, branch.name, branch.length, branch.writing, from?.label,
    item.start, item.level, item.place, item.siblings, isCurrent, kind, isStop]);
  return useMemo(() => html`<div role="treeitem" class=${`map-item ${kind}`} style=${place}
      data-branch=${item.id} data-from=${item.from ?? ""} data-start=${item.start}
      tabindex=${isStop ? 0 : -1} aria-selected=${isCurrent} aria-label=${itemLabel(item, from)}
      aria-level=${item.level} aria-posinset=${item.place} aria-setsize=${item.siblings}
      onClick=${() => onJump(item.id)}
      onFocus=${(event) => { onHand(item.id); if (event.currentTarget.matches(":focus-visible")) onHint(item, event.currentTarget, 0); }}
      onBlur=${() => onHint(null, null, 0)}
      onPointerEnter=${(event) => event.pointerType === "mouse" && onHint(item, event.currentTarget, HINT_WAIT)}
      onPointerLeave=${() => onHint(null, null, 0)}>
    <span class=${branch.name ? "named" : ""}>${branch.label}</span>
  </div>`, [key]);
}

const itemLabel = (item, from) => `${item.branch.label}: ${plural(item.branch.length, "token")}, ${
  originWords(item, from)}${item.branch.writing ? ", generating" : ""}`;

const HINT_WIDTH = 352; // px, as in map.css

/** Position of the hint: beside the map if there is room, else below or above the item. */
function hintPlace(item, view) {
  const isLow = item.bottom > innerHeight * 0.6;
  if (view.left > HINT_WIDTH + 24) {
    const side = { left: `${view.left - HINT_WIDTH - 16}px` };
    return isLow ? { ...side, bottom: `${innerHeight - item.bottom}px` } : { ...side, top: `${item.top}px` };
  }
  const leftPx = `${Math.max(8, Math.min(item.left, innerWidth - 8 - HINT_WIDTH))}px`;
  return isLow ? { left: leftPx, bottom: `${innerHeight - item.top + 4}px` } : { left: leftPx, top: `${item.bottom + 4}px` };
}

/** A preview of a branch's text; screen readers get the same from its label. */
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
