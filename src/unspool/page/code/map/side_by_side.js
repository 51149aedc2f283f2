// Two branches side by side: the shared text once, then each continuation, then statistics.

import { ensureSteps, jump, setFault } from "../actions.js";
import { html, isWord, nats, percent, plural, useChanges, useEffect, useMemo, useRef } from "../lib.js";
import { labelOf, promptWords, quoted } from "./drawing.js";
import { FIELDS } from "../settings.js";
import { changed, currentBranch, promptLength, samePrompt, sharedSteps, state } from "../state.js";
import { interventionName } from "../steer/changes.js";
import { tintClass } from "../write/pane.js";

function closeComparison() {
  state.comparing = null;
  changed("comparing");
}

export function SideBySide() {
  useChanges("comparing", "current", "steps", "branches", "tint");
  const pair = [currentBranch(), state.branches.get(state.comparing)];
  const [first, second] = pair;
  const title = useRef(null);
  useEffect(() => {
    for (const branch of pair) {
      if (branch) ensureSteps(branch.id).catch((error) => { setFault(error); closeComparison(); });
    }
    title.current?.focus();
  }, [first?.id, second?.id]);
  useEffect(() => {
    // In the capture phase: Escape closes the comparison before it clears the selection.
    const leave = (event) => {
      if (event.key !== "Escape" || event.target.closest?.("input, textarea, select, dialog")) return;
      event.preventDefault();
      event.stopPropagation();
      closeComparison();
    };
    addEventListener("keydown", leave, true);
    return () => removeEventListener("keydown", leave, true);
  }, []);
  if (!first || !second) return null;

  const isSame = samePrompt(first, second);
  const shared = isSame ? sharedSteps(first.steps, second.steps) : 0;
  return html`<section class="beside stack" aria-labelledby="beside-title">
    <div class="row spread">
      <h2 id="beside-title" ref=${title} tabindex="-1">Two branches side by side</h2>
      <button class="button" type="button" onClick=${closeComparison}>Close <kbd class="quiet small">Esc</kbd></button>
    </div>
    <p class="quiet small" data-shared=${shared}>${likenessWords(isSame, shared, pair)}</p>
    ${isSame && html`<div class="beside-text beside-shared"><p class="quiet">${promptWords(first)}</p>
      <p><${Tokens} branch=${first} from=${0} to=${shared} /></p></div>`}
    <div class="beside-columns">
      ${pair.map((branch, column) => html`<${Column} key=${branch.id} branch=${branch} from=${shared}
        column=${column} hasPrompt=${!isSame} />`)}
    </div>
    <${Numbers} pair=${pair} />
  </section>`;
}

function likenessWords(isSame, shared, [first, second]) {
  if (!isSame) return "The prompts differ.";
  if (shared === 0) return "Only the prompt is the same: they diverge at the first token.";
  const text = `The prompt and the first ${plural(shared, "token")} are the same`;
  const ended = [first, second].filter((branch) => branch.steps.length === shared);
  if (ended.length === 2) return `${text}: both texts are equal.`;
  return ended.length ? `${text}; ${quoted(ended[0])} ends there.` : `${text}. Then they diverge.`;
}

function Column({ branch, from, column, hasPrompt }) {
  const isCurrent = branch.id === state.current;
  return html`<article class=${`beside-column panel column-${column}`} data-branch=${branch.id}>
    <div class="row spread"><h3>${labelOf(branch)}</h3>
      ${isCurrent ? html`<span class="chip">current</span>`
        : html`<button class="button tiny" type="button" onClick=${() => jump(branch.id)}>Open</button>`}
    </div>
    <div class="beside-text">${hasPrompt && html`<p class="quiet">${promptWords(branch)}</p>`}
      <p>${from > 0 && html`<span class="quiet">…</span>`}${
        branch.steps.length > from
          ? html`<${Tokens} branch=${branch} from=${from} to=${branch.steps.length} isParting=${!hasPrompt} />`
          : html` <span class="quiet">(end)</span>`}</p></div>
  </article>`;
}

