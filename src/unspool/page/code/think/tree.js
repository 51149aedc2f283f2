// The search tree: its layout, and the drawing with a card for every node, lines to its parent, and the winning path.
//
// Each node is one column right of its parent. Each leaf has its own row; another node is in the row of its first child.

import { html, plural, useLayoutEffect, useRef, useWidth } from "../lib.js";
import { isPruned, openNode, pathTo, scoreText, thinking } from "./runs.js";

/**
 * Lay out the nodes for which `shows(number)` is true. Returns `{items, rows, columns}`; an item is `{node, row, column,
 * level, place, siblings, isLeaf}`, parents before their children.
 */
function layOutTree(nodes, shows) {
  const items = [];
  let rows = 0;
  let columns = 0;
  const placeNode = (number, column, place, siblings) => {
    const node = nodes[number];
    const children = node.children.filter(shows);
    const item = { node, column, row: rows, level: column + 1, place, siblings, isLeaf: children.length === 0 };
    items.push(item);
    columns = Math.max(columns, column + 1);
    children.forEach((child, at) => placeNode(child, column + 1, at + 1, children.length));
    if (item.isLeaf) rows += 1;
  };
  if (nodes.length) placeNode(0, 0, 1, 1);
  return { items, rows, columns };
}

// -- drawing: one tab stop; arrow keys move between nodes -------------------------------------------

const ROW = 2.1; // rem, as in think.css
const GAP = 1.4; // rem, between two columns, for the lines
const FIRST = 4.6; // rem, the prompt
const LEAST = 8.5; // rem, a column; more columns scroll
const TURN = 0.4; // rem, the radius of a corner

export function SearchTree() {
  const [outer, width] = useWidth();
  const box = useRef(null);
  const touched = useRef(false); // the user scrolled: do not scroll automatically
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const { nodes, open, winner, running, hides } = thinking;
  const way = new Set(winner === null ? [] : pathTo(winner).map(({ number }) => number));
  const shows = (number) => !hides || number === open || !isPruned(number);
  const { items, rows, columns } = layOutTree(nodes, shows);
  const column = Math.max(LEAST, (width / rem - FIRST) / Math.max(1, columns - 1) - GAP);
  const columnLeft = (at) => (at === 0 ? 0 : FIRST + GAP + (at - 1) * (column + GAP));
  const totalWidth = columnLeft(Math.max(1, columns - 1)) + column;
  const scores = nodes.map(({ score }) => score).filter((score) => score != null);
  const [worst, best] = [Math.min(...scores), Math.max(...scores)];
  const share = (score) => (score == null ? null : best > worst ? (score - worst) / (best - worst) : 1);
  const newest = winner ?? nodes.length - 1;

  useLayoutEffect(() => {
    if (running && nodes.length < 2) touched.current = false;
    if (!touched.current) scrollIntoBox(box.current, newest);
  }, [newest, running, width]);

  const focus = (item) => item && box.current.querySelector(`[data-node="${item.node.number}"]`)?.focus();
  const keys = (event) => {
    const at = items.findIndex(({ node }) => String(node.number) === event.target.dataset.node);
    if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const { node } = items[at];
    const next = {
      ArrowDown: items[at + 1], ArrowUp: items[at - 1], Home: items[0], End: items.at(-1),
      ArrowLeft: items.find((item) => item.node.number === node.parent), ArrowRight: items.find((item) => item.node.parent === node.number),
    };
    if (event.key in next) focus(next[event.key]);
    else if (event.key === "Enter" || event.key === " ") openNode(node.number);
    else return;
    event.preventDefault();
  };
  const touch = () => { touched.current = true; };
  const stop = items.some(({ node }) => node.number === open) ? open : 0;
  return html`<div ref=${outer}><div class="think-tree" ref=${box} onKeyDown=${(event) => { touch(); keys(event); }}
      onPointerDown=${touch} onWheel=${touch}>
    <${Lines} items=${items} way=${way} columnLeft=${columnLeft} column=${column} size=${{ width: totalWidth * rem, height: rows * ROW * rem }} rem=${rem} />
    <div role="tree" aria-label="Search tree" style=${{ width: `${totalWidth}rem`, height: `${rows * ROW}rem` }}>
      ${items.map((item) => html`<${Card} key=${item.node.number} item=${item} isStop=${item.node.number === stop} share=${share(item.node.score)}
        onWay=${way.has(item.node.number)} place=${{ left: `${columnLeft(item.column)}rem`, top: `${item.row * ROW}rem`,
          [item.isLeaf && item.column ? "maxWidth" : "width"]: `${item.column === 0 ? FIRST : item.isLeaf ? totalWidth - columnLeft(item.column) : column}rem` }} />`)}
    </div></div></div>`;
}

