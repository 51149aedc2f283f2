// The Compare view: one prompt with several settings side by side, or many samples as a tree.

import { setMode } from "../actions.js";
import {
  addColumn, compare, currentPrompt, FieldError, Fields, isExample, isWriting, MOST_COLUMNS, nameOf, Preset,
  removeColumn, setColumn, setCompare, stopAll, writeAll,
} from "./runs.js";
import { Samples } from "./samples.js";
import { duration, html, ModeSegments, nats, percent, Piece, plural, useChanges, useState } from "../lib.js";
import { currentModel, sharedSteps, state } from "../state.js";
import {
  CandidatesPopover, meanEntropy, meanSurprisal, openInWrite, repeatedFourGrams, TokenText,
} from "../token_text.js";
import { TintChoice } from "../write/view.js";

const stepsOf = (column) => state.branches.get(column?.id)?.steps ?? [];

function Columns({ pick }) {
  useChanges("compare");
  const { columns } = compare;
  const first = columns[0];
  const stats = columns.map((column) => numbersOf(column));
  const most = (name) => Math.max(1e-9, ...stats.map((numbers) => numbers[name] ?? 0));
  const scale = { surprise: most("surprise"), entropy: most("entropy"), repeated: 1 };
  return html`
    <div class=${`cmp-columns cmp-of-${columns.length}`} role="group" aria-label="Columns">
      ${columns.map((column, index) => html`<${Column} key=${column.key} column=${column} index=${index}
        first=${first} numbers=${stats[index]} scale=${scale} pick=${pick} />`)}
    </div>
    ${columns.length < MOST_COLUMNS && html`<p><button class="button" disabled=${isWriting()}
      onClick=${addColumn}>Add a column</button></p>`}`;
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

function Column({ column, index, first, numbers, scale, pick }) {
  const branch = state.branches.get(column.id);
  const { steps } = numbers;
  const parts = index === 0 ? null : divergesAt(steps, stepsOf(first));
  const title = `Column ${index + 1}: ${nameOf(column.settings)}`;
  const owner = `column ${index + 1}`;
  const set = (values) => setColumn(column, values);
  const fault = column.fault ?? branch?.error ?? null;
  return html`<section class="cmp-column panel" aria-label=${title} data-column=${index + 1}>
    <header>
      <h3 class="visually-hidden">${title}</h3>
      <span class="cmp-count" aria-hidden="true">${index + 1}</span>
      <${Preset} settings=${column.settings} owner=${owner} change=${set} />
      ${compare.columns.length > 1 && html`<button class="button plain tiny" title="Remove this column"
        aria-label=${`Remove ${owner}`} disabled=${isWriting()} onClick=${() => removeColumn(column)}>×</button>`}
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

const PICTURES = { settings: "Settings", samples: "Samples" };
const ABOUT = {
  settings: "One prompt, generated once with each of these settings, in one batch. "
    + "With the same seed, only the settings differ.",
  samples: "One prompt, sampled many times with the same settings, in one batch. "
    + "Common prefixes are drawn once.",
};

export function CompareView() {
  useChanges("compare", "mode", "models");
  const [picked, setPicked] = useState(null);
  const { picture } = compare;
  const writing = isWriting();
  const write = () => {
    setPicked(null);
    writeAll();
  };
  const close = (back) => {
    if (back && picked?.element.isConnected) picked.element.focus();
    setPicked(null);
  };
  // Enter starts, in the prompt and in every field.
  const enter = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    if (!event.target.matches("textarea, input")) return;
    event.preventDefault();
    write();
  };
  return html`<section class="cmp stack" aria-label="Compare" onKeyDown=${enter}>
    <div class="row spread">
      <h2>Compare</h2>
      <div class="segments" role="group" aria-label="What to compare">
        ${Object.entries(PICTURES).map(([name, title]) => html`<button aria-pressed=${picture === name}
          onClick=${() => { setPicked(null); setCompare({ picture: name }); }}>${title}</button>`)}
      </div>
    </div>
    <p class="quiet small">${ABOUT[picture]}</p>
    <${PromptForm} writing=${writing} write=${write} />
    <${TintChoice} />
    <${Ready} write=${write} />
    ${picture === "settings" ? html`<${Columns} pick=${setPicked} />` : html`<${Samples} pick=${setPicked} />`}
    ${picked && html`<${CandidatesPopover} picked=${picked} close=${close} />`}
  </section>`;
}

/** What a click would run, until something was generated. */
function Ready({ write }) {
  const { columns, samples, picture, length } = compare;
  const isSettings = picture === "settings";
  if (isWriting() || (isSettings ? columns.some(({ id }) => id) : samples.ids.length)) return null;
  const what = isSettings ? plural(columns.length, "text", "texts side by side") : `${samples.number} samples as a tree`;
  return html`<div class="panel row cmp-ready"><p class="grow">${isExample() ? "Example" : "Ready"}: “${
    shortenPrompt(currentPrompt())}”, ${what}, ${length} tokens each.</p>
    <button class="button main" onClick=${write}>${isExample() ? "Run the example" : "Run"}</button></div>`;
}

const shortenPrompt = (text) => (text.length > 70 ? `${text.slice(0, 69).toWellFormed()}…` : text);

function PromptForm({ writing, write }) {
  const { fault } = compare;

  return html`<div class="cmp-prompt">
    <label class="grow"><span class="visually-hidden">Prompt to compare</span>
      <textarea class="field" rows="2" placeholder=${state.mode === "chat" ? "Your message" : "Text to continue"}
        aria-invalid=${fault?.param === "prompt" ? "true" : null} value=${currentPrompt()}
        onInput=${(event) => setCompare({ prompt: event.target.value, fault: null })} /></label>
    <div class="row">
      <${ModeSegments} mode=${state.mode} pick=${setMode} canChat=${currentModel()?.unspool.chat !== false} />
      <label class="row cmp-length"><span>Tokens</span>
        <input class="field" type="text" inputmode="numeric" autocomplete="off" value=${compare.length}
          aria-invalid=${fault?.param === "length" ? "true" : null}
          onInput=${(event) => setCompare({ length: event.target.value, fault: null })} /></label>
      ${writing
        ? html`<button class="button" onClick=${stopAll}>Stop</button>`
        : html`<button class="button main" onClick=${write}>Write ${compare.picture === "samples"
          ? `${compare.samples.number} samples` : "all"}</button>`}
    </div>
    <${FieldError} fault=${fault} />
  </div>`;
}
