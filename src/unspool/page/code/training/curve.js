// The loss curve of a training run: number formats, scales and smoothing, and the chart with its slider.

import { ticks } from "../costs/chart.js";
import { clamp, count, html, useChanges, useMemo, useRef, useWidth } from "../lib.js";
import { checkpoints, currentStep, lastStep, lookAt, setHovered, setView, training } from "./runs.js";

const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

export const compact = (n) => (n == null || !Number.isFinite(n) ? "–" : SHORT.format(n));
export const lossText = (x) => (x == null || !Number.isFinite(x) ? "–" : x.toFixed(x < 1 ? 3 : 2));
export const bitsText = (x) => (x == null || !Number.isFinite(x) ? "–" : x.toFixed(3));

/** 42 s, 3:05, 1:02:05. */
export function clock(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${seconds < 10 ? Number(seconds.toFixed(1)) : Math.round(seconds)} s`;
  const total = Math.round(seconds);
  const [hours, minutes, remainder] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  const two = (n) => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(remainder)}` : `${minutes}:${two(remainder)}`;
}

/** Progress of a run at a step: "30 %". */
export function shareOf(step, run) {
  const steps = run?.steps || 0;
  if (!steps) return "";
  const value = (100 * step) / steps;
  return `${value < 10 && value % 1 > 0.05 ? value.toFixed(1) : Math.round(value)} %`;
}

// -- series and scales --------------------------------------------------------------------------

const AXES = { step: "Steps", tokens: "Tokens", seconds: "Time" };

/** Conversion of values to shares of the axis (0 to 1) and back. With `unit` logarithmic: log(1 + value / unit). */
export function scale(low, high, unit = null) {
  const bend = unit === null ? (value) => value : (value) => Math.log1p(Math.max(0, value) / unit);
  const back = unit === null ? (bent) => bent : (bent) => Math.expm1(bent) * unit;
  const [from, to] = [bend(low), bend(high)];
  const span = to - from || 1;
  return {
    share: (value) => (bend(value) - from) / span,
    value: (share) => back(from + share * span),
  };
}

/** The axis value of a step, interpolated between logged steps. */
export function along(lines, axis, step) {
  if (axis === "step" || step <= 0 || lines.length === 0) return axis === "step" ? step : 0;
  const next = indexAt(lines, "step", step);
  const after = lines[next];
  const before = next > 0 ? lines[next - 1] : { step: 0, tokens: 0, seconds: 0 };
  if (after.step <= step) return after[axis];
  const share = (step - before.step) / (after.step - before.step);
  return before[axis] + share * (after[axis] - before[axis]);
}

/** Index of the first line with at least this value; else of the last. */
function indexAt(lines, axis, value) {
  let [low, high] = [0, lines.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lines[middle][axis] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The line with the nearest value. */
function nearestLine(lines, axis, value) {
  if (lines.length === 0) return null;
  const at = indexAt(lines, axis, value);
  const before = lines[at - 1];
  return before && value - before[axis] < lines[at][axis] - value ? before : lines[at];
}

/** Centered moving average whose window grows with the step (`reach`: half width as a share of the index). */
function smoothValues(values, reach) {
  const sums = [0];
  const counts = [0];
  for (const value of values) {
    const is = Number.isFinite(value);
    sums.push(sums.at(-1) + (is ? value : 0));
    counts.push(counts.at(-1) + is);
  }
  return values.map((value, at) => {
    const half = Math.round(at * reach);
    const [from, to] = [at - half, Math.min(values.length, at + half + 1)];
    return Number.isFinite(value) ? (sums[to] - sums[from]) / (counts[to] - counts[from]) : NaN;
  });
}

/** SVG path through points; of those in one pixel column only the lowest and highest. */
function path(points) {
  const parts = [];
  let column = null;
  const flush = () => {
    if (!column) return;
    const { x, first, low, high, last } = column;
    const ys = [...new Set([first, low, high, last])];
    for (const y of ys) parts.push(`${parts.length ? "L" : "M"}${x} ${y.toFixed(1)}`);
  };
  for (const [place, y] of points) {
    if (!Number.isFinite(y)) continue;
    const x = Math.round(place * 2) / 2;
    if (column?.x === x) Object.assign(column, { low: Math.max(column.low, y), high: Math.min(column.high, y), last: y });
    else {
      flush();
      column = { x, first: y, low: y, high: y, last: y };
    }
  }
  flush();
  return parts.join("");
}

/** Round numbers for a logarithmic axis: 1, 10, 100, or 1, 2, 5 where there is room. */
function logTicks(low, high, count = 4) {
  const powers = Math.log10(high / Math.max(low, high * 1e-9));
  const times = powers > count ? [1] : [1, 2, 5];
  const values = [];
  for (let power = Math.floor(Math.log10(Math.max(low, high * 1e-6))); 10 ** power <= high; power += 1) {
    for (const factor of times) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) values.push(value);
    }
  }
  const every = Math.max(1, Math.ceil(values.length / (count * 2)));
  return values.filter((_, at) => (values.length - 1 - at) % every === 0);
}

