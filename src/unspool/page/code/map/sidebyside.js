// Two branches beside each other: what they share once, then each on its own, then the numbers.

import { ensureSteps, jump, setFault } from "../actions.js";
import { html, isWord, nats, percent, plural, useChanges, useEffect, useMemo, useRef } from "../lib.js";
import { FIELDS } from "../settings.js";
import { branchNow, changed, promptLength, samePrompt, sharedSteps, state } from "../state.js";
import { tintOf } from "../write/tint.js";
import { labelOf, promptWords, quoted } from "./facts.js";

function close() {
  state.comparing = null;
  changed("comparing");
}

export function SideBySide() {
  useChanges("comparing", "current", "steps", "branches", "tint");
  const pair = [branchNow(), state.branches.get(state.comparing)];
  const [one, other] = pair;
  const title = useRef(null);
  useEffect(() => {
    for (const branch of pair) {
      if (branch) ensureSteps(branch.id).catch((error) => { setFault(error); close(); });
    }
    title.current?.focus();
  }, [one?.id, other?.id]);
  useEffect(() => {
    // Before others hear it: the comparison goes first, then what was selected in the text.
    const leave = (event) => {
      if (event.key !== "Escape" || event.target.closest?.("input, textarea, select, dialog")) return;
      event.preventDefault();
      event.stopPropagation();
      close();
    };
    addEventListener("keydown", leave, true);
    return () => removeEventListener("keydown", leave, true);
  }, []);
  if (!one || !other) return null;

  const isSame = samePrompt(one, other);
  const shared = isSame ? sharedSteps(one.steps, other.steps) : 0;
  return html`<section class="beside stack" aria-labelledby="beside-title">
    <div class="row spread">
      <h2 id="beside-title" ref=${title} tabindex="-1">Two branches side by side</h2>
      <button class="button" type="button" onClick=${close}>Close <kbd class="quiet small">Esc</kbd></button>
    </div>
    <p class="quiet small" data-shared=${shared}>${likenessWords(isSame, shared, pair)}</p>
    ${isSame && html`<div class="beside-text beside-shared"><p class="quiet">${promptWords(one)}</p>
      <p><${Tokens} branch=${one} from=${0} to=${shared} /></p></div>`}
    <div class="beside-columns">
      ${pair.map((branch, column) => html`<${Column} key=${branch.id} branch=${branch} from=${shared}
        column=${column} hasPrompt=${!isSame} />`)}
    </div>
    <${Numbers} pair=${pair} />
  </section>`;
}

function likenessWords(isSame, shared, [one, other]) {
  if (!isSame) return "The prompts differ.";
  if (shared === 0) return "Only the prompt is the same: they part at the first token.";
  const same = `The prompt and the first ${plural(shared, "token")} are the same`;
  const ended = [one, other].filter((branch) => branch.steps.length === shared);
  if (ended.length === 2) return `${same}: both texts are alike.`;
  return ended.length ? `${same}; ${quoted(ended[0])} ends there.` : `${same}. Then they part.`;
}

function Column({ branch, from, column, hasPrompt }) {
  const isCurrent = branch.id === state.current;
  return html`<article class=${`beside-column panel column-${column}`} data-branch=${branch.id}>
    <div class="row spread"><h3>${labelOf(branch)}</h3>
      ${isCurrent ? html`<span class="chip">you are here</span>`
        : html`<button class="button tiny" type="button" onClick=${() => jump(branch.id)}>Go there</button>`}
    </div>
    <div class="beside-text">${hasPrompt && html`<p class="quiet">${promptWords(branch)}</p>`}
      <p>${from > 0 && html`<span class="quiet">…</span>`}${
        branch.steps.length > from
          ? html`<${Tokens} branch=${branch} from=${from} to=${branch.steps.length} isParting=${!hasPrompt} />`
          : html` <span class="quiet">nothing more</span>`}</p></div>
  </article>`;
}