/** Steps of a branch, tinted; the first one marked where two branches diverge. */
function Tokens({ branch, from, to, isParting }) {
  const before = promptLength(branch);
  const key = `${branch.id} ${from} ${to} ${state.tint} ${branch.steps[to - 1]?.token}`;
  return useMemo(() => html`${branch.steps.slice(from, to).map((step, number) => {
    const isFirst = isParting && number === 0;
    const kind = ["t", !isFirst && isWord(step.text, branch.steps[from + number - 1]?.text) && "word", tintClass(step, state.tint), step.chosen && "chosen", isFirst && "parts"];
    return html`<span key=${step.index} class=${kind.filter(Boolean).join(" ")}
      data-step=${step.index} title=${`Token ${before + step.index}: ${percent(modelProbability(step))}`}>${
      isFirst && html`<span class="visually-hidden">they diverge here: </span>`}${step.text}</span>`;
  })}`, [key]);
}

const modelProbability = (step) => (step.logprob == null ? 0 : Math.exp(step.logprob));

// -- numbers ----------------------------------------------------------------------------------

function Numbers({ pair }) {
  const sums = pair.map(summary);
  const row = (title, show) => html`<tr><th scope="row">${title}</th>${
    sums.map((sum, column) => html`<td key=${column}>${show(sum)}</td>`)}</tr>`;
  const settings = differingSettings(pair[0].settings, pair[1].settings);
  return html`<div class="beside-numbers"><table>
    <caption class="visually-hidden">Statistics of the two branches</caption>
    <thead><tr><td></td>${pair.map((branch, column) => html`<th key=${column} scope="col">${labelOf(branch)}</th>`)}</tr></thead>
    <tbody>
      ${row("Tokens", (sum) => sum.length)}
      ${row("Probability of the whole text", wholeText)}
      ${row("Per token, geometric mean", (sum) => percent(sum.perToken))}
      ${row("Perplexity", (sum) => nats(sum.perplexity))}
      ${row("Mean entropy", (sum) => (sum.entropy === null ? "–" : `${nats(sum.entropy)} nats`))}
      ${settings.map(({ name, values }) => html`<tr key=${name} data-setting=${name}>
        <th scope="row">${FIELDS.find((field) => field.name === name)?.title ?? name.replaceAll("_", " ")}</th>
        ${values.map((value, column) => html`<td key=${column}>${name === "interventions" && value ? value.map(interventionName).join("; ") || "–" : settingWords(value)}</td>`)}</tr>`)}
    </tbody></table>
    ${settings.length === 0 && html`<p class="quiet small">Both have the same settings.</p>`}
  </div>`;
}

/** The probability of a text as a percentage or a power of ten, and its log probability. */
function wholeText({ length, logprob }) {
  if (!length) return "–";
  if (!Number.isFinite(logprob)) return "0";
  if (logprob > Math.log(0.0001)) return `${percent(Math.exp(logprob))} (${minus(nats(logprob))} nats)`;
  return html`10<sup>${minus((logprob / Math.LN10).toFixed(1))}</sup> (${minus(nats(logprob))} nats)`;
}

const minus = (written) => written.replace("-", "−");

function settingWords(value) {
  if (value === null) return "–";
  if (typeof value === "boolean") return value ? "on" : "off";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// Settings that do not change which tokens are sampled.
const TECHNICAL = new Set(["top", "trace", "priority", "max_tokens"]);

/** Log probability, perplexity and mean entropy of a text. */
function summary(branch) {
  const { steps } = branch;
  const length = steps.length;
  // null is a probability of zero: JSON has no infinity.
  const logprob = steps.reduce((sum, step) => sum + (step.logprob ?? -Infinity), 0);
  const entropy = steps.reduce((sum, step) => sum + (step.entropy ?? 0), 0);
  const per = (sum) => (length ? sum / length : null);
  return {
    length, logprob, perToken: length ? Math.exp(logprob / length) : null,
    perplexity: length ? Math.exp(-logprob / length) : null, entropy: per(entropy),
  };
}

/** Settings that differ between two branches: `{name, values: [first, second]}`. */
function differingSettings(first, second) {
  const names = new Set([...Object.keys(first ?? {}), ...Object.keys(second ?? {})]);
  return [...names].filter((name) => !TECHNICAL.has(name))
    .map((name) => ({ name, values: [first?.[name] ?? null, second?.[name] ?? null] }))
    .filter(({ values }) => JSON.stringify(values[0]) !== JSON.stringify(values[1]));
}
