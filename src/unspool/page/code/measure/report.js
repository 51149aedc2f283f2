// A costs report, or two side by side: number formats, plots, tables and an example text.

import { ticks } from "../costs/chart.js";
import { html } from "../lib.js";
import { shortName } from "../models.js";

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three significant digits, without trailing zeros. */
const formatNumber = (value) => String(Number(value.toPrecision(3))).replace("-", "−");

function formatValue(value, unit = "") {
  if (value == null) return "–";
  if (unit === "%") return `${Math.abs(value) < 1 ? formatNumber(100 * value) : WHOLE.format(100 * value).replace("-", "−")} %`;
  const text = Number.isInteger(value) || Math.abs(value) >= 1000 ? WHOLE.format(value).replace("-", "−") : formatNumber(value);
  return `${text} ${unit}`.trimEnd();
}

/** The 95 % interval; empty where there is none. */
function interval({ low, high, unit }) {
  if (low == null || high == null) return "";
  const first = formatValue(low, unit);
  return `${unit && first.endsWith(unit) ? first.slice(0, -unit.length).trimEnd() : first} … ${formatValue(high, unit)}`;
}

/** Index of the model whose interval is better than all others; null: none. Nats are comparable only with the same vocabulary. */
function winner(figures, sameTokens) {
  const { better, unit } = figures.find(Boolean) ?? {};
  if (figures.length < 2 || !better || (unit.startsWith("nats") && !sameTokens)) return null;
  const beats = (a, b) => (better === "lower" ? a.high != null && b.low != null && a.high < b.low
    : a.low != null && b.high != null && a.low > b.high);
  const best = figures.findIndex((figure) => figure && figures.every((other) => other === figure || (other && beats(figure, other))));
  return best < 0 ? null : best;
}

// -- plots: lines with intervals, stacked bars, dashed references ------------------------------------

const WIDTH = 440;
const HEIGHT = 270;
const EDGE = { left: 58, right: 14, top: 14, bottom: 46 };
const FLOOR = HEIGHT - EDGE.bottom;
const BANDS = 3; // more bands would hide each other
const hue = (number) => `hue-${(number % 6) + 1}`;
const isNumber = (value) => value !== null && Number.isFinite(value);

/** The range of all y, intervals included; from 0 where nothing is below. */
function yRange(series) {
  if (series.some(({ kind }) => kind === "bars")) {
    const sums = series[0].x.map((_, at) => series.reduce((sum, { y }) => sum + (y[at] ?? 0), 0));
    return [0, (Math.max(...sums) || 1) * 1.05];
  }
  const every = series.flatMap(({ y, low, high }) => [...y, ...(low ?? []), ...(high ?? [])]).filter(isNumber);
  const [least, most] = [Math.min(...every), Math.max(...every)];
  const low = least >= 0 ? 0 : least * 1.05;
  return [low, most > low ? most * 1.05 : low + 1];
}