/** Steps of a branch, tinted; the first marked where two branches part. */
function Tokens({ branch, from, to, isParting }) {
  const before = promptLength(branch);
  const key = `${branch.id} ${from} ${to} ${state.tint} ${branch.steps[to - 1]?.token}`;
  return useMemo(() => html`${branch.steps.slice(from, to).map((step, number) => {
    const isFirst = isParting && number === 0;
    const kind = ["t", !isFirst && isWord(step.text, branch.steps[from + number - 1]?.text) && "word", tintOf(step, state.tint), step.chosen && "chosen", isFirst && "parts"];
    return html`<span key=${step.index} class=${kind.filter(Boolean).join(" ")}
      data-step=${step.index} title=${`Token ${before + step.index}: ${percent(chance(step))}`}>${
      isFirst && html`<span class="visually-hidden">here they part: </span>`}${step.text}</span>`;
  })}`, [key]);
}

const chance = (step) => (step.logprob == null ? 0 : Math.exp(step.logprob));

// -- numbers ----------------------------------------------------------------------------------

function Numbers({ pair }) {
  const sums = pair.map(summary);
  const row = (title, show) => html`<tr><th scope="row">${title}</th>${
    sums.map((sum, column) => html`<td key=${column}>${show(sum)}</td>`)}</tr>`;
  const settings = differing(pair[0].settings, pair[1].settings);
  return html`<div class="beside-numbers"><table>
    <caption class="visually-hidden">The two branches in numbers</caption>
    <thead><tr><td></td>${pair.map((branch, column) => html`<th key=${column} scope="col">${labelOf(branch)}</th>`)}</tr></thead>
    <tbody>
      ${row("Tokens", (sum) => sum.length)}
      ${row("Probability of the whole text", wholeText)}
      ${row("Per token, on average", (sum) => percent(sum.perToken))}
      ${row("Perplexity", (sum) => nats(sum.perplexity))}
      ${row("Entropy, on average", (sum) => (sum.entropy === null ? "–" : `${nats(sum.entropy)} nats`))}
      ${settings.map(({ name, values }) => html`<tr key=${name} data-setting=${name}>
        <th scope="row">${FIELDS.find((field) => field.name === name)?.title ?? name.replaceAll("_", " ")}</th>
        ${values.map((value, column) => html`<td key=${column}>${settingWords(value)}</td>`)}</tr>`)}
    </tbody></table>
    ${settings.length === 0 && html`<p class="quiet small">Both were written with the same settings.</p>`}
  </div>`;
}

/** Far too small to read as a percentage: as a power of ten, and as what is added up. */
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

// They change what is told of a text, how soon it comes or how long it is, and not how it goes on.
const TECHNICAL = new Set(["top", "trace", "priority", "max_tokens"]);

/** How likely the model held a whole text, and how sure it was on the way. */
export function summary(branch) {
  const { steps } = branch;
  const length = steps.length;
  // A probability of zero is told as null: JSON has no infinity.
  const logprob = steps.reduce((sum, step) => sum + (step.logprob ?? -Infinity), 0);
  const entropy = steps.reduce((sum, step) => sum + (step.entropy ?? 0), 0);
  const per = (sum) => (length ? sum / length : null);
  return {
    length, logprob, perToken: length ? Math.exp(logprob / length) : null,
    perplexity: length ? Math.exp(-logprob / length) : null, entropy: per(entropy),
  };
}

/** Settings of two branches that are not the same: `{name, values: [one, other]}`. */
export function differing(one, other) {
  const names = new Set([...Object.keys(one ?? {}), ...Object.keys(other ?? {})]);
  return [...names].filter((name) => !TECHNICAL.has(name))
    .map((name) => ({ name, values: [one?.[name] ?? null, other?.[name] ?? null] }))
    .filter(({ values }) => JSON.stringify(values[0]) !== JSON.stringify(values[1]));
}
