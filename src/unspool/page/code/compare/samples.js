// Many samples of one prompt as a tree: common prefixes are merged, laid out and drawn once.

import { compare, FieldError, Fields, MOST_SAMPLES, Preset, setSamples } from "./runs.js";
import { html, percent, Piece, plural, useChanges, useMemo, useState, useWidth } from "../lib.js";
import { state, textOf } from "../state.js";
import { openInWrite, TokenText } from "../token_text.js";

/**
 * Merge samples (lists of steps) into a prefix tree, `depth` tokens deep.
 *
 * A node is a run of tokens that all its samples share: `{from, steps, samples, children}`. It has no children, or at
 * least two, the largest first.
 */
export function grow(samples, depth) {
  return growNode(samples, depth, samples.map((_, index) => index), 0);
}

function growNode(samples, depth, members, from) {
  const node = { from, steps: [], samples: members, children: [] };
  let at = from;
  for (; at < depth; at += 1) {
    const groups = groupByToken(samples, members, at);
    if (groups.length > 1) {
      node.children = groups.map((group) => growNode(samples, depth, group, at)).sort(bySize);
      return node;
    }
    const step = samples[members[0]][at];
    if (!step) return node; // all samples ended here
    node.steps.push(step);
  }
  return node;
}

/** The members grouped by their token at this index; those that ended are a group too. */
function groupByToken(samples, members, at) {
  const groups = new Map();
  for (const member of members) {
    const token = samples[member][at]?.token ?? null;
    if (!groups.has(token)) groups.set(token, []);
    groups.get(token).push(member);
  }
  return [...groups.values()];
}

function bySize(a, b) {
  const chance = (node) => node.steps[0]?.logprob ?? -Infinity;
  return b.samples.length - a.samples.length || chance(b) - chance(a) || 0;
}

/** Depth of the tree while texts still grow: the shortest running text limits it. */
export function depthOf(samples, running, most) {
  const lengths = samples.filter((_, index) => running[index]).map((steps) => steps.length);
  return Math.min(most, ...lengths, Math.max(0, ...samples.map((steps) => steps.length)));
}

/**
 * The first split: each next token with its number of samples, the model's probability and the one after the sampling
 * stages, followed by up to `unused` candidates that no sample took. Null if the samples do not diverge.
 */
export function firstSplit(tree, unused = 0) {
  if (tree.children.length === 0) return null;
  const rows = tree.children.map(({ steps: [step], samples }) => ({
    token: step?.token ?? null,
    text: step ? tokenText(step) : "",
    count: samples.length,
    model: step ? Math.exp(step.logprob) : null,
    after: step?.probability ?? null,
  }));
  const sampled = new Set(rows.map((row) => row.token));
  const others = (tree.children.find((child) => child.steps.length)?.steps[0].candidates ?? [])
    .filter((candidate) => !sampled.has(candidate.token) && candidate.probability > 0)
    .slice(0, unused)
    .map(({ token, text, logprob, probability }) => (
      { token, text, count: 0, model: Math.exp(logprob), after: probability }));
  return { at: tree.steps.length, rows: [...rows, ...others] };
}

/** Number of different texts, as deep as the tree goes. */
export function distinct(tree) {
  return tree.children.length ? tree.children.reduce((sum, child) => sum + distinct(child), 0) : 1;
}

/** The text of a step; a token without text (the end) by its name. */
const tokenText = (step) => step.text || step.piece || "";

/** The text of a run on one line; partial characters belong to the token that completes them. */
export function wordsOf(steps) {
  const last = steps.findLastIndex((step) => step.text);
  const text = steps.map((step, at) => {
    if (step.text || (at < last && step.bytes?.length)) return step.text;
    return step.finish_reason === "stop" ? " ∎" : tokenText(step);
  });
  return text.join("").replace(/\s*\n\s*/g, " ⏎ ").trim();
}

// -- layout -----------------------------------------------------------------------------------