function Plot({ series, up }) {
  const bars = series.some(({ kind }) => kind === "bars");
  const frame = plotFrame(series, up, bars);
  const crowded = series.filter(({ low }) => low).length > BANDS;
  const first = series[0];
  const lines = bars ? [] : series.map((data, number) => ({ data, number }));
  return html`<svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${first.plot || first.y_label}, by ${first.x_label}`}>
    <${Axes} frame=${frame} first=${first} names=${bars ? first.x.map(formatNumber) : null} />
    ${bars && html`<${Stacks} frame=${frame} series=${series} />`}
    ${lines.map(({ data, number }) => html`<${Interval} frame=${frame} data=${data} number=${number} crowded=${crowded} />`)}
    ${lines.map(({ data, number }) => html`<${Line} frame=${frame} data=${data} number=${number} />`)}
  </svg>`;
}

/** The legend of a plot. */
function Legend({ series }) {
  if (series.length < 2) return null;
  return html`<ul class="msr-legend small">${series.map(({ name, kind }, number) => html`<li key=${name}>
    <i class=${kind === "reference" ? "dashed" : hue(number)}></i>${name}</li>`)}</ul>`;
}

/** Scales from values to px. */
function plotFrame(series, [low, high], bars) {
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
  const values = [];
  for (let k = Math.ceil(Math.log(from) / Math.log(base) - 1e-9); base ** k <= to * 1.0001; k += 1) values.push(base ** k);
  if (values.length < 2) return ticks(from, to, 4);
  const step = Math.ceil(values.length / 6);
  return values.filter((_, at) => at % step === 0);
}

function Axes({ frame, first, names }) {
  const right = WIDTH - EDGE.right;
  const across = names ? names.map((name, at) => [at, name])
    : (frame.log ? powers(frame.from, frame.to) : ticks(frame.from, frame.to, 5)).map((value) => [value, formatNumber(value)]);
  const middle = (EDGE.top + FLOOR) / 2;
  return html`<path class="msr-axis" d=${`M${EDGE.left},${EDGE.top}V${FLOOR}H${right}`} />
    ${ticks(frame.low, frame.high, 4).map((value) => html`<path class="msr-grid" d=${`M${EDGE.left},${frame.y(value)}H${right}`} />
      <text class="end" x=${EDGE.left - 7} y=${frame.y(value) + 4}>${formatNumber(value)}</text>`)}
    ${across.map(([value, name]) => html`<text x=${frame.x(value)} y=${FLOOR + 17}>${name}</text>`)}
    <text x=${(EDGE.left + right) / 2} y=${HEIGHT - 8}>${first.x_label}</text>
    <text x="13" y=${middle} transform=${`rotate(-90 13 ${middle})`}>${first.y_label}</text>`;
}

function Line({ frame, data, number }) {
  const points = data.x.map((x, at) => ({ at, x: frame.x(x), y: frame.y(data.y[at] ?? 0) })).filter(({ at }) => isNumber(data.y[at]));
  const path = `M${points.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L")}`;
  if (!points.length) return null;
  if (data.kind === "reference") return html`<path class="msr-reference" d=${path} />`;
  return html`<g class=${hue(number)}><path class="msr-line" d=${path} />
    ${points.map(({ at, x, y }) => html`<circle cx=${x} cy=${y} r="3"><title>${`${data.name}: ${formatNumber(data.y[at])} at ${formatNumber(data.x[at])}`}</title></circle>`)}</g>`;
}

/** A band around the line, or with many lines a bar at each point. */
function Interval({ frame, data, number, crowded }) {
  if (!data.low || !data.high) return null;
  const ends = data.x.map((x, at) => [frame.x(x), data.low[at], data.high[at]]).filter(([, low, high]) => isNumber(low) && isNumber(high))
    .map(([x, low, high]) => [x.toFixed(1), frame.y(low).toFixed(1), frame.y(high).toFixed(1)]);
  if (crowded || ends.length < 2) {
    return html`<path class=${`msr-whisker ${hue(number)}`} d=${ends.map(([x, low, high]) => `M${x},${low}V${high}`).join("")} />`;
  }
  const around = [...ends.map(([x, , high]) => `${x},${high}`), ...ends.toReversed().map(([x, low]) => `${x},${low}`)];
  return html`<path class=${`msr-band ${hue(number)}`} d=${`M${around.join("L")}Z`} />`;
}

/** Stacked bars. */
function Stacks({ frame, series }) {
  const room = (frame.x(1) - frame.x(0)) * 0.55;
  return series[0].x.map((x, at) => {
    let below = 0;
    return series.map((data, number) => {
      const value = data.y[at] ?? 0;
      const [top, bottom] = [frame.y(below + value), frame.y(below)];
      below += value;
      return html`<rect class=${hue(number)} x=${frame.x(at) - room / 2} y=${top} width=${room} height=${Math.max(0, bottom - top)}>
        <title>${`${data.name}: ${formatNumber(value)} at ${formatNumber(x)}`}</title></rect>`;
    });
  });
}

