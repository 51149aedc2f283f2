// A report, or two side by side: the same parts, figures in columns, plots with the same axes.

import { html } from "../lib.js";
import { shortName } from "../models/name.js";
import { Legend, Plot, rise } from "./plot.js";
import { interval, told, winner } from "./words.js";

const each = (values) => [...new Set(values)];
const figureOf = (part, name) => part?.figures.find((figure) => figure.name === name) ?? null;

/** `reports`: one or two, of which the last may still be growing. */
export function Report({ reports }) {
  const names = each(reports.flatMap(({ parts }) => parts.map(({ name }) => name)));
  const rows = names.map((name) => reports.map(({ parts }) => parts.find((part) => part.name === name) ?? null));
  const models = reports.map(({ model }) => shortName(model));
  const sameTokens = each(reports.map(({ machine }) => machine.vocabulary)).length === 1;
  return html`<div class="msr-facts">${reports.map((report) => html`<${Facts} report=${report} />`)}</div>
    <nav class="msr-cards" aria-label="Parts of the report">${rows.map((parts) => html`<${Card} parts=${parts} />`)}</nav>
    ${rows.map((parts, at) => html`<${Section} key=${names[at]} parts=${parts} models=${models} sameTokens=${sameTokens} />`)}`;
}

function Facts({ report }) {
  const facts = { model: report.model, ...report.machine };
  return html`<dl class="small">${Object.entries(facts).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

/** A part's first figure, of each model, and the way to the part. */
function Card({ parts }) {
  const part = parts.find(Boolean);
  const name = part.figures[0]?.name;
  const go = (event) => {
    event.preventDefault(); // the address is the page's, and stays
    const section = document.getElementById(`msr-${part.name}`);
    section.scrollIntoView();
    section.focus({ preventScroll: true });
  };
  return html`<a href=${`#msr-${part.name}`} onClick=${go}><em>${part.name}</em>
    ${name && html`<b>${parts.map((one) => told(figureOf(one, name)?.value, figureOf(one, name)?.unit)).join(" · ")}</b><span>${name}</span>`}</a>`;
}

function Section({ parts, models, sameTokens }) {
  const part = parts.find(Boolean);
  return html`<section class="panel stack msr-part" id=${`msr-${part.name}`} tabindex="-1" aria-label=${part.title}>
    <h3>${part.title}</h3>
    <p class="quiet small">${part.formula}</p>
    <${Figures} parts=${parts} models=${models} sameTokens=${sameTokens} />
    <${Plots} parts=${parts} models=${models} />
    ${parts.map((one, at) => one?.table.length > 0 && html`<${Table} rows=${one.table} name=${models[at]} />`)}
    ${parts.map((one, at) => one?.example && html`<${Example} example=${one.example} whose=${parts.length > 1 ? `${models[at]}: ` : ""} />`)}
    <ul class="small quiet">${part.notes.map((note) => html`<li>${note}</li>`)}</ul>
  </section>`;
}

function Figures({ parts, models, sameTokens }) {
  const names = each(parts.flatMap((part) => (part?.figures ?? []).map(({ name }) => name)));
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
    ${figures.map((figure, at) => html`<td class=${at === best ? "msr-value msr-best" : "msr-value"}>${told(figure?.value, figure?.unit)}${
      at === best && html`<span class="visually-hidden"> (better)</span>`}</td><td>${figure ? interval(figure) : ""}</td>`)}
    ${figures.length === 1 && html`<td>${figures[0].n?.toLocaleString("en-US") ?? ""}</td>`}</tr>`;
}

function Plots({ parts, models }) {
  const titles = each(parts.flatMap((part) => (part?.series ?? []).map(({ plot }) => plot)));
  const found = titles.flatMap((title) => {
    const own = parts.map((part) => (part?.series ?? []).filter(({ plot, x }) => plot === title && x.length));
    const ranges = own.filter((series) => series.length).map(rise);
    const up = [Math.min(...ranges.map(([low]) => low)), Math.max(...ranges.map(([, high]) => high))];
    return own.map((series, at) => series.length > 0 && html`<figure key=${`${title} ${at}`}>
      <figcaption>${title}${parts.length > 1 ? ` · ${models[at]}` : ""}</figcaption>
      <${Plot} series=${series} up=${up} /><${Legend} series=${series} /></figure>`);
  });
  return found.some(Boolean) ? html`<div class=${`msr-plots ${parts.length > 1 ? "pairs" : ""}`}>${found}</div>` : null;
}

function Table({ rows: [head, ...rows], name }) {
  return html`<div class="msr-wide" role="region" aria-label=${`Table: ${name}`} tabindex="0"><table><caption class="small quiet">${name}</caption>
    <thead><tr>${head.map((cell) => html`<th scope="col">${cell}</th>`)}</tr></thead>
    <tbody>${rows.map(([first, ...rest]) => html`<tr><th scope="row">${first}</th>${rest.map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody></table></div>`;
}

function Example({ example: { text, marks, caption }, whose }) {
  const kinds = each(marks.map(({ kind }) => kind));
  const look = (kind) => `hue-${(kinds.indexOf(kind) % 6) + 1}`;
  const letters = [...text]; // marks count characters, as Python does
  const pieces = [];
  let at = 0;
  for (const mark of marks.toSorted((one, other) => one.start - other.start)) {
    pieces.push(letters.slice(at, mark.start).join(""),
      html`<mark class=${look(mark.kind)} title=${mark.title || null}>${letters.slice(mark.start, mark.end).join("")}</mark>`);
    at = mark.end;
  }
  return html`<figure class="msr-example"><figcaption class="small">${whose}${caption}</figcaption>
    <blockquote dir="auto" tabindex="0">${pieces}${letters.slice(at).join("")}</blockquote>
    ${kinds.length > 0 && html`<ul class="msr-legend small">${kinds.map((kind) => html`<li><mark class=${look(kind)}>${kind}</mark></li>`)}</ul>`}</figure>`;
}