const ROW = 28; // px, height of one sample
const BAND = 20; // px, thickness of one sample
const BEND = 66; // px, width of a split, with its probabilities
const PAD = 8; // px, between the edge of a band and its text
const LINE = 1.25; // line height, relative to the font size
const TAIL = 150; // px, minimum text width of a path to its leaf
const LEAF = 34; // px, width of the leaf numbers

/**
 * Lay a tree out from left to right. `measure(text, size)` returns a text width.
 *
 * Returns `{width, height, bands, bends, leaves}`: a band is a run with its text in lines, a bend leads from a band to a
 * child or leaf, a leaf is the end of a sample. Each has its samples.
 */
export function layout(tree, { width, measure, stem = "" }) {
  const plan = { measure, bands: [], bends: [], leaves: [] };
  const begin = stem ? widthOf(stem, tree.samples.length, measure) : 0;
  const right = Math.max(width, neededWidth(tree, plan, begin) + LEAF) - LEAF;
  if (stem) plan.bands.push({ ...bandOf(stem, tree.samples, 0, 0, begin, measure), hue: 0, isPrompt: true });
  place(tree, plan, { x: begin, top: 0, right, hue: 0 });
  const { bands, bends, leaves } = plan;
  return { width: right + LEAF, height: tree.samples.length * ROW, bands, bends, leaves };
}

const sizeOf = (many) => Math.min(20, 13 + 1.8 * Math.sqrt(many - 1));

function neededWidth(node, { measure }, x) {
  const many = node.samples.length;
  const end = x + widthOf(wordsOf(node.steps), many, measure);
  if (node.children.length === 0) return end + (many > 1 ? BEND : 0);
  return Math.max(...node.children.map((child) => neededWidth(child, { measure }, end + BEND)));
}

/** Width of a band: narrow if its height allows several lines; a single path is truncated instead. */
function widthOf(words, many, measure) {
  if (!words) return 0;
  const size = sizeOf(many);
  const room = many === 1 ? Math.min(measure(words, size), TAIL)
    : narrowest(words, size, linesIn(many, size), measure);
  return room + 2 * PAD + 2;
}

const linesIn = (many, size) => Math.max(1, Math.floor((many * BAND) / (size * LINE)));

function narrowest(words, size, lines, measure) {
  const single = Math.max(...words.split(" ").map((word) => measure(word, size)));
  let room = Math.max(single, measure(words, size) / lines);
  while (wrapWords(words, size, room, measure).length > lines) room *= 1.06;
  return room;
}