/** Indices of `count` checkpoints around the one nearest to a share of the axis. */
export function checkpointsAround(shares, share, count) {
  let nearest = 0;
  shares.forEach((candidate, at) => {
    if (Math.abs(candidate - share) < Math.abs(shares[nearest] - share)) nearest = at;
  });
  const start = clamp(nearest - Math.floor((count - 1) / 2), 0, Math.max(0, shares.length - count));
  return { nearest, start, end: Math.min(shares.length, start + count) };
}

// -- the chart; its slider selects the checkpoints below -------------------------------------------

const HEIGHT = 205;
const EDGE = { left: 44, right: 20, top: 20, bottom: 24 };
const SMOOTH = { 0: "no smoothing", 0.02: "light smoothing", 0.06: "smoothing", 0.2: "strong smoothing" };
const FORMAT = { step: compact, tokens: compact, seconds: clock };

export function Curve() {
  useChanges("training");
  const [frame, width] = useWidth(600);
  const { lines, view, run } = training;
  const plot = useMemo(() => plotOf(width), [lines, run, view.axis, view.logX, view.logY, view.smooth, width]);
  return html`<figure class="lrn-curve panel" aria-label="Loss">
    <${Choices} />
    <div class="lrn-picture" ref=${frame} style=${{ height: `${HEIGHT}px` }}>
      ${plot ? html`<${Picture} plot=${plot} width=${width} /><${Hand} plot=${plot} />`
        : html`<p class="quiet lrn-none">${training.name ? "No step has been logged yet." : ""}</p>`}
    </div>
    <${Figures} plot=${plot} />
  </figure>`;
}

/** Scales and paths; null if there is nothing to draw. */
function plotOf(width) {
  const { lines, view, run } = training;
  const { axis, logX, logY, smooth } = view;
  if (!lines.length || !width) return null;
  const across = Math.max(10, width - EDGE.left - EDGE.right);
  const down = HEIGHT - EDGE.top - EDGE.bottom;
  const lossOf = lines.map((line) => line.loss ?? NaN);
  const heldOut = lines.filter((line) => Number.isFinite(line.held_out_loss));
  const all = [...lossOf, ...heldOut.map((line) => line.held_out_loss)].filter(Number.isFinite);
  if (!all.length) return null;
  const far = Math.max(lines.at(-1)[axis], axis === "step" ? checkpoints().at(-1)?.step ?? 0 : 0);
  const unit = lines.find((line) => line[axis] > 0)?.[axis] ?? 1;
  const xs = scale(0, far, logX ? unit : null);
  const [low, high] = lossRange(all, logY);
  const ys = logY ? scale(Math.log(low), Math.log(high)) : scale(low, high);
  const x = (value) => EDGE.left + xs.share(value) * across;
  const y = (value) => EDGE.top + (1 - ys.share(logY ? Math.log(value) : value)) * down;
  const pathOf = (values) => path(lines.map((line, at) => [x(line[axis]), y(values[at])]));
  const calm = smooth > 0 ? smoothValues(lossOf, smooth) : lossOf;
  return {
    axis, across, down, far, low, high, unit, logX, logY, x, y,
    raw: pathOf(lossOf),
    calm: pathOf(calm),
    calmAt: new Map(lines.map((line, at) => [line, calm[at]])),
    heldLine: path(heldOut.map((line) => [x(line[axis]), y(line.held_out_loss)])),
    heldDots: heldOut.length <= 60 ? heldOut.map((line) => [x(line[axis]), y(line.held_out_loss)]) : [],
    xOfStep: (step) => x(along(lines, axis, step)),
    stepAt: (place) => nearestStep(xs.value(clamp((place - EDGE.left) / across, 0, 1)), axis),
    frames: checkpoints().map((saved) => ({ ...saved, x: x(along(lines, axis, saved.step)), part: shareOf(saved.step, run) })),
  };
}

