// The chain of stages side by side: a column a stage, and ribbons that join the same token.

import { clamp, count, html, percent, plural, useWidth } from "../lib.js";
import { fitting } from "./line.js";
import { huesOf, settingsOf, stageName, stageWords } from "./stages.js";

const HEAD = 38;
const TALL = 190;
const LEAST = 62; // the width of a column
const MOST = 130;
const CLOSEST = 22; // columns to each other
const FARTHEST = 200;
const SHOWN = 8; // tokens that each column names

export function Chain({ branch, step, size }) {
  const settings = settingsOf(branch, step);
  return html`<section class="step-part" aria-labelledby="step-filtered">
    <h3 id="step-filtered"><i aria-hidden="true">2</i> A chain of filters removes some</h3>
    <p class="quiet small">Each column is all the probability there is. What a stage removes is hatched; the
      rest grows to fill the column.</p>
    <${Columns} step=${step} size=${size} />
    <ul class="step-stages small">
      ${step.stages.map((stage) => html`<li key=${stage.name}>
        <b>${stageName(stage.name)}</b> <span class="quiet">${stageWords(stage.name, settings)}</span>
        <span class="step-kept">${did(stage)}</span>
      </li>`)}
    </ul>
  </section>`;
}

function did({ removed, kept, kept_mass: mass, changed }) {
  if (removed > 0) return `−${count(removed)}, ${count(kept)} left with ${percent(mass)} of the probability`;
  return changed ? "removes none, changes their chances" : "removes none";
}

/** The columns as stacked parts: named tokens, then the others that stay, then those that go. */
export function columnsOf(step, size) {
  const own = step.candidates.slice(0, SHOWN).map((one) => [one.token, Math.exp(one.logprob), one.text]);
  const columns = [{ name: "model", kept: size, top: own }, ...step.stages];
  return columns.map(({ name, kept, top }, number) => {
    const next = columns[number + 1];
    const isListed = next && next.kept <= next.top.length; // then all that stay are named
    const stays = new Set(next?.top.map(([token]) => token));
    const parts = [];
    let at = 0;
    const put = (part, share) => {
      parts.push({ ...part, from: at, to: at + share });
      at += share;
    };
    for (const [token, share, text] of top) {
      put({ token, text, isRemoved: Boolean(isListed && !stays.has(token)) }, share);
    }
    const others = Math.max(0, 1 - at);
    const named = parts.reduce((sum, part) => sum + (part.isRemoved ? 0 : part.to - part.from), 0);
    const staying = next ? clamp(next.kept_mass - named, 0, others) : others;
    put({ token: null, text: "", isRemoved: false }, staying);
    put({ token: null, text: "", isRemoved: true }, others - staying);
    return { name, kept, parts: parts.filter(({ from, to }) => to - from > 1e-6) };
  });
}

function Columns({ step, size }) {
  const [box, width] = useWidth();
  const columns = columnsOf(step, size);
  const hues = huesOf(step);
  const gaps = Math.max(1, columns.length - 1);
  const wide = clamp((width / columns.length) * 0.78, LEAST, MOST);
  const gap = clamp((width - wide * columns.length) / gaps, CLOSEST, FARTHEST);
  const all = wide * columns.length + gap * gaps;
  const left = (number) => number * (wide + gap);
  const y = (share) => HEAD + share * TALL;
  const label = `From ${plural(size, "token")}: ${step.stages
    .map((stage) => `${stageName(stage.name)} ${did(stage)}`).join("; ")}.`;
  return html`<div class="step-chain" ref=${box} tabindex="0" role="group" aria-label="The stages, side by side">
    <svg role="img" aria-label=${label} width=${all} height=${HEAD + TALL + 4} viewBox="0 0 ${all} ${HEAD + TALL + 4}">
      <defs>
        <pattern id="step-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
          <line class="chain-hatch" x1="0" y1="0" x2="0" y2="6" />
        </pattern>
      </defs>
      ${columns.slice(1).map((column, number) => html`<${Ribbons} key=${column.name} y=${y} hues=${hues}
        before=${columns[number]} after=${column} from=${left(number) + wide} to=${left(number + 1)}
        picked=${step.token} />`)}
      ${columns.map((column, number) => html`<${Column} key=${column.name} column=${column} x=${left(number)}
        wide=${wide} y=${y} hues=${hues} picked=${step.token} isLast=${number === columns.length - 1} />`)}
    </svg>
  </div>`;
}

function Column({ column, x, wide, y, hues, picked, isLast }) {
  const side = isLast ? { x: x + wide, "text-anchor": "end" } : { x }; // so that a long name has room
  return html`<g>
    <text class="chain-name" y="13" ...${side}>${column.name === "model" ? "the model" : stageName(column.name)}</text>
    <text class="chain-count" y="29" ...${side}>${count(column.kept)}</text>
    ${column.parts.map(({ token, text, from, to, isRemoved }, place) => html`<g key=${token ?? `rest${place}`}
      class="chain-part ${hues.get(token) ?? "hue-0"} ${token === null ? "others" : ""} ${
        isRemoved ? "removed" : ""} ${token === picked ? "picked" : ""}">
      <rect x=${x} y=${y(from)} width=${wide} height=${Math.max(0.5, y(to) - y(from) - 1)} rx="2" />
      ${y(to) - y(from) > 13 && html`<text x=${x + 5} y=${(y(from) + y(to)) / 2 + 4}>${fitting(text, wide)}</text>`}
    </g>`)}
  </g>`;
}

function Ribbons({ before, after, from, to, y, hues, picked }) {
  const middle = (from + to) / 2;
  const ribbon = (a, b) => `M${from} ${y(a.from)}C${middle} ${y(a.from)} ${middle} ${y(b.from)} ${to} ${y(b.from)}`
    + `V${y(b.to)}C${middle} ${y(b.to)} ${middle} ${y(a.to)} ${from} ${y(a.to)}Z`;
  const named = before.parts.filter(({ token, isRemoved }) => token !== null && !isRemoved);
  const pairs = named.map((part) => [part, after.parts.find(({ token }) => token === part.token)]);
  const others = before.parts.find(({ token, isRemoved }) => token === null && !isRemoved);
  const rest = after.parts.filter(({ token }) => token === null);
  if (others && rest.length) pairs.push([others, { from: rest[0].from, to: rest.at(-1).to }]);
  return pairs.filter(([, b]) => b).map(([a, b]) => html`<path key=${a.token} d=${ribbon(a, b)}
    class="chain-ribbon ${hues.get(a.token) ?? "hue-0"} ${a.token === picked ? "picked" : ""}" />`);
}