function wrapWords(words, size, room, measure) {
  const lines = [];
  for (const word of words.split(" ")) {
    const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
    if (lines.length && measure(longer, size) <= room + 0.5) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

function truncate(words, size, room, measure) {
  if (measure(words, size) <= room) return words;
  let [fits, fails] = [0, words.length];
  while (fails - fits > 1) {
    const half = (fits + fails) >> 1;
    if (measure(`${words.slice(0, half)}…`, size) <= room) fits = half;
    else fails = half;
  }
  return `${words.slice(0, fits).toWellFormed().trimEnd()}…`;
}

/** A run as a band, its text wrapped to the width. */
function bandOf(words, samples, x, top, width, measure) {
  const many = samples.length;
  const size = sizeOf(many);
  const height = many * BAND;
  const y = top + (many * (ROW - BAND)) / 2;
  const room = width - 2 * PAD;
  const lines = words === "" ? []
    : many === 1 ? [truncate(words, size, room, measure)] : wrapWords(words, size, room, measure);
  const first = y + height / 2 - ((lines.length - 1) * size * LINE) / 2;
  return {
    samples, x, y, width, height, size,
    lines: lines.map((text, index) => ({ text, x: x + PAD, y: first + index * size * LINE })),
  };
}

function place(node, plan, { x, top, right, hue }) {
  const many = node.samples.length;
  const alone = many === 1; // no more splits: straight to the leaf
  const words = wordsOf(node.steps);
  const width = alone ? right - x : widthOf(words, many, plan.measure);
  if (width > 0) plan.bands.push({ ...bandOf(words, node.samples, x, top, width, plan.measure), hue });

  if (alone) {
    plan.leaves.push({ sample: node.samples[0], x: right, y: top + ROW / 2, hue });
    return;
  }
  let below = top;
  let from = top + (many * (ROW - BAND)) / 2;
  const begin = x + width;
  if (node.children.length === 0) {
    for (const sample of node.samples) { // equal to the end: one leaf each
      const middle = below + ROW / 2;
      plan.bends.push({
        samples: [sample], path: bend(begin, from, right, middle - 1.5, BAND, 3), hue, step: null,
      });
      plan.leaves.push({ sample, x: right, y: middle, hue });
      below += ROW;
      from += BAND;
    }
    return;
  }
  node.children.forEach((child, index) => {
    const count = child.samples.length;
    const thick = count * BAND;
    const to = below + (count * (ROW - BAND)) / 2;
    const next = hue || 1 + (index % 6); // colors differ from the first split on
    plan.bends.push({
      samples: child.samples, path: bend(begin, from, begin + BEND, to, thick, thick), hue: next,
      step: child.steps[0] ?? null, x: begin + BEND - 5, y: to + thick / 2,
    });
    place(child, plan, { x: begin + BEND, top: below, right, hue: next });
    below += count * ROW;
    from += thick;
  });
}

/** A ribbon from (x0, y0) to (x1, y1), which are its upper corners. */
function bend(x0, y0, x1, y1, thick0, thick1) {
  const half = (x0 + x1) / 2;
  const at = (...numbers) => numbers.map((number) => Math.round(number * 10) / 10).join(" ");
  return `M${at(x0, y0)}C${at(half, y0, half, y1, x1, y1)}V${at(y1 + thick1)}`
    + `C${at(half, y1 + thick1, half, y0 + thick0, x0, y0 + thick0)}Z`;
}

// -- drawing ------------------------------------------------------------------------------------

const pen = document.createElement("canvas").getContext("2d");
const SIZE = 16; // px, font size for measuring; other sizes are scaled

function planTree(tree, width, stem) {
  pen.font = `${SIZE}px ${getComputedStyle(document.body).fontFamily}`;
  const measure = (text, size) => (pen.measureText(text).width * size) / SIZE;
  return layout(tree, { width, measure, stem });
}

/** `point(samples | null)` when a path is under the pointer, `choose(sample)` when one is clicked. */
function WordTree({ tree, texts, stem, lit, selected, point, choose }) {
  const [frame, width] = useWidth(0);
  const plan = useMemo(() => width && planTree(tree, width, stem), [tree, width, stem]);
  return html`<div class="cmp-frame" ref=${frame}>${plan && html`
    <${Drawing} plan=${plan} texts=${texts} lit=${lit} selected=${selected} point=${point} choose=${choose} />`}</div>`;
}

function Drawing({ plan, texts, lit, selected, point, choose }) {
  const { width, height, bands, bends, leaves } = plan;
  const look = (samples) => (lit && !samples.some((sample) => lit.includes(sample)) ? "dim" : "");
  const over = (samples) => ({ onPointerEnter: () => point(samples), onPointerLeave: () => point(null) });
  const label = `${texts.length} samples as a tree with ${bands.length} runs of tokens. `
    + "The leaves on the right are the samples.";
  return html`<svg class="cmp-tree" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`}
      role="group" aria-label=${label}>
    <g aria-hidden="true">
      ${bends.map(({ samples, path, hue, step, x, y }) => html`<g class=${look(samples)} ...${over(samples)}>
        <path class=${`cmp-ribbon hue-${hue}`} d=${path} />
        ${step && html`<text class="cmp-chance" x=${x} y=${y}>${percent(Math.exp(step.logprob))}</text>`}
      </g>`)}
      ${bands.map((band) => html`<g class=${look(band.samples)} ...${over(band.samples)}
          onClick=${() => band.samples.length === 1 && choose(band.samples[0])}>
        <rect class=${`cmp-ribbon hue-${band.hue}`} x=${band.x} y=${band.y}
          width=${band.width} height=${band.height} />
        ${band.lines.map(({ text, x, y }) => html`<text class=${`cmp-words ${band.isPrompt ? "quiet" : ""}`}
          x=${x} y=${y} font-size=${band.size}>${text}</text>`)}
      </g>`)}
    </g>
    ${leaves.map((leaf, index) => html`<${Leaf} key=${leaf.sample} leaf=${leaf} text=${texts[leaf.sample]}
      first=${index === 0} isSelected=${selected === leaf.sample} look=${look([leaf.sample])}
      point=${point} choose=${choose} />`)}
  </svg>`;
}

/** The end of a sample: a button; arrow keys move between them. */
function Leaf({ leaf, text, first, isSelected, look, point, choose }) {
  const keys = (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" || event.key === " ") choose(leaf.sample);
    else if (move) {
      const all = [...event.currentTarget.ownerSVGElement.querySelectorAll(".cmp-leaf")];
      all[all.indexOf(event.currentTarget) + move]?.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<g class=${`cmp-leaf hue-${leaf.hue} ${look}`} role="button" tabindex=${first ? 0 : -1}
      aria-pressed=${isSelected} aria-label=${`Sample ${leaf.sample + 1}: ${text}`} data-sample=${leaf.sample + 1}
      onClick=${() => choose(leaf.sample)} onKeyDown=${keys}
      onFocus=${() => point([leaf.sample])} onBlur=${() => point(null)}
      onPointerEnter=${() => point([leaf.sample])} onPointerLeave=${() => point(null)}>
    <circle cx=${leaf.x + 18} cy=${leaf.y} r="11" />
    <text x=${leaf.x + 18} y=${leaf.y}>${leaf.sample + 1}</text>
  </g>`;
}

// -- the Samples tab ----------------------------------------------------------------------------

const MAX_DEPTH = 40; // tokens in the tree

export function Samples({ pick }) {
  useChanges("compare");
  const [pointed, setPointed] = useState(null); // samples under the pointer or focus
  const { samples } = compare;
  const setSettings = (values) => setSamples({ settings: { ...samples.settings, ...values }, fault: null });
  const branches = samples.ids.map((id) => state.branches.get(id)).filter(Boolean);
  const texts = branches.map((branch) => branch.steps);
  const depth = depthOf(texts, branches.map((branch) => branch.writing), MAX_DEPTH);
  // Steps do not change: rebuild the tree only when it grows deeper.
  const tree = useMemo(() => (texts.length ? grow(texts, depth) : null), [samples.root, texts.length, depth]);
  const reading = pointed?.length === 1 ? pointed[0] : samples.selected ?? 0;
  return html`
    <div class="cmp-ask panel">
      <label class="cmp-how-many">
        <span>Samples: <b>${samples.number}</b></span>
        <input type="range" min="2" max=${MOST_SAMPLES} value=${samples.number} aria-label="Number of samples"
          onInput=${(event) => setSamples({ number: Number(event.target.value) })} />
      </label>
      <${Preset} settings=${samples.settings} owner="the samples" change=${setSettings} />
      <${Fields} settings=${samples.settings} fault=${samples.fault} owner="the samples" change=${setSettings} />
      <${FieldError} fault=${samples.fault} />
    </div>
    ${tree && html`
      <p class="cmp-summary" role="status">${samples.writing ? "Generating …" : summary(tree, samples, branches, depth)}</p>
      <p class="quiet small">Thickness is the number of samples. The numbers at the splits are the model’s
        probabilities.</p>
      <${WordTree} tree=${tree} texts=${branches.map(textOf)} stem=${stemOf(branches[0])}
        lit=${pointed ?? (samples.selected === null ? null : [samples.selected])} point=${setPointed}
        choose=${(sample) => setSamples({ selected: sample === samples.selected ? null : sample })} selected=${samples.selected} />
      <${SampleText} branch=${branches[reading]} number=${reading} pick=${pick} />
      <${FirstWords} split=${firstSplit(tree, 4)} tree=${tree} number=${branches.length} />
      <details class="cmp-all small"><summary>All samples as text</summary><ol>
        ${branches.map((branch, index) => html`<li key=${branch.id}>${textOf(branch)}
          <button class="button tiny" aria-label=${`Open sample ${index + 1} in Write`}
            onClick=${() => openInWrite(branch.id)}>Open in Write</button></li>`)}
      </ol></details>`}`;
}

/** The last words of the prompt. */
function stemOf(branch) {
  const userTokens = branch?.prompt?.tokens.filter((token) => !token.added) ?? [];
  const words = userTokens.map((token) => token.text).join("").trim().split(/\s+/);
  return words.length > 3 ? `… ${words.slice(-3).join(" ")}` : words.join(" ");
}

/** The tree as a sentence. */
function summary(tree, samples, branches, depth) {
  const all = `All ${branches.length} samples`;
  if (tree.children.length === 0) {
    const greedy = branches[0].settings.temperature === 0;
    return greedy
      ? `${all} are the same: at temperature 0 the most likely token is always taken.`
      : `${all} are the same for these ${plural(depth, "token")}: the distribution is very sharp.`;
  }
  const ways = tree.children.length;
  const begin = tree.steps.length
    ? `${all} start with “${wordsOf(tree.steps)}”, then split ${ways} ways.`
    : `${all} split ${ways} ways at the first token.`;
  return `${begin} ${plural(distinct(tree), "different text")} in total.`;
}

/** The full text of the sample that is pointed at or was clicked. */
function SampleText({ branch, number, pick }) {
  return html`<div class="cmp-reading panel" data-sample=${number + 1}>
    <div class="row spread"><h3>Sample ${number + 1}</h3>
      <span class="quiet small grow cmp-hint">Point at a number to read that sample; click to keep it here.</span>
      <button class="button tiny" onClick=${() => openInWrite(branch.id)}>Open in Write</button></div>
    <${TokenText} key=${branch.id} steps=${branch.steps} label=${`Text of sample ${number + 1}`}
      pick=${(at, element) => pick({ id: branch.id, at, element })} />
  </div>`;
}

function FirstWords({ split, tree, number }) {
  if (!split) return null;
  const behind = tree.steps.length ? html`After “${wordsOf(tree.steps)}”` : "At the first token";
  const most = Math.max(...split.rows.map((row) => Math.max(row.count / number, row.after ?? 0)));
  const width = (share) => ({ width: `${(share / most) * 100}%` });
  return html`<section class="cmp-first" aria-label="First split of the samples">
    <h3>${behind}</h3>
    <p class="quiet small">The bar is the share of the ${number} samples with this token, the line its probability after the
      sampling stages. With more samples they converge.</p>
    <table>
      <thead><tr><th scope="col">Token</th><th scope="col"><span class="visually-hidden">Bar</span></th>
        <th scope="col">Samples</th><th scope="col">After stages</th><th scope="col">Model</th></tr></thead>
      <tbody>${split.rows.map((row) => html`<tr key=${row.token} data-token=${row.token} data-count=${row.count}>
        <th scope="row"><${Piece} text=${row.text} /></th>
        <td aria-hidden="true"><div class="track"><span style=${width(row.count / number)} />
          ${row.after !== null && html`<i style=${{ left: width(row.after).width }} />`}</div></td>
        <td>${row.count} of ${number}</td>
        <td>${percent(row.after)}</td>
        <td>${percent(row.model)}</td>
      </tr>`)}</tbody>
    </table>
  </section>`;
}
