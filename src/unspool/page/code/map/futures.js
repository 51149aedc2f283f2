// Futures: the most likely continuations of a text as an icicle. A column is a token, a height is a probability: the
// children of a token fill its height but for the other tokens, those that are less likely than the limit.

import { attempt, connect, jump, pushUndo, shorten } from "../actions.js";
import { api } from "../api.js";
import {
  clamp, count, html, isNarrow, percent, Piece, plural, useEffect, useLayoutEffect, useRef, useState, visibleText, useWidth,
} from "../lib.js";
import { adopt, currentBranch, promptLength, state } from "../state.js";

const LIMITS = [0.1, 0.05, 0.02, 0.01, 0.005, 0.001, 0.0001];
const DEPTHS = [2, 4, 6, 8, 12, 16, 32];
const MAX_NODES = 1000;
const SMALLEST_SPAN = 1e-7;
const MIN_HEIGHT = 3; // px: smaller ones are not drawn
const MIN_LABEL = 17; // px: smaller ones have no label

/** The steps that stay: up to the selected token, or all. */
function startOf(branch) {
  if (state.selected === null) return branch.steps.length;
  return clamp(state.selected - promptLength(branch) + 1, 0, branch.steps.length);
}

/** The button of the Branches panel, and its dialog. */
export function Futures() {
  const [isOpen, setOpen] = useState(false);
  const branch = currentBranch();
  if (!branch || branch.recorded) return null;
  return html`<button class="button tiny" type="button" id="show-futures" disabled=${state.writing !== null}
      title="The most likely continuations of the selected token, or of the text, as a tree" onClick=${() => setOpen(true)}>Futures</button>
    ${isOpen && html`<${FuturesDialog} branch=${branch} at=${startOf(branch)} close=${() => setOpen(false)} />`}`;
}

function FuturesDialog({ branch, at, close }) {
  const dialog = useRef(null);
  const [options, setOptions] = useState({ mass: 0.005, depth: 8, sampled: false });
  const [tree, again] = useGrowth(branch, at, options);
  const [hand, setHand] = useState(0);
  useLayoutEffect(() => {
    if (!dialog.current.open) dialog.current.showModal();
  }, []);
  useEffect(() => setHand(0), [tree.root]);
  const change = (name, read) => (event) => setOptions({ ...options, [name]: read(event.target.value) });
  const node = tree.nodes.get(hand) ?? tree.root;
  const open = async (node) => {
    if (!node.parent) return;
    if (await attempt(() => openFuture(branch, at, node))) dialog.current?.close();
  };
  return html`<dialog ref=${dialog} class="map-large futures" aria-labelledby="futures-title" onClose=${close}>
    <div class="map-head"><h2 id="futures-title">Futures</h2>
      <button class="button" type="button" onClick=${() => dialog.current.close()}>Close</button></div>
    <div class="row">
      <label class="small">Probabilities <select class="field" id="futures-law" value=${options.sampled ? "sampled" : "model"}
        onChange=${change("sampled", (value) => value === "sampled")}>
        <option value="model">of the model</option><option value="sampled">after sampling</option></select></label>
      <label class="small">down to <select class="field" id="futures-mass" value=${options.mass} onChange=${change("mass", Number)}>
        ${LIMITS.map((mass) => html`<option value=${mass}>${percent(mass)}</option>`)}</select></label>
      <label class="small">or <select class="field" id="futures-depth" value=${options.depth} onChange=${change("depth", Number)}>
        ${DEPTHS.map((depth) => html`<option value=${depth}>${depth} tokens</option>`)}</select></label>
      <span class="quiet small" role="status">${statusOf(tree)}</span>
      ${tree.fault && html`<span class="bad small" role="alert">${tree.fault}</span>
        <button class="button tiny" type="button" onClick=${again}>Try again</button>`}
    </div>
    <${Icicle} key=${tree.turn} tree=${tree} branch=${branch} at=${at} hand=${hand} setHand=${setHand} open=${open} />
    <${Path} branch=${branch} at=${at} node=${node} open=${open} />
  </dialog>`;
}

function statusOf({ nodes, isDone, isComplete, fault }) {
  if (fault) return "";
  const size = plural(nodes.size - 1, "token");
  if (!isDone) return `${size} …`;
  return isComplete ? size : `${size}: the largest masses; the tree has more`;
}

