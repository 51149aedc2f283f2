// Views of the Compare place: one prompt with several settings or models side by side, or many samples as a tree.

import { currentPrompt, isExample, PromptBar, shared } from "./prompt.js";
import {
  addColumn, columnsOf, compare, FieldError, Fields, isWriting, MOST_COLUMNS, nameOf, Preset, removeColumn, setColumn,
  setModel, stopAll, writeAll,
} from "./runs.js";
import { Samples } from "./samples.js";
import { duration, html, nats, percent, Piece, plural, useChanges, useEffect, useState } from "../lib.js";
import { shortName } from "../models.js";
import { sharedSteps, state } from "../state.js";
import {
  CandidatesPopover, meanEntropy, meanSurprisal, openInWrite, repeatedFourGrams, TokenText,
} from "../token_text.js";
import { TintChoice } from "../write/view.js";

const stepsOf = (column) => state.branches.get(column?.id)?.steps ?? [];

function Columns({ columns, pick }) {
  const first = columns[0];
  const stats = columns.map((column) => numbersOf(column));
  const most = (name) => Math.max(1e-9, ...stats.map((numbers) => numbers[name] ?? 0));
  const scale = { surprise: most("surprise"), entropy: most("entropy"), repeated: 1 };
  return html`
    <div class=${`cmp-columns cmp-of-${columns.length}`} role="group" aria-label="Columns">
      ${columns.map((column, index) => html`<${Column} key=${column.key} columns=${columns} column=${column} index=${index}
        first=${first} numbers=${stats[index]} scale=${scale} pick=${pick} />`)}
    </div>
    ${columns.length < MOST_COLUMNS && html`<p><button class="button" disabled=${isWriting()}
      onClick=${() => addColumn(columns)}>Add a column</button></p>`}`;
}

function numbersOf(column) {
  const steps = stepsOf(column);
  const branch = state.branches.get(column.id);
  return {
    steps,
    surprise: meanSurprisal(steps),
    entropy: meanEntropy(steps),
    repeated: repeatedFourGrams(steps),
    seconds: branch?.last?.total_seconds ?? (column.began ? (column.until - column.began) / 1000 : null),
  };
}

function Column({ columns, column, index, first, numbers, scale, pick }) {
  const branch = state.branches.get(column.id);
  const { steps } = numbers;
  const parts = index === 0 ? null : divergesAt(steps, stepsOf(first));
  const title = `Column ${index + 1}: ${column.model ? shortName(column.model) : nameOf(column.settings)}`;
  const owner = `column ${index + 1}`;
  const set = (values) => setColumn(column, values);
  const fault = column.fault ?? branch?.error ?? null;
  return html`<section class="cmp-column panel" aria-label=${title} data-column=${index + 1}>
    <header>
      <h3 class="visually-hidden">${title}</h3>
      <span class="cmp-count" aria-hidden="true">${index + 1}</span>
      ${column.model ? html`<${ModelSelect} column=${column} owner=${owner} />`
        : html`<${Preset} settings=${column.settings} owner=${owner} change=${set} />`}
      ${columns.length > 1 && html`<button class="button plain tiny" title="Remove this column"
        aria-label=${`Remove ${owner}`} disabled=${isWriting()} onClick=${() => removeColumn(columns, column)}>×</button>`}
    </header>
    <${Fields} settings=${column.settings} fault=${fault} owner=${owner} change=${set} />
    ${fault && html`<${FieldError} fault=${fault} />`}
    ${column.id && html`
      ${!fault && html`<${Divergence} column=${column} first=${first} parts=${parts} />`}
      <${TokenText} steps=${steps} parts=${parts} writing=${column.writing} label=${`Text of ${owner}`}
        pick=${(at, element) => pick({ id: column.id, at, element })} />
      <${Numbers} numbers=${numbers} scale=${scale} branch=${branch} writing=${column.writing} />
      <button class="button" disabled=${steps.length === 0}
        aria-label=${`Open ${owner} in Write`} onClick=${() => openInWrite(column.id)}>Open in Write</button>`}
  </section>`;
}

/** Where this column diverges from the first one, as a sentence. */
function Divergence({ column, first, parts }) {
  const steps = stepsOf(column);
  const others = stepsOf(first);
  const name = "column 1";
  const say = (text, where) => html`<p class="cmp-parting small" data-parts=${where}>${text}</p>`;
  if (column === first) return say("The other columns are compared with this one.", "first");
  if (others.length === 0 || steps.length === 0) return say("", "none");
  if (parts < 0) {
    const over = !column.writing && !first.writing;
    const text = !over ? `The same as ${name} so far`
      : steps.length === others.length ? `The same text as ${name}, all ${plural(steps.length, "token")}`
        : `The same as ${name} for ${plural(Math.min(steps.length, others.length), "token")}, then one text ends`;
    return say(`${text}.`, "none");
  }
  const here = html`<${Piece} text=${steps[parts].piece} /> instead of <${Piece} text=${others[parts].piece} />`;
  return say(parts === 0 ? html`Differs from ${name} at the first token: ${here}`
    : html`The same up to token ${parts}, then ${here}`, parts);
}

