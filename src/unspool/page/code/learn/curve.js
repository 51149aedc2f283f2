// A run's loss as a curve, drawn as it grows. The hand over it is a slider: drag it along the training, and the
// checkpoints nearest to it are looked at.

import { clamp, count, html, useChanges, useMemo, useRef, useWidth } from "../lib.js";
import { ticks } from "../costs/paint.js";
import { checkpoints, lastStep, learn, lookAt, point, setView, stepNow } from "./run.js";
import { along, AXES, logTicks, nearestLine, path, scale, smoothed } from "./series.js";
import { bits, clock, compact, nats, shareOf } from "./words.js";

const HEIGHT = 205;
const EDGE = { left: 44, right: 20, top: 20, bottom: 24 };
const SMOOTH = { 0: "not smoothed", 0.02: "smoothed a little", 0.06: "smoothed", 0.2: "smoothed much" };
const FORMAT = { step: compact, tokens: compact, seconds: clock };

export function Curve() {
  useChanges("learn");
  const [frame, width] = useWidth(600);
  const { lines, view, run } = learn;
  const plot = useMemo(() => plotOf(width), [lines, run, view.axis, view.logX, view.logY, view.smooth, width]);
  return html`<figure class="lrn-curve panel" aria-label="The loss">
    <${Choices} />
    <div class="lrn-picture" ref=${frame} style=${{ height: `${HEIGHT}px` }}>
      ${plot ? html`<${Picture} plot=${plot} width=${width} /><${Hand} plot=${plot} />`
        : html`<p class="quiet lrn-none">${learn.name ? "No step has been logged yet." : ""}</p>`}
    </div>
    <${Figures} plot=${plot} />
  </figure>`;
}

/** Scales and paths; null while there is nothing to draw. */
function plotOf(width) {
  const { lines, view, run } = learn;
  const { axis, logX, logY, smooth } = view;
  if (!lines.length || !width) return null;
  const across = Math.max(10, width - EDGE.left - EDGE.right);
  const down = HEIGHT - EDGE.top - EDGE.bottom;
  const lossOf = lines.map((line) => line.loss ?? NaN);
  const held = lines.filter((line) => Number.isFinite(line.held_out_loss));
  const all = [...lossOf, ...held.map((line) => line.held_out_loss)].filter(Number.isFinite);
  if (!all.length) return null;
  const far = Math.max(lines.at(-1)[axis], axis === "step" ? checkpoints().at(-1)?.step ?? 0 : 0);
  const unit = lines.find((line) => line[axis] > 0)?.[axis] ?? 1;
  const xs = scale(0, far, logX ? unit : null);
  const [low, high] = spread(all, logY);
  const ys = logY ? scale(Math.log(low), Math.log(high)) : scale(low, high);
  const x = (value) => EDGE.left + xs.share(value) * across;
  const y = (value) => EDGE.top + (1 - ys.share(logY ? Math.log(value) : value)) * down;
  const drawn = (values) => path(lines.map((line, at) => [x(line[axis]), y(values[at])]));
  const calm = smooth > 0 ? smoothed(lossOf, smooth) : lossOf;
  return {
    axis, across, down, far, low, high, unit, logX, logY, x, y,
    raw: drawn(lossOf),
    calm: drawn(calm),
    calmAt: new Map(lines.map((line, at) => [line, calm[at]])),
    heldLine: path(held.map((line) => [x(line[axis]), y(line.held_out_loss)])),
    heldDots: held.length <= 60 ? held.map((line) => [x(line[axis]), y(line.held_out_loss)]) : [],
    xOfStep: (step) => x(along(lines, axis, step)),
    stepAt: (place) => nearestStep(xs.value(clamp((place - EDGE.left) / across, 0, 1)), axis),
    frames: checkpoints().map((saved) => ({ ...saved, x: x(along(lines, axis, saved.step)), part: shareOf(saved.step, run) })),
  };
}

/** From the lowest to the highest; a few wild values at the start must not flatten all the rest. */
function spread(values, isLog) {
  const sorted = [...values].sort((one, other) => one - other);
  const high = sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * 0.995))];
  const low = sorted[0];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return isLog ? [low * 0.96, high * 1.04] : [Math.max(0, low - room), high + room];
}

function nearestStep(value, axis) {
  const line = nearestLine(learn.lines, axis, value);
  return line && value > (learn.lines[0][axis] ?? 0) / 2 ? line.step : 0;
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
      <text class="lrn-tick end" x=${EDGE.left - 6} y=${y(value)}>${nats(value)}</text></g>`)}
    ${right.filter((value) => fits(x(value), 44)).map((value) => html`<text class="lrn-tick" x=${x(value)}
      y=${HEIGHT - 9}>${FORMAT[axis](value)}</text>`)}
    <${Frames} frames=${plot.frames} floor=${floor} />
    <path class="lrn-raw" d=${plot.raw} />
    <path class="lrn-train" d=${plot.calm} />
    <path class="lrn-held" d=${plot.heldLine} />
    ${plot.heldDots.map(([cx, cy]) => html`<circle class="lrn-dot" cx=${cx} cy=${cy} r="2.5" />`)}
  </svg>`;
}