/** Scroll the tree, and nothing else, until the newest node is visible. */
function scrollIntoBox(box, number) {
  const card = box.querySelector(`[data-node="${number}"]`);
  if (!card) return;
  const [view, item] = [box, card].map((part) => part.getBoundingClientRect());
  box.scrollTop += Math.max(0, item.bottom - view.bottom + 8) - Math.max(0, view.top - item.top + 8);
  box.scrollLeft += Math.max(0, item.right - view.right + 8) - Math.max(0, view.left - item.left + 8);
}

function Lines({ items, way, columnLeft, column, size, rem }) {
  const byNumber = new Map(items.map((item) => [item.node.number, item]));
  const y = (item) => (item.row + 0.5) * ROW;
  const lines = items.filter(({ node }) => byNumber.has(node.parent)).map((item) => {
    const above = byNumber.get(item.node.parent);
    const [from, to] = [columnLeft(above.column) + (above.column ? column : FIRST), columnLeft(item.column)];
    const bend = to - GAP / 2;
    const [y0, y1] = [y(above), y(item)];
    const px = (...places) => places.map((place) => Math.round(place * rem * 2) / 2).join(" ");
    const d = y0 === y1 ? `M${px(from, y0)}H${px(to)}`
      : `M${px(from, y0)}H${px(bend - TURN)}Q${px(bend, y0, bend, y0 + TURN)}V${px(y1 - TURN)}Q${px(bend, y1, bend + TURN, y1)}H${px(to)}`;
    const { number } = item.node;
    return { number, d, look: way.has(number) ? "lit" : isPruned(number) ? "lost" : "" };
  });
  lines.sort((a, b) => (a.look === "lit") - (b.look === "lit")); // the winning path on top
  return html`<svg class="think-lines" aria-hidden="true" width=${size.width} height=${size.height}>
    ${lines.map(({ number, d, look }) => html`<path key=${number} d=${d} class=${look} />`)}</svg>`;
}

function Card({ item, isStop, share, onWay, place }) {
  const { node, level, place: at, siblings } = item;
  const { number, text, score, pruned } = node;
  const isWinner = number === thinking.winner;
  const isRoot = number === 0;
  const lost = isPruned(number);
  const look = ["think-card", isWinner && "winner", onWay && "on-way", lost && "lost", score === null && "failed"].filter(Boolean).join(" ");
  const states = [isWinner && "winner", lost && "pruned", score === null && "the verifier failed", node.finished && "ended"].filter(Boolean);
  const label = isRoot ? "The prompt" : `Text ${number}: ${text.trim() || "empty"}; ${[score == null ? null : `score ${scoreText(score)}`,
    ...states, plural(node.tokens.length, "token")].filter(Boolean).join(", ")}`;
  return html`<div role="treeitem" class=${look} style=${place} data-node=${number} data-parent=${node.parent ?? ""} data-pruned=${Boolean(pruned)}
      tabindex=${isStop ? 0 : -1} aria-selected=${number === thinking.open} aria-label=${label} aria-level=${level} aria-posinset=${at}
      aria-setsize=${siblings} title=${isRoot ? null : text.trim()} onClick=${() => openNode(number)}>
    ${isRoot ? html`<span class="think-words">Prompt</span>` : html`
      ${isWinner && html`<span aria-hidden="true">★</span>`}
      <span class="think-score">${score === null ? "failed" : score === undefined ? "" : scoreText(score)}</span>
      <span class="think-words" dir="auto">${text.replace(/\s+/g, " ").trim() || "∅"}</span>
      ${share !== null && html`<span class="think-share" style=${{ width: `${share * 100}%` }} />`}`}
  </div>`;
}