const ENDS = {
  length: "max tokens", stop: "end of text", context: "context full", interrupted: "stopped",
};

function Numbers({ numbers, scale, branch, writing }) {
  const { steps, surprise, entropy, repeated, seconds } = numbers;
  const bar = (value, most) => html`<div class="track" aria-hidden="true">
    <span style=${{ width: `${value === null ? 0 : Math.min(1, value / most) * 100}%` }} /></div>`;
  const reason = branch?.finish_reason;
  return html`<dl class="cmp-numbers">
    <dt>Tokens</dt><dd data-number="tokens">${steps.length}</dd>
    <dt title="Mean of −ln(probability) over the tokens">Mean surprisal</dt>
    <dd data-number="surprise">${bar(surprise, scale.surprise)}${nats(surprise)} nats</dd>
    <dt title="Mean entropy of the model's distribution at each token">Mean entropy</dt>
    <dd data-number="entropy">${bar(entropy, scale.entropy)}${nats(entropy)} nats</dd>
    <dt title="Share of 4-grams that occurred before">Repeated 4-grams</dt>
    <dd data-number="repeated">${bar(repeated, scale.repeated)}${percent(repeated)}</dd>
    <dt>Time</dt><dd data-number="time">${duration(seconds)}</dd>
    <dt>End</dt><dd data-number="end">${writing ? "writing…" : ENDS[reason] ?? reason ?? "stopped"}</dd>
  </dl>`;
}

/** Index of the first token that differs; -1 while one text is a prefix of the other. */
function divergesAt(steps, first) {
  const shared = sharedSteps(steps, first);
  return shared < Math.min(steps.length, first.length) ? shared : -1;
}

// -- the view -----------------------------------------------------------------------------------

const TITLES = { settings: "Compare settings", samples: "Compare samples", models: "Compare models" };
const ABOUT = {
  settings: "One prompt, generated once with each of these settings, in one batch. "
    + "With the same seed, only the settings differ.",
  samples: "One prompt, sampled many times with the same settings, in one batch. "
    + "Common prefixes are drawn once.",
  models: "One prompt, generated by several models with the same settings. A model that is not loaded is loaded first. "
    + "Surprisal and entropy are per token: models with different tokenizers cannot be compared by them.",
};

export function CompareView({ picture }) {
  useChanges("compare", "prompt", "mode", "models", "draft");
  const [picked, setPicked] = useState(null);
  useEffect(() => setPicked(null), [picture]);
  const writing = isWriting();
  const columns = picture === "samples" ? [] : columnsOf(picture);
  const write = () => {
    setPicked(null);
    writeAll(picture);
  };
  const close = (back) => {
    if (back && picked?.element.isConnected) picked.element.focus();
    setPicked(null);
  };
  // Enter starts in every field, as in the prompt.
  const enter = (event) => {
    if (event.key !== "Enter" || event.isComposing || !event.target.matches("input") || event.target.form) return;
    event.preventDefault();
    write();
  };
  return html`<section class="cmp stack" aria-label=${TITLES[picture]} onKeyDown=${enter}>
    <h2 class="visually-hidden">${TITLES[picture]}</h2>
    <${PromptBar} running=${writing} start=${write} stop=${stopAll} />
    <p class="quiet small">${ABOUT[picture]}</p>
    <${TintChoice} />
    <${Ready} picture=${picture} columns=${columns} />
    ${picture === "samples" ? html`<${Samples} pick=${setPicked} />` : html`<${Columns} columns=${columns} pick=${setPicked} />`}
    ${picked && html`<${CandidatesPopover} picked=${picked} close=${close} />`}
  </section>`;
}

/** What a click on Run would do, until something was generated. */
function Ready({ picture, columns }) {
  const { samples } = compare;
  if (isWriting() || (picture === "samples" ? samples.ids.length : columns.some(({ id }) => id))) return null;
  const what = picture === "samples" ? `${samples.number} samples as a tree` : plural(columns.length, "text", "texts side by side");
  return html`<p class="cmp-ready">${isExample() ? "Example" : "Ready"}: “${
    shortenPrompt(currentPrompt())}”, ${what}, ${shared.length} tokens each.</p>`;
}

const shortenPrompt = (text) => (text.length > 70 ? `${text.slice(0, 69).toWellFormed()}…` : text);

function ModelSelect({ column, owner }) {
  return html`<select class="field cmp-preset" aria-label=${`Model of ${owner}`} value=${column.model} disabled=${isWriting()}
      onChange=${(event) => setModel(column, event.target.value)}>
    ${state.models.map(({ id, unspool }) => html`<option key=${id} value=${id}>${shortName(id)}${unspool.loaded ? "" : " (not loaded)"}</option>`)}
  </select>`;
}