/** The value range without the top 0.5 %: a few values at the start must not flatten the curve. */
function lossRange(values, isLog) {
  const sorted = [...values].sort((a, b) => a - b);
  const high = sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * 0.995))];
  const low = sorted[0];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return isLog ? [low * 0.96, high * 1.04] : [Math.max(0, low - room), high + room];
}

function nearestStep(value, axis) {
  const line = nearestLine(training.lines, axis, value);
  return line && value > (training.lines[0][axis] ?? 0) / 2 ? line.step : 0;
}

function Picture({ plot, width }) {
  const { axis, x, y, low, high, far, unit, logX, logY, down } = plot;
  const floor = EDGE.top + down;
  const up = logY ? logTicks(low, high, 3) : ticks(low, high, 4);
  const right = logX ? logTicks(unit, far, 4) : ticks(0, far, 5);
  let last = -Infinity;
  const fits = (place, room) => place - last > room && (last = place) !== null;
  return html`<svg width=${width} height=${HEIGHT} viewBox=${`0 0 ${width} ${HEIGHT}`} aria-hidden="true">
    ${up.map((value) => html`<g><line class="lrn-grid" x1=${EDGE.left} x2=${width - EDGE.right} y1=${y(value)} y2=${y(value)} />
      <text class="lrn-tick end" x=${EDGE.left - 6} y=${y(value)}>${lossText(value)}</text></g>`)}
    ${right.filter((value) => fits(x(value), 44)).map((value) => html`<text class="lrn-tick" x=${x(value)}
      y=${HEIGHT - 9}>${FORMAT[axis](value)}</text>`)}
    <${Frames} frames=${plot.frames} floor=${floor} />
    <path class="lrn-raw" d=${plot.raw} />
    <path class="lrn-train" d=${plot.calm} />
    <path class="lrn-held" d=${plot.heldLine} />
    ${plot.heldDots.map(([cx, cy]) => html`<circle class="lrn-dot" cx=${cx} cy=${cy} r="2.5" />`)}
  </svg>`;
}

/** Vertical lines at the checkpoints, labelled where there is room. */
function Frames({ frames, floor }) {
  let last = -Infinity;
  return frames.map(({ step, x, film, part }) => {
    const named = film && x - last > 34;
    if (named) last = x;
    return html`<g key=${step}><line class="lrn-frame" x1=${x} x2=${x} y1=${EDGE.top - 4} y2=${floor} />
      ${named && html`<text class="lrn-tick" x=${x} y=${EDGE.top - 11}>${part}</text>`}</g>`;
  });
}

const KEYS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 };

function Hand({ plot }) {
  const box = useRef();
  const now = currentStep();
  const under = (event) => plot.stepAt(event.clientX - box.current.getBoundingClientRect().left);
  const down = (event) => {
    if (event.button > 0) return;
    event.currentTarget.setPointerCapture(event.pointerId);
    lookAt(under(event));
  };
  const move = (event) => {
    setHovered(under(event));
    if (event.currentTarget.hasPointerCapture(event.pointerId)) lookAt(under(event));
  };
  const key = (event) => {
    const steps = checkpoints().map(({ step }) => step);
    let next = null;
    if (event.key in KEYS) next = neighbourStep(plot, now, KEYS[event.key]);
    else if (event.key === "PageUp") next = steps.find((step) => step > now) ?? lastStep();
    else if (event.key === "PageDown") next = steps.findLast((step) => step < now) ?? 0;
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = lastStep();
    if (next === null) return;
    event.preventDefault();
    setHovered(null);
    lookAt(next);
  };
  const hovered = training.hovered === null ? null : plot.xOfStep(training.hovered);
  return html`<div class="lrn-hand" role="slider" tabindex="0" ref=${box} aria-label="Training step"
      aria-valuemin="0" aria-valuemax=${lastStep()} aria-valuenow=${now} aria-valuetext=${stepLabel(now)}
      onPointerDown=${down} onPointerMove=${move} onPointerLeave=${() => setHovered(null)} onKeyDown=${key}>
    ${hovered !== null && html`<i class="lrn-under" style=${{ left: `${hovered}px` }}></i>`}
    <i class="lrn-now" style=${{ left: `${plot.xOfStep(now)}px` }}></i>
  </div>`;
}

