// The sampling stages: their names, what each did to the candidates, and the picture of the chain.

import { clamp, count, html, percent, plural, useWidth, visibleText } from "../lib.js";
import { FIELDS } from "../settings.js";

const NAMES = {
  top_k: "top-k",
  top_p: "top-p",
  min_p: "min-p",
  typical_p: "typical",
  top_n_sigma: "top-nσ",
  xtc: "XTC",
  dry: "DRY",
  dynamic_temperature: "dynamic T",
  repetition_penalty: "repetition",
  frequency_penalty: "frequency",
  presence_penalty: "presence",
  no_repeat_ngram: "no repeats",
  logit_bias: "bias",
};
export const stageName = (name) => NAMES[name] ?? name.replaceAll("_", " ");

const WORDS = {
  top_k: (s) => `keeps the ${count(s.top_k)} most likely`,
  top_p: (s) => `keeps the fewest that together reach ${percent(s.top_p)}`,
  min_p: (s) => `drops those below ${percent(s.min_p)} of the top probability`,
  temperature: (s) => `${s.temperature} ${s.temperature < 1 ? "sharpens" : "flattens"} the distribution`,
  greedy: () => "temperature 0: takes the most likely",
  typical_p: () => "keeps those with surprisal close to the entropy",
  eta: () => "drops those below an entropy-dependent threshold",
  top_n_sigma: () => "keeps logits within n standard deviations of the top",
  xtc: () => "sometimes drops the top choices",
  dry: () => "penalizes tokens that extend a repetition",
  no_repeat_ngram: () => "forbids tokens that would repeat an n-gram",
  logit_bias: () => "adds a bias to chosen tokens",
  repetition_penalty: () => "lowers tokens that occurred before",
  frequency_penalty: () => "lowers tokens by how often they occurred",
  presence_penalty: () => "lowers tokens that occurred at all",
  dynamic_temperature: () => "lower temperature at lower entropy",
  mirostat: () => "aims at a constant surprisal",
  grammar: () => "keeps what the grammar allows",
  forbidden: () => "drops what a guard forbids here",
};
const stageText = (name, settings) => WORDS[name]?.(settings) ?? "";

// Stages that keep a prefix of the candidates sorted by probability, or all of them.
const KEEPS_ORDER = new Set([
  "top_k", "top_p", "min_p", "eta", "top_n_sigma", "mirostat", "temperature", "dynamic_temperature", "greedy",
]);

/** The name of the stage that removed a candidate of this rank; null if none did or it is unknown. */
export function removedBy(token, rank, stages) {
  let ordered = true;
  for (const { name, kept, removed, top } of stages) {
    ordered &&= KEEPS_ORDER.has(name);
    if (!removed || top.some(([id]) => id === token)) continue;
    if (kept <= top.length || (ordered && rank >= kept)) return name;
  }
  return null;
}

/** The known candidates after the last stage, most likely first. */
export function finalists(step) {
  const byToken = new Map();
  for (const { token, text, probability } of step.candidates) byToken.set(token, { token, text, probability });
  for (const [token, probability, text] of step.stages.at(-1)?.top ?? []) {
    if (step.stages.at(-1).name !== "greedy") byToken.set(token, { token, text, probability });
  }
  const remaining = [...byToken.values()].filter(({ probability }) => probability > 0);
  return remaining.sort((a, b) => b.probability - a.probability || a.token - b.token);
}

/** A color for each token, the same in all pictures of a step; candidates after the last stage come first. */
export function huesOf(step, others = []) {
  const order = [...finalists(step), ...step.candidates, ...others].map(({ token }) => token);
  const hues = new Map();
  for (const token of order) {
    if (!hues.has(token)) hues.set(token, hues.size < 6 ? `hue-${hues.size + 1}` : "hue-0");
  }
  if ((hues.get(step.token) ?? "hue-0") === "hue-0") hues.set(step.token, "hue-pick");
  return hues;
}

/** The settings of this step; those that its run did not set are defaults. */
export function settingsOf(branch, step) {
  const settings = { ...branch.settings };
  const run = branch.runs?.findLast(({ from }) => from <= step.index);
  for (const { name, defaultValue } of run ? FIELDS : []) {
    if (name in run.settings) settings[name] = run.settings[name] ?? defaultValue;
  }
  return settings;
}

// -- candidates as segments of a line from 0 to 1 ---------------------------------------------------

