// The same prompt with several settings, side by side.

import { duration, html, nats, percent, Piece, plural, useChanges } from "../lib.js";
import { meanEntropy, meanSurprise, repeatedFours } from "../measures.js";
import { sharedSteps, state } from "../state.js";
import { openInWrite } from "./popover.js";
import { addColumn, compare, isWriting, MOST_COLUMNS, removeColumn, setColumn } from "./runs.js";
import { Fault, Fields, nameOf, Preset } from "./settings.js";
import { TokenText } from "./text.js";

const stepsOf = (column) => state.branches.get(column?.id)?.steps ?? [];

export function Columns({ pick }) {
  useChanges("compare");
  const { columns } = compare;
  const first = columns[0];
  const told = columns.map((column) => numbersOf(column));
  const most = (name) => Math.max(1e-9, ...told.map((numbers) => numbers[name] ?? 0));
  const scale = { surprise: most("surprise"), entropy: most("entropy"), repeated: 1 };
  return html`
    <div class=${`cmp-columns cmp-of-${columns.length}`} role="group" aria-label="Columns">
      ${columns.map((column, index) => html`<${Column} key=${column.key} column=${column} index=${index}
        first=${first} numbers=${told[index]} scale=${scale} pick=${pick} />`)}
    </div>
    ${columns.length < MOST_COLUMNS && html`<p><button class="button" disabled=${isWriting()}
      onClick=${addColumn}>Add a column</button></p>`}`;
}

function numbersOf(column) {
  const steps = stepsOf(column);
  const branch = state.branches.get(column.id);
  return {
    steps,
    surprise: meanSurprise(steps),
    entropy: meanEntropy(steps),
    repeated: repeatedFours(steps),
    seconds: branch?.last?.total_seconds ?? (column.began ? (column.until - column.began) / 1000 : null),
  };
}

function Column({ column, index, first, numbers, scale, pick }) {
  const branch = state.branches.get(column.id);
  const { steps } = numbers;
  const parts = index === 0 ? null : partsAt(steps, stepsOf(first));
  const title = `Column ${index + 1}: ${nameOf(column.settings)}`;
  const of = `column ${index + 1}`;
  const set = (values) => setColumn(column, values);
  const fault = column.fault ?? branch?.error ?? null;
  return html`<section class="cmp-column panel" aria-label=${title} data-column=${index + 1}>
    <header>
      <h3 class="visually-hidden">${title}</h3>
      <span class="cmp-count" aria-hidden="true">${index + 1}</span>
      <${Preset} settings=${column.settings} of=${of} change=${set} />
      ${compare.columns.length > 1 && html`<button class="button plain tiny" title="Remove this column"
        aria-label=${`Remove ${of}`} disabled=${isWriting()} onClick=${() => removeColumn(column)}>×</button>`}
    </header>
    <${Fields} settings=${column.settings} fault=${fault} of=${of} change=${set} />
    ${fault && html`<${Fault} fault=${fault} />`}
    ${column.id && html`
      ${!fault && html`<${Parting} column=${column} first=${first} parts=${parts} />`}
      <${TokenText} steps=${steps} parts=${parts} writing=${column.writing} label=${`Text of ${of}`}
        pick=${(at, element) => pick({ id: column.id, at, element })} />
      <${Numbers} numbers=${numbers} scale=${scale} branch=${branch} writing=${column.writing} />
      <button class="button" disabled=${steps.length === 0}
        aria-label=${`Open ${of} in Write`} onClick=${() => openInWrite(column.id)}>Open in Write</button>`}
  </section>`;
}

/** Where this column leaves the first one, in words. */
function Parting({ column, first, parts }) {
  const steps = stepsOf(column);
  const others = stepsOf(first);
  const name = "column 1";
  const say = (said, where) => html`<p class="cmp-parting small" data-parts=${where}>${said}</p>`;
  if (column === first) return say("The others are held against this text.", "first");
  if (others.length === 0 || steps.length === 0) return say("", "none");
  if (parts < 0) {
    const over = !column.writing && !first.writing;
    const said = !over ? `The same as ${name} so far`
      : steps.length === others.length ? `The same text as ${name}, all ${plural(steps.length, "token")}`
        : `The same as ${name} for ${plural(Math.min(steps.length, others.length), "token")}, then one of them ends`;
    return say(`${said}.`, "none");
  }
  const here = html`<${Piece} text=${steps[parts].piece} /> instead of <${Piece} text=${others[parts].piece} />`;
  return say(parts === 0 ? html`Other than ${name} from the first token: ${here}`
    : html`The same up to token ${parts}, then ${here}`, parts);
}

const ENDS = {
  length: "full length", stop: "ended by itself", context: "context full", interrupted: "stopped",
};

function Numbers({ numbers, scale, branch, writing }) {
  const { steps, surprise, entropy, repeated, seconds } = numbers;
  const bar = (value, most) => html`<div class="track" aria-hidden="true">
    <span style=${{ width: `${value === null ? 0 : Math.min(1, value / most) * 100}%` }} /></div>`;
  const reason = branch?.finish_reason;
  return html`<dl class="cmp-numbers">
    <dt>Tokens</dt><dd data-number="tokens">${steps.length}</dd>
    <dt title="How unlikely the model held each token, on average: −ln of its probability">Mean surprise</dt>
    <dd data-number="surprise">${bar(surprise, scale.surprise)}${nats(surprise)} nats</dd>
    <dt title="How undecided the model was before each token, on average">Mean entropy</dt>
    <dd data-number="entropy">${bar(entropy, scale.entropy)}${nats(entropy)} nats</dd>
    <dt title="Share of runs of four tokens that had been there before">Repeated 4-grams</dt>
    <dd data-number="repeated">${bar(repeated, scale.repeated)}${percent(repeated)}</dd>
    <dt>Time</dt><dd data-number="time">${duration(seconds)}</dd>
    <dt>End</dt><dd data-number="end">${writing ? "writing…" : ENDS[reason] ?? reason ?? "stopped"}</dd>
  </dl>`;
}

/** The first place where two texts differ; -1 while neither says anything the other does not. */
function partsAt(steps, first) {
  const shared = sharedSteps(steps, first);
  return shared < Math.min(steps.length, first.length) ? shared : -1;
}