/** Where checkpoints lie: a line down the picture, named where there is room. */
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
  const now = stepNow();
  const under = (event) => plot.stepAt(event.clientX - box.current.getBoundingClientRect().left);
  const down = (event) => {
    if (event.button > 0) return;
    event.currentTarget.setPointerCapture(event.pointerId);
    lookAt(under(event));
  };
  const move = (event) => {
    point(under(event));
    if (event.currentTarget.hasPointerCapture(event.pointerId)) lookAt(under(event));
  };
  const key = (event) => {
    const steps = checkpoints().map(({ step }) => step);
    let next = null;
    if (event.key in KEYS) next = neighbour(plot, now, KEYS[event.key]);
    else if (event.key === "PageUp") next = steps.find((step) => step > now) ?? lastStep();
    else if (event.key === "PageDown") next = steps.findLast((step) => step < now) ?? 0;
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = lastStep();
    if (next === null) return;
    event.preventDefault();
    point(null);
    lookAt(next);
  };
  const hovered = learn.hovered === null ? null : plot.xOfStep(learn.hovered);
  return html`<div class="lrn-hand" role="slider" tabindex="0" ref=${box} aria-label="Along the training: step"
      aria-valuemin="0" aria-valuemax=${lastStep()} aria-valuenow=${now} aria-valuetext=${spoken(now)}
      onPointerDown=${down} onPointerMove=${move} onPointerLeave=${() => point(null)} onKeyDown=${key}>
    ${hovered !== null && html`<i class="lrn-under" style=${{ left: `${hovered}px` }}></i>`}
    <i class="lrn-now" style=${{ left: `${plot.xOfStep(now)}px` }}></i>
  </div>`;
}

/** A hundredth of the picture further: the same way at every scale. */
function neighbour(plot, now, way) {
  const from = plot.xOfStep(now);
  for (let far = 1; far <= plot.across; far += 1) {
    const step = plot.stepAt(from + way * Math.max(far, plot.across / 100));
    if ((step - now) * way > 0) return step;
  }
  return way > 0 ? lastStep() : 0;
}

/** What is known at a step, as words. */
function factsAt(step) {
  const { lines } = learn;
  const line = nearestLine(lines, "step", step);
  const held = lines.findLast((each) => each.step <= step && Number.isFinite(each.held_out_loss))
    ?? lines.find((each) => Number.isFinite(each.held_out_loss));
  return { line: step === 0 ? { step: 0, tokens: 0, seconds: 0, loss: line?.step === 0 ? line.loss : undefined } : line, held };
}

function spoken(step) {
  const { line, held } = factsAt(step);
  if (!line) return `step ${step}`;
  return `step ${count(step)}, ${count(line.tokens)} tokens, loss ${nats(line.loss)}, held out ${nats(held?.held_out_loss)}`;
}

/** The figures of the step under the pointer, or of the one that is looked at. */
function Figures({ plot }) {
  const step = learn.hovered ?? stepNow();
  const { line, held } = factsAt(step);
  if (!line) return html`<figcaption class="small"></figcaption>`;
  const key = (look, name, value) => html`<span class="lrn-key"><i class=${look}></i>${name} <b>${value}</b></span>`;
  return html`<figcaption class="small">
    <span>Step <b data-figure="step">${count(line.step)}</b> · <b data-figure="tokens">${compact(line.tokens)}</b> tokens · <b>${clock(line.seconds)}</b></span>
    ${key("train", "Training", nats(line.loss))}${learn.view.smooth > 0 && Number.isFinite(plot?.calmAt.get(line))
      && html`<span>smoothed <b>${nats(plot.calmAt.get(line))}</b></span>`}
    ${held && key("held", held.step === line.step ? "Held out" : `Held out at ${count(held.step)}`, nats(held.held_out_loss))}
    ${held && Number.isFinite(held.bits_per_byte) && html`<span>Bits per byte <b data-figure="bits">${bits(held.bits_per_byte)}</b></span>`}
  </figcaption>`;
}

function Choices() {
  const { view } = learn;
  const box = (name, title) => html`<label class="lrn-check"><input type="checkbox" checked=${view[name]}
    onChange=${(event) => setView({ [name]: event.target.checked })} /> ${title}</label>`;
  return html`<div class="row small lrn-choices">
    <h3>Loss</h3><span class="quiet">nats a token</span><span class="grow"></span>
    <div class="segments" role="group" aria-label="Along the picture">
      ${Object.entries(AXES).map(([name, title]) => html`<button type="button" aria-pressed=${view.axis === name}
        onClick=${() => setView({ axis: name })}>${title}</button>`)}
    </div>
    <span class="row lrn-scales" role="group" aria-label="Logarithmic scale">Log scale: ${box("logX", AXES[view.axis].toLowerCase())} ${box("logY", "loss")}</span>
    <label><span class="visually-hidden">Smoothing</span><select class="field" id="lrn-smooth" value=${view.smooth}
      onChange=${(event) => setView({ smooth: Number(event.target.value) })}>
      ${Object.entries(SMOOTH).sort(([one], [other]) => one - other).map(([value, title]) => html`<option value=${value}>${title}</option>`)}
    </select></label>
  </div>`;
}