// -- the report ---------------------------------------------------------------------------------

const unique = (values) => [...new Set(values)];
const figureOf = (part, name) => part?.figures.find((figure) => figure.name === name) ?? null;

/** `reports`: one or two; the last may still be growing. */
export function Report({ reports }) {
  const names = unique(reports.flatMap(({ parts }) => parts.map(({ name }) => name)));
  const rows = names.map((name) => reports.map(({ parts }) => parts.find((part) => part.name === name) ?? null));
  const models = reports.map(({ model }) => shortName(model));
  const sameTokens = unique(reports.map(({ machine }) => machine.vocabulary)).length === 1;
  return html`<div class="msr-facts">${reports.map((report) => html`<${Facts} report=${report} />`)}</div>
    <nav class="msr-cards" aria-label="Parts of the report">${rows.map((parts) => html`<${Card} parts=${parts} />`)}</nav>
    ${rows.map((parts, at) => html`<${Section} key=${names[at]} parts=${parts} models=${models} sameTokens=${sameTokens} />`)}`;
}

function Facts({ report }) {
  const facts = { model: report.model, ...report.machine };
  return html`<dl class="small">${Object.entries(facts).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** The first figure of a part, of each model, with a link to the part. */
function Card({ parts }) {
  const part = parts.find(Boolean);
  const name = part.figures[0]?.name;
  const go = (event) => {
    event.preventDefault(); // keep the address
    const section = document.getElementById(`msr-${part.name}`);
    section.scrollIntoView();
    section.focus({ preventScroll: true });
  };
  return html`<a href=${`#msr-${part.name}`} onClick=${go}><em>${part.name}</em>
    ${name && html`<b>${parts.map((part) => formatValue(figureOf(part, name)?.value, figureOf(part, name)?.unit)).join(" · ")}</b><span>${name}</span>`}</a>`;
}

function Section({ parts, models, sameTokens }) {
  const part = parts.find(Boolean);
  return html`<section class="panel stack msr-part" id=${`msr-${part.name}`} tabindex="-1" aria-label=${part.title}>
    <h3>${part.title}</h3>
    <p class="msr-finding">${findingOf(parts, models)}</p>
    <${Plots} parts=${parts} models=${models} />
    ${parts.map((entry, at) => entry?.example && html`<${Example} example=${entry.example} whose=${parts.length > 1 ? `${models[at]}: ` : ""} />`)}
    <details class="msr-details"><summary>Figures, formula and notes</summary>
      <p class="quiet small">${part.formula}</p>
      <${Figures} parts=${parts} models=${models} sameTokens=${sameTokens} />
      ${parts.map((entry, at) => entry?.table.length > 0 && html`<${Table} rows=${entry.table} name=${models[at]} />`)}
      <ul class="small quiet">${part.notes.map((note) => html`<li>${note}</li>`)}</ul>
    </details>
  </section>`;
}

/** The first figure of a part as one line, with its interval, for each model. */
function findingOf(parts, models) {
  const name = parts.find(Boolean).figures[0]?.name;
  if (!name) return "Nothing could be measured.";
  const values = parts.map((part, at) => {
    const figure = figureOf(part, name);
    const whose = parts.length > 1 ? `${models[at]} ` : "";
    if (figure?.value == null) return `${whose}not measured${figure?.why ? ` (${figure.why})` : ""}`;
    const range = interval(figure);
    return `${whose}${formatValue(figure.value, figure.unit)}${range ? ` (95 % interval ${range})` : ""}`;
  });
  return html`${name.charAt(0).toUpperCase() + name.slice(1)}: <b>${values.join("; ")}</b>`;
}

function Figures({ parts, models, sameTokens }) {
  const names = unique(parts.flatMap((part) => (part?.figures ?? []).map(({ name }) => name)));
  if (!names.length) return null;
  const several = parts.length > 1;
  const label = `Figures: ${parts.find(Boolean).title}`;
  return html`<div class="msr-wide" role="region" aria-label=${label} tabindex="0"><table class="msr-figures">
    <thead><tr><th scope="col">measured</th>${several
      ? models.map((model) => html`<th scope="col">${model}</th><th scope="col">95 % interval</th>`)
      : html`<th scope="col">value</th><th scope="col">95 % interval</th><th scope="col">n</th>`}</tr></thead>
    <tbody>${names.map((name) => html`<${Row} key=${name} name=${name} figures=${parts.map((part) => figureOf(part, name))} sameTokens=${sameTokens} />`)}</tbody>
  </table></div>`;
}

function Row({ name, figures, sameTokens }) {
  const best = winner(figures, sameTokens);
  const why = figures.find((figure) => figure?.why)?.why;
  return html`<tr><th scope="row">${name}${why && html`<small>${why}</small>`}</th>
    ${figures.map((figure, at) => html`<td class=${at === best ? "msr-value msr-best" : "msr-value"}>${formatValue(figure?.value, figure?.unit)}${
      at === best && html`<span class="visually-hidden"> (better)</span>`}</td><td>${figure ? interval(figure) : ""}</td>`)}
    ${figures.length === 1 && html`<td>${figures[0].n?.toLocaleString("en-US") ?? ""}</td>`}</tr>`;
}

function Plots({ parts, models }) {
  const titles = unique(parts.flatMap((part) => (part?.series ?? []).map(({ plot }) => plot)));
  const plots = titles.flatMap((title) => {
    const seriesByReport = parts.map((part) => (part?.series ?? []).filter(({ plot, x }) => plot === title && x.length));
    const ranges = seriesByReport.filter((series) => series.length).map(yRange);
    const up = [Math.min(...ranges.map(([low]) => low)), Math.max(...ranges.map(([, high]) => high))];
    return seriesByReport.map((series, at) => series.length > 0 && html`<figure key=${`${title} ${at}`}>
      <figcaption>${title}${parts.length > 1 ? ` · ${models[at]}` : ""}</figcaption>
      <${Plot} series=${series} up=${up} /><${Legend} series=${series} /></figure>`);
  });
  return plots.some(Boolean) ? html`<div class=${`msr-plots ${parts.length > 1 ? "pairs" : ""}`}>${plots}</div>` : null;
}

function Table({ rows: [head, ...rows], name }) {
  return html`<div class="msr-wide" role="region" aria-label=${`Table: ${name}`} tabindex="0"><table><caption class="small quiet">${name}</caption>
    <thead><tr>${head.map((cell) => html`<th scope="col">${cell}</th>`)}</tr></thead>
    <tbody>${rows.map(([first, ...cells]) => html`<tr><th scope="row">${first}</th>${cells.map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody></table></div>`;
}

function Example({ example: { text, marks, caption }, whose }) {
  const kinds = unique(marks.map(({ kind }) => kind));
  const look = (kind) => `hue-${(kinds.indexOf(kind) % 6) + 1}`;
  const letters = [...text]; // marks count characters, as Python does
  const pieces = [];
  let at = 0;
  for (const mark of marks.toSorted((a, b) => a.start - b.start)) {
    pieces.push(letters.slice(at, mark.start).join(""),
      html`<mark class=${look(mark.kind)} title=${mark.title || null}>${letters.slice(mark.start, mark.end).join("")}</mark>`);
    at = mark.end;
  }
  return html`<figure class="msr-example"><figcaption class="small">${whose}${caption}</figcaption>
    <blockquote dir="auto" tabindex="0">${pieces}${letters.slice(at).join("")}</blockquote>
    ${kinds.length > 0 && html`<ul class="msr-legend small">${kinds.map((kind) => html`<li><mark class=${look(kind)}>${kind}</mark></li>`)}</ul>`}</figure>`;
}