// -- growing ---------------------------------------------------------------------------------------

let turns = 0;

const emptyTree = () => {
  const root = { node: 0, parent: null, text: "", p: 1, mass: 1, y: 0, depth: 0, children: null, others: null };
  return { turn: ++turns, root, nodes: new Map([[0, root]]), isDone: false, isComplete: false, fault: null };
};

/** `[tree, again]`: a tree that grows while the dialog is open; other options start a new one. */
function useGrowth(branch, at, options) {
  const [, draw] = useState(0);
  const [turn, setTurn] = useState(0);
  const tree = useRef(emptyTree());
  useEffect(() => {
    const control = new AbortController();
    const growing = emptyTree();
    tree.current = growing;
    let frame = 0;
    const drawSoon = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        draw((n) => n + 1);
      });
    };
    (async () => {
      try {
        const body = { at, ...options, nodes: MAX_NODES, stream: true };
        for await (const { event, data } of api.stream(`/v1/tree/${branch.id}/futures`, body, { signal: control.signal })) {
          if (event === "grown") addChildren(growing, data);
          else if (event === "done") Object.assign(growing, { isDone: true, isComplete: data.complete });
          drawSoon();
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        growing.fault = error.message;
        if (error.isOffline) connect();
        drawSoon();
      }
    })();
    drawSoon();
    return () => {
      control.abort();
      cancelAnimationFrame(frame);
    };
  }, [branch.id, at, JSON.stringify(options), turn]);
  return [tree.current, () => setTurn((n) => n + 1)];
}

function addChildren({ nodes }, { node, children, other_probability: others }) {
  const parent = nodes.get(node);
  let y = parent.y;
  parent.others = others;
  parent.children = children.map((child) => {
    const added = { ...child, parent, y, depth: parent.depth + 1, children: null, others: null };
    y += child.mass;
    nodes.set(child.node, added);
    return added;
  });
}

const pathOf = (node) => {
  const path = [];
  for (let at = node; at.parent; at = at.parent) path.unshift(at);
  return path;
};

/** Fork the branch, and append the tokens of a path. */
async function openFuture(branch, at, node) {
  const tokens = pathOf(node).map(({ token }) => token);
  const forked = await api.post(`/v1/tree/${branch.id}/fork`, { at });
  adopt(forked);
  adopt(await api.post(`/v1/tree/${forked.id}/append`, { tokens }).catch(async (error) => {
    state.branches.delete(forked.id);
    api.delete(`/v1/tree/${forked.id}`).catch(() => {});
    throw error;
  }));
  const position = promptLength(branch) + at;
  const words = pathOf(node).map(({ text }) => text).join("");
  await jump(forked.id, position);
  pushUndo({
    label: `open “${shorten(words)}”`,
    before: { id: branch.id, length: null, selected: position },
    after: { id: forked.id, length: null, selected: position },
  });
}

// -- the drawing -----------------------------------------------------------------------------------

/** The visible part of the heights: `{top, span}` of 1. */
const clampView = (top, span) => {
  const size = clamp(span, SMALLEST_SPAN, 1);
  return { top: clamp(top, 0, 1 - size), span: size };
};

