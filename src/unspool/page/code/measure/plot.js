// Series of a report as a picture: lines with their intervals, stacked bars, dashed references.

import { html } from "../lib.js";
import { ticks } from "../costs/paint.js";
import { short } from "./words.js";

const WIDTH = 440;
const HEIGHT = 270;
const EDGE = { left: 58, right: 14, top: 14, bottom: 46 };
const FLOOR = HEIGHT - EDGE.bottom;
const BANDS = 3; // around lines: more hide each other
const hue = (number) => `hue-${(number % 6) + 1}`;
const real = (value) => value !== null && Number.isFinite(value);

/** The range of all y, intervals included; from 0 where nothing is below. */
export function rise(series) {
  if (series.some(({ kind }) => kind === "bars")) {
    const sums = series[0].x.map((_, at) => series.reduce((sum, { y }) => sum + (y[at] ?? 0), 0));
    return [0, (Math.max(...sums) || 1) * 1.05];
  }
  const every = series.flatMap(({ y, low, high }) => [...y, ...(low ?? []), ...(high ?? [])]).filter(real);
  const [least, most] = [Math.min(...every), Math.max(...every)];
  const low = least >= 0 ? 0 : least * 1.05;
  return [low, most > low ? most * 1.05 : low + 1];
}

export function Plot({ series, up }) {
  const bars = series.some(({ kind }) => kind === "bars");
  const frame = framed(series, up, bars);
  const crowded = series.filter(({ low }) => low).length > BANDS;
  const first = series[0];
  const lines = bars ? [] : series.map((one, number) => ({ one, number }));
  return html`<svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${first.plot || first.y_label}, by ${first.x_label}`}>
    <${Axes} frame=${frame} first=${first} names=${bars ? first.x.map(short) : null} />
    ${bars && html`<${Stacks} frame=${frame} series=${series} />`}
    ${lines.map(({ one, number }) => html`<${Interval} frame=${frame} one=${one} number=${number} crowded=${crowded} />`)}
    ${lines.map(({ one, number }) => html`<${Line} frame=${frame} one=${one} number=${number} />`)}
  </svg>`;
}

/** What the colors mean. */
export function Legend({ series }) {
  if (series.length < 2) return null;
  return html`<ul class="msr-legend small">${series.map(({ name, kind }, number) => html`<li key=${name}>
    <i class=${kind === "reference" ? "dashed" : hue(number)}></i>${name}</li>`)}</ul>`;
}

/** Where numbers lie on the paper. */
function framed(series, [low, high], bars) {
  const log = series[0].log_x && !bars;
  const every = series.flatMap(({ x }) => x);
  let [from, to] = bars ? [-0.5, series[0].x.length - 0.5] : [Math.min(...every), Math.max(...every)];
  if (from === to) [from, to] = log ? [from / 2, to * 2] : [from - 1, to + 1];
  const at = log ? Math.log : (value) => value;
  return {
    log, from, to, low, high,
    x: (value) => EDGE.left + ((at(value) - at(from)) / (at(to) - at(from))) * (WIDTH - EDGE.left - EDGE.right),
    y: (value) => EDGE.top + ((high - Math.min(high, Math.max(low, value))) / (high - low)) * (FLOOR - EDGE.top),
  };
}

/** Round numbers on a logarithmic axis: powers of ten, or of two where it spans few. */
function powers(from, to) {
  const base = to / from >= 300 ? 10 : 2;
  const found = [];
  for (let k = Math.ceil(Math.log(from) / Math.log(base) - 1e-9); base ** k <= to * 1.0001; k += 1) found.push(base ** k);
  if (found.length < 2) return ticks(from, to, 4);
  const step = Math.ceil(found.length / 6);
  return found.filter((_, at) => at % step === 0);
}

function Axes({ frame, first, names }) {
  const right = WIDTH - EDGE.right;
  const across = names ? names.map((name, at) => [at, name])
    : (frame.log ? powers(frame.from, frame.to) : ticks(frame.from, frame.to, 5)).map((value) => [value, short(value)]);
  const middle = (EDGE.top + FLOOR) / 2;
  return html`<path class="msr-axis" d=${`M${EDGE.left},${EDGE.top}V${FLOOR}H${right}`} />
    ${ticks(frame.low, frame.high, 4).map((value) => html`<path class="msr-grid" d=${`M${EDGE.left},${frame.y(value)}H${right}`} />
      <text class="end" x=${EDGE.left - 7} y=${frame.y(value) + 4}>${short(value)}</text>`)}
    ${across.map(([value, name]) => html`<text x=${frame.x(value)} y=${FLOOR + 17}>${name}</text>`)}
    <text x=${(EDGE.left + right) / 2} y=${HEIGHT - 8}>${first.x_label}</text>
    <text x="13" y=${middle} transform=${`rotate(-90 13 ${middle})`}>${first.y_label}</text>`;
}

function Line({ frame, one, number }) {
  const points = one.x.map((x, at) => ({ at, x: frame.x(x), y: frame.y(one.y[at] ?? 0) })).filter(({ at }) => real(one.y[at]));
  const path = `M${points.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}`;
  if (!points.length) return null;
  if (one.kind === "reference") return html`<path class="msr-reference" d=${path} />`;
  return html`<g class=${hue(number)}><path class="msr-line" d=${path} />
    ${points.map(({ at, x, y }) => html`<circle cx=${x} cy=${y} r="3"><title>${`${one.name}: ${short(one.y[at])} at ${short(one.x[at])}`}</title></circle>`)}</g>`;
}

/** A band around the line; many would hide each other, so then a bar at each point. */
function Interval({ frame, one, number, crowded }) {
  if (!one.low || !one.high) return null;
  const ends = one.x.map((x, at) => [frame.x(x), one.low[at], one.high[at]]).filter(([, low, high]) => real(low) && real(high))
    .map(([x, low, high]) => [x.toFixed(1), frame.y(low).toFixed(1), frame.y(high).toFixed(1)]);
  if (crowded || ends.length < 2) {
    return html`<path class=${`msr-whisker ${hue(number)}`} d=${ends.map(([x, low, high]) => `M${x},${low}V${high}`).join("")} />`;
  }
  const around = [...ends.map(([x, , high]) => `${x},${high}`), ...ends.toReversed().map(([x, low]) => `${x},${low}`)];
  return html`<path class=${`msr-band ${hue(number)}`} d=${`M${around.join("L")}Z`} />`;
}

/** At each x the series on top of each other. */
function Stacks({ frame, series }) {
  const room = (frame.x(1) - frame.x(0)) * 0.55;
  return series[0].x.map((x, at) => {
    let below = 0;
    return series.map((one, number) => {
      const value = one.y[at] ?? 0;
      const [top, bottom] = [frame.y(below + value), frame.y(below)];
      below += value;
      return html`<rect class=${hue(number)} x=${frame.x(at) - room / 2} y=${top} width=${room} height=${Math.max(0, bottom - top)}>
        <title>${`${one.name}: ${short(value)} at ${short(x)}`}</title></rect>`;
    });
  });
}