/** A token cut to the width; empty if fewer than three characters fit. */
function fitText(text, width, letter = 6.6) {
  const most = Math.floor((width - 8) / letter);
  const visible = visibleText(text);
  if (visible.length <= most) return visible;
  return most < 3 ? "" : `${visible.slice(0, most - 1)}…`;
}

const TOP = 34;
const HEIGHT = 30;
const BALL = 6;

/** `parts`: [{token, text, low, high, hue}]; the rest of the line is grey. `hit`: the sampled token. */
export function ProbabilityLine({ parts, u, hit, label, id }) {
  const [box, width] = useWidth();
  const x = (share) => BALL + share * (width - 2 * BALL);
  const struck = parts.find(({ token }) => token === hit);
  return html`<div class="step-line" ref=${box}>
    <svg role="img" aria-label=${label} width=${width} height=${TOP + HEIGHT + 22}
      viewBox="0 0 ${width} ${TOP + HEIGHT + 22}">
      <rect class="line-rest" x=${x(0)} y=${TOP} width=${x(1) - x(0)} height=${HEIGHT} rx="3" />
      ${parts.map(({ token, text, low, high, hue }) => html`<g key=${token}
        class="line-part ${hue} ${token === hit ? "hit" : ""}">
        <rect x=${x(low)} y=${TOP} width=${Math.max(0.5, x(high) - x(low) - 1)} height=${HEIGHT} />
        <text x=${(x(low) + x(high)) / 2} y=${TOP + HEIGHT / 2 + 4}>${fitText(text, x(high) - x(low))}</text>
      </g>`)}
      ${struck && html`<rect class="line-struck" x=${x(struck.low) - 1} y=${TOP - 2}
        width=${Math.max(2, x(struck.high) - x(struck.low) + 1)} height=${HEIGHT + 4} rx="3" />`}
      ${[0, 0.25, 0.5, 0.75, 1].map((tick) => html`<text key=${tick} class="line-tick" y=${TOP + HEIGHT + 17}
        x=${x(tick)} text-anchor=${tick === 0 ? "start" : tick === 1 ? "end" : "middle"}>${tick}</text>`)}
      ${u !== null && html`<g key=${id} class="line-fall">
        <line x1=${x(u)} x2=${x(u)} y1="0" y2=${TOP - BALL} />
        <circle cx=${x(u)} cy=${TOP - BALL + 1} r=${BALL} />
        <text x=${x(u) + (u > 0.7 ? -12 : 12)} y="14" text-anchor=${u > 0.7 ? "end" : "start"}>${u.toFixed(4)}</text>
      </g>`}
    </svg>
  </div>`;
}

// -- the chain: one column a stage, with ribbons between equal tokens --------------------------------

const HEAD = 38;
const CHAIN_HEIGHT = 190;
const MIN_WIDTH = 62; // px, of a column
const MAX_WIDTH = 130;
const MIN_GAP = 22; // px, between columns
const MAX_GAP = 200;
const MAX_NAMED = 8; // tokens named in a column

export function StageChain({ branch, step, size }) {
  const settings = settingsOf(branch, step);
  return html`<section class="step-part" aria-labelledby="step-filtered">
    <h3 id="step-filtered"><i aria-hidden="true">2</i> Sampling stages</h3>
    <p class="quiet small">Each column is the whole distribution. What a stage removes is hatched; the
      rest is renormalized.</p>
    <${Columns} step=${step} size=${size} />
    <ul class="step-stages small">
      ${step.stages.map((stage) => html`<li key=${stage.name}>
        <b>${stageName(stage.name)}</b> <span class="quiet">${stageText(stage.name, settings)}</span>
        <span class="step-kept">${stageEffect(stage)}</span>
      </li>`)}
    </ul>
  </section>`;
}

function stageEffect({ removed, kept, kept_mass: mass, changed }) {
  if (removed > 0) return `−${count(removed)}, ${count(kept)} left with ${percent(mass)} of the probability`;
  return changed ? "removes none, changes probabilities" : "removes none";
}