function Icicle({ tree, branch, at, hand, setHand, open }) {
  const [box, width] = useWidth(800);
  const [view, setView] = useState({ top: 0, span: 1 });
  const [height, setHeight] = useState(400);
  const pointers = useRef(new Map());
  const column = isNarrow() ? 84 : clamp(width / 9, 96, 150);
  useLayoutEffect(() => {
    const watch = new ResizeObserver(([entry]) => setHeight(entry.contentRect.height));
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const written = writtenPath(tree.root, branch, at);
  const zoom = (factor, place) => setView(({ top, span }) => {
    const size = clamp(span * factor, SMALLEST_SPAN, 1);
    return clampView(top + place * (span - size), size);
  });
  /** Show a node: its height, with some of its neighbours. */
  const focus = (node, share = 0.8) => {
    setView(clampView(node.y - (node.mass / share - node.mass) / 2, node.mass / share));
    box.current.scrollTo({ left: Math.max(0, (node.depth - 1.5) * column), behavior: "auto" });
  };
  const select = (node) => {
    setHand(node.node);
    const isSmall = (node.mass / view.span) * height < 20;
    const isOut = node.y + node.mass > view.top + view.span || node.y < view.top;
    if (isSmall) focus(node, 0.1);
    else if (isOut) setView(clampView(node.y + node.mass / 2 - view.span / 2, view.span));
    requestAnimationFrame(() => {
      const item = box.current?.querySelector(`[data-node="${node.node}"]`);
      item?.focus({ preventScroll: true });
      item?.scrollIntoView({ block: "nearest", inline: "nearest" });
    });
  };
  const onWheel = (event) => {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) return; // the browser scrolls sideways
    event.preventDefault();
    const { top } = box.current.getBoundingClientRect();
    zoom(Math.exp(clamp(event.deltaY, -120, 120) * 0.004), clamp((event.clientY - top) / height, 0, 1));
  };
  const onKey = (event) => {
    const node = tree.nodes.get(hand) ?? tree.root;
    const siblings = node.parent?.children ?? [];
    const place = siblings.indexOf(node);
    const first = (item) => item.children?.[0];
    const acts = {
      ArrowRight: () => first(node) && select(first(node)),
      ArrowLeft: () => node.parent?.parent && select(node.parent),
      ArrowDown: () => (place < 0 ? first(node) && select(first(node)) : siblings[place + 1] && select(siblings[place + 1])),
      ArrowUp: () => place > 0 && select(siblings[place - 1]),
      Enter: () => open(node), z: () => node.parent && focus(node),
      "+": () => zoom(0.7, 0.5), "=": () => zoom(0.7, 0.5), "-": () => zoom(1 / 0.7, 0.5),
      Home: () => setView({ top: 0, span: 1 }),
    };
    if (!(event.key in acts) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  };
  // One pointer drags, two pinch. A click is a drag of nothing.
  const onDown = (event) => {
    pointers.current.set(event.pointerId, { x: event.clientX, y: event.clientY, moved: 0 });
  };
  const onMove = (event) => {
    const before = pointers.current.get(event.pointerId);
    if (!before) return;
    const [dx, dy] = [event.clientX - before.x, event.clientY - before.y];
    before.moved += Math.abs(dx) + Math.abs(dy);
    const others = [...pointers.current].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    if (others.length === 1) {
      const gap = (y) => Math.max(24, Math.abs(y - others[0].y));
      const { top } = box.current.getBoundingClientRect();
      zoom(gap(before.y) / gap(event.clientY), clamp(((event.clientY + others[0].y) / 2 - top) / height, 0, 1));
    } else if (before.moved > 4) {
      setView(({ top, span }) => clampView(top - (dy / height) * span, span));
      box.current.scrollLeft -= dx;
    }
    Object.assign(before, { x: event.clientX, y: event.clientY });
  };
  const onUp = (event) => {
    const { moved = 0 } = pointers.current.get(event.pointerId) ?? {};
    pointers.current.delete(event.pointerId);
    if (moved > 4) event.currentTarget.dataset.dragged = "true";
  };
  const onClick = (event) => {
    const { dataset } = event.currentTarget;
    const wasDragged = dataset.dragged;
    delete dataset.dragged;
    const item = event.target.closest("[data-node]");
    if (!item || wasDragged) return;
    const node = tree.nodes.get(Number(item.dataset.node));
    if (node.node === hand && event.detail > 1) open(node);
    else select(node);
  };
  const items = visibleNodes(tree.root, view, height);
  const tabbable = items.some(({ node }) => node === hand) ? hand : items[0]?.node;
  const deepest = Math.max(1, ...items.map(({ depth }) => depth));
  return html`<div class="futures-view" ref=${box} role="tree" aria-label="Continuations" onWheel=${onWheel} onKeyDown=${onKey}
      onPointerDown=${onDown} onPointerMove=${onMove} onPointerUp=${onUp} onPointerCancel=${onUp} onPointerLeave=${onUp} onClick=${onClick}>
    <div class="futures-space" style=${{ width: `${deepest * column}px` }}>
    ${items.map((node) => html`<div key=${node.node} data-node=${node.node} role="treeitem" aria-level=${node.depth}
        tabindex=${node.node === tabbable ? 0 : -1} aria-selected=${node.node === hand}
        aria-label=${`${visibleText(node.text)}, ${percent(node.p)}; ${percent(node.mass)} from the start${node.finished ? "; end" : ""}`}
        class=${`future ${written.has(node) ? "written" : ""} ${node.finished ? "finished" : ""}`}
        style=${{ left: `${(node.depth - 1) * column}px`, width: `${column - 2}px`, ...placeOf(node, view, height),
          "--p": `${Math.round(6 + 34 * node.p)}%` }}>
        ${(node.mass / view.span) * height >= MIN_LABEL && html`<span class="future-text">${visibleText(node.text)}</span>
          ${column >= 90 && html`<span class="future-p">${percent(node.p)}</span>`}`}
      </div>`)}
    ${othersOf([tree.root, ...items], view, height).map(({ node, ...rest }) => html`<div key=${`rest-${node.node}`} aria-hidden="true"
        class="future-rest" style=${{ left: `${node.depth * column}px`, width: `${column - 2}px`, ...placeOf(rest, view, height) }}>
        ${column >= 90 ? "other tokens" : "others"} ${percent(node.others)}</div>`)}
    </div>
    ${tree.isDone && !items.length && html`<p class="quiet small">No continuation is that likely. Choose a smaller probability.</p>`}
  </div>`;
}

/** Top and height in px; a node that begins above the view begins at its edge, so that its label is visible. */
function placeOf(node, view, height) {
  const top = Math.max(0, ((node.y - view.top) / view.span) * height);
  const end = Math.min(height, ((node.y + node.mass - view.top) / view.span) * height);
  return { top: `${top.toFixed(1)}px`, height: `${Math.max(1, end - top - 1).toFixed(1)}px` };
}

/** Nodes in the view that are high enough to be seen, in reading order. */
function visibleNodes(root, view, height) {
  const items = [];
  const todo = [root];
  while (todo.length) {
    const node = todo.pop();
    for (const child of (node.children ?? []).toReversed()) {
      const isHigh = (child.mass / view.span) * height >= MIN_HEIGHT;
      if (isHigh && child.y < view.top + view.span && child.y + child.mass > view.top) todo.push(child);
    }
    if (node !== root) items.push(node);
  }
  return items;
}

/** Where all other tokens of a node would be, if that is high enough for a label. */
function othersOf(nodes, view, height) {
  return nodes.filter((node) => node.others !== null).flatMap((node) => {
    const mass = node.mass * node.others;
    const y = node.y + node.mass - mass;
    const visible = Math.min(y + mass, view.top + view.span) - Math.max(y, view.top);
    return (visible / view.span) * height >= MIN_LABEL ? [{ node, y, mass }] : [];
  });
}

/** The nodes that the text itself goes through. */
function writtenPath(root, branch, at) {
  const path = new Set();
  let node = root;
  for (let index = at; node && index < branch.steps.length; index += 1) {
    node = node.children?.find(({ token }) => token === branch.steps[index].token);
    if (node) path.add(node);
  }
  return path;
}

/** The text up to the node in hand, its probability, and what can be done with it. */
function Path({ branch, at, node, open }) {
  const before = branch.steps.slice(Math.max(0, at - 12), at).map(({ text }) => text).join("");
  const lead = before || branch.prompt?.messages?.at(-1)?.content || branch.prompt?.text || "";
  const path = pathOf(node);
  return html`<div class="futures-path">
    <p class="map-words"><span class="quiet">${typeof lead === "string" ? `… ${lead.slice(-80)}` : "…"}</span>${
      path.map(({ text }) => html`<${Piece} text=${text} />`)}</p>
    <div class="row">
      ${path.length
        ? html`<span class="small">${percent(node.mass)} for ${plural(path.length, "token")}${
            node.others === null ? "" : `; then ${count(node.children.length)} ways, and ${percent(node.others)} others`}</span>
          <button class="button main tiny" type="button" id="open-future" onClick=${() => open(node)}>Open as a branch</button>`
        : html`<span class="quiet small">The height of a token is its probability. Click one; scroll or pinch to zoom, drag to move.
          Keys: arrows, + and −, z zooms to the token, Enter opens it.</span>`}
    </div>
  </div>`;
}