/** The step one hundredth of the axis further: the same distance at every scale. */
function neighbourStep(plot, now, way) {
  const from = plot.xOfStep(now);
  for (let far = 1; far <= plot.across; far += 1) {
    const step = plot.stepAt(from + way * Math.max(far, plot.across / 100));
    if ((step - now) * way > 0) return step;
  }
  return way > 0 ? lastStep() : 0;
}

/** The logged values nearest to a step. */
function factsAt(step) {
  const { lines } = training;
  const line = nearestLine(lines, "step", step);
  const heldOut = lines.findLast((candidate) => candidate.step <= step && Number.isFinite(candidate.held_out_loss))
    ?? lines.find((candidate) => Number.isFinite(candidate.held_out_loss));
  return { line: step === 0 ? { step: 0, tokens: 0, seconds: 0, loss: line?.step === 0 ? line.loss : undefined } : line, heldOut };
}

function stepLabel(step) {
  const { line, heldOut } = factsAt(step);
  if (!line) return `step ${step}`;
  return `step ${count(step)}, ${count(line.tokens)} tokens, loss ${lossText(line.loss)}, held out ${lossText(heldOut?.held_out_loss)}`;
}

/** The values of the step under the pointer, or of the selected one. */
function Figures({ plot }) {
  const step = training.hovered ?? currentStep();
  const { line, heldOut } = factsAt(step);
  if (!line) return html`<figcaption class="small"></figcaption>`;
  const key = (look, name, value) => html`<span class="lrn-key"><i class=${look}></i>${name} <b>${value}</b></span>`;
  return html`<figcaption class="small">
    <span>Step <b data-figure="step">${count(line.step)}</b> · <b data-figure="tokens">${compact(line.tokens)}</b> tokens · <b>${clock(line.seconds)}</b></span>
    ${key("train", "Training", lossText(line.loss))}${training.view.smooth > 0 && Number.isFinite(plot?.calmAt.get(line))
      && html`<span>smoothed <b>${lossText(plot.calmAt.get(line))}</b></span>`}
    ${heldOut && key("held", heldOut.step === line.step ? "Held out" : `Held out at ${count(heldOut.step)}`, lossText(heldOut.held_out_loss))}
    ${heldOut && Number.isFinite(heldOut.bits_per_byte) && html`<span>Bits per byte <b data-figure="bits">${bitsText(heldOut.bits_per_byte)}</b></span>`}
  </figcaption>`;
}

function Choices() {
  const { view } = training;
  const box = (name, title) => html`<label class="lrn-check"><input type="checkbox" checked=${view[name]}
    onChange=${(event) => setView({ [name]: event.target.checked })} /> ${title}</label>`;
  return html`<div class="row small lrn-choices">
    <h3>Loss</h3><span class="quiet">nats a token</span><span class="grow"></span>
    <div class="segments" role="group" aria-label="X axis">
      ${Object.entries(AXES).map(([name, title]) => html`<button type="button" aria-pressed=${view.axis === name}
        onClick=${() => setView({ axis: name })}>${title}</button>`)}
    </div>
    <span class="row lrn-scales" role="group" aria-label="Logarithmic scale">Log scale: ${box("logX", AXES[view.axis].toLowerCase())} ${box("logY", "loss")}</span>
    <label><span class="visually-hidden">Smoothing</span><select class="field" id="lrn-smooth" value=${view.smooth}
      onChange=${(event) => setView({ smooth: Number(event.target.value) })}>
      ${Object.entries(SMOOTH).sort(([a], [b]) => a - b).map(([value, title]) => html`<option value=${value}>${title}</option>`)}
    </select></label>
  </div>`;
}