/** The columns as stacked parts: named tokens, then others that stay, then those removed. */
function columnsOf(step, size) {
  const modelTop = step.candidates.slice(0, MAX_NAMED).map((candidate) => [candidate.token, Math.exp(candidate.logprob), candidate.text]);
  const columns = [{ name: "model", kept: size, top: modelTop }, ...step.stages];
  return columns.map(({ name, kept, top }, number) => {
    const next = columns[number + 1];
    const isListed = next && next.kept <= next.top.length; // all tokens that stay are named
    const stays = new Set(next?.top.map(([token]) => token));
    const parts = [];
    let at = 0;
    const pushPart = (part, share) => {
      parts.push({ ...part, from: at, to: at + share });
      at += share;
    };
    for (const [token, share, text] of top) {
      pushPart({ token, text, isRemoved: Boolean(isListed && !stays.has(token)) }, share);
    }
    const others = Math.max(0, 1 - at);
    const named = parts.reduce((sum, part) => sum + (part.isRemoved ? 0 : part.to - part.from), 0);
    const staying = next ? clamp(next.kept_mass - named, 0, others) : others;
    pushPart({ token: null, text: "", isRemoved: false }, staying);
    pushPart({ token: null, text: "", isRemoved: true }, others - staying);
    return { name, kept, parts: parts.filter(({ from, to }) => to - from > 1e-6) };
  });
}

function Columns({ step, size }) {
  const [box, width] = useWidth();
  const columns = columnsOf(step, size);
  const hues = huesOf(step);
  const gaps = Math.max(1, columns.length - 1);
  const wide = clamp((width / columns.length) * 0.78, MIN_WIDTH, MAX_WIDTH);
  const gap = clamp((width - wide * columns.length) / gaps, MIN_GAP, MAX_GAP);
  const all = wide * columns.length + gap * gaps;
  const columnX = (number) => number * (wide + gap);
  const y = (share) => HEAD + share * CHAIN_HEIGHT;
  const label = `From ${plural(size, "token")}: ${step.stages
    .map((stage) => `${stageName(stage.name)} ${stageEffect(stage)}`).join("; ")}.`;
  return html`<div class="step-chain" ref=${box} tabindex="0" role="group" aria-label="Sampling stages">
    <svg role="img" aria-label=${label} width=${all} height=${HEAD + CHAIN_HEIGHT + 4} viewBox="0 0 ${all} ${HEAD + CHAIN_HEIGHT + 4}">
      <defs>
        <pattern id="step-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
          <line class="chain-hatch" x1="0" y1="0" x2="0" y2="6" />
        </pattern>
      </defs>
      ${columns.slice(1).map((column, number) => html`<${Ribbons} key=${column.name} y=${y} hues=${hues}
        before=${columns[number]} after=${column} from=${columnX(number) + wide} to=${columnX(number + 1)}
        picked=${step.token} />`)}
      ${columns.map((column, number) => html`<${Column} key=${column.name} column=${column} x=${columnX(number)}
        wide=${wide} y=${y} hues=${hues} picked=${step.token} isLast=${number === columns.length - 1} />`)}
    </svg>
  </div>`;
}

function Column({ column, x, wide, y, hues, picked, isLast }) {
  const side = isLast ? { x: x + wide, "text-anchor": "end" } : { x }; // leaves room for a long name
  return html`<g>
    <text class="chain-name" y="13" ...${side}>${column.name === "model" ? "model" : stageName(column.name)}</text>
    <text class="chain-count" y="29" ...${side}>${count(column.kept)}</text>
    ${column.parts.map(({ token, text, from, to, isRemoved }, place) => html`<g key=${token ?? `rest${place}`}
      class="chain-part ${hues.get(token) ?? "hue-0"} ${token === null ? "others" : ""} ${
        isRemoved ? "removed" : ""} ${token === picked ? "picked" : ""}">
      <rect x=${x} y=${y(from)} width=${wide} height=${Math.max(0.5, y(to) - y(from) - 1)} rx="2" />
      ${y(to) - y(from) > 13 && html`<text x=${x + 5} y=${(y(from) + y(to)) / 2 + 4}>${fitText(text, wide)}</text>`}
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
  const unnamed = after.parts.filter(({ token }) => token === null);
  if (others && unnamed.length) pairs.push([others, { from: unnamed[0].from, to: unnamed.at(-1).to }]);
  return pairs.filter(([, b]) => b).map(([a, b]) => html`<path key=${a.token} d=${ribbon(a, b)}
    class="chain-ribbon ${hues.get(a.token) ?? "hue-0"} ${a.token === picked ? "picked" : ""}" />`);
}
