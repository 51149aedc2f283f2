// The Training runs view: a run's loss curve, and the same prompt with the same seed written by its checkpoints.

import { jump, showPanel } from "../actions.js";
import {
  count, html, isNarrow, ModeSegments, nats, percent, plural, useChanges, useEffect, useState, useWidth,
} from "../lib.js";
import { promptLength, state, textOf } from "../state.js";
import { meanEntropy, openInWrite, repeatedWords, TokenText } from "../token_text.js";
import {
  along, bitsText, checkpointsAround, clock, compact, Curve, lossText, scale, shareOf,
} from "./curve.js";
import {
  checkpoints, controlRun, currentMode, currentPrompt, currentStep, isActive, isWriting, listRuns, openRun,
  setFields, setVisible, startRun, stopWriting, texts, training, writeVisible,
} from "./runs.js";
import { SidePanel } from "../write/side.js";
import { Pane, TintChoice } from "../write/view.js";

function Head() {
  useChanges("training");
  const { runs, name, run } = training;
  const isListed = runs?.some((entry) => entry.name === name);
  return html`<div class="row spread lrn-head">
    <h2>Training runs</h2>
    ${name && html`<label class="row"><span class="small">Run</span>
      <select class="field" id="lrn-run" value=${name} onChange=${(event) => openRun(event.target.value)}>
        ${!isListed && html`<option value=${name}>${name}</option>`}
        ${(runs ?? []).map((entry) => html`<option value=${entry.name}>${entry.name}${entry.state === "done" ? "" : ` (${entry.state})`}</option>`)}
      </select></label>`}
    <span class="grow"></span>
    ${run && html`<${Controls} />`}
  </div>
  ${run && html`<${Progress} />`}
  <${RunError} />`;
}

function Controls() {
  const { run, mayStart } = training;
  if (!mayStart) return null;
  const button = (want, title) => html`<button class="button" type="button" id=${`lrn-${want}`} onClick=${() => controlRun(want)}>${title}</button>`;
  if (isActive()) {
    return html`<div class="row" role="group" aria-label="Training run">
      ${run.state === "paused" ? button("go", "Resume") : button("pause", "Pause")} ${button("stop", "Stop")}</div>`;
  }
  return run.state !== "done" && run.can_resume && html`<div class="row" role="group" aria-label="Training run">${button("go", "Resume")}</div>`;
}

function Progress() {
  const { run, lines } = training;
  const last = lines.at(-1) ?? run.last ?? {};
  const heldOut = lines.findLast((line) => Number.isFinite(line.held_out_loss));
  const step = last.step ?? 0;
  const remaining = run.state === "running" && step > 0 && run.steps > step ? (last.seconds * (run.steps - step)) / step : null;
  const facts = [
    run.steps ? ["Step", `${count(step)} of ${count(run.steps)}`] : ["Step", count(step)],
    ["Tokens", compact(last.tokens)],
    ["Training loss", lossText(last.loss)],
    heldOut && ["Held-out loss", lossText(heldOut.held_out_loss)],
    Number.isFinite(heldOut?.bits_per_byte) && ["Bits per byte", bitsText(heldOut.bits_per_byte)],
    ["Tokens/s", compact(last.tokens_per_second)],
    ["Time", clock(last.seconds)],
    remaining !== null && ["Remaining", clock(remaining)],
  ].filter(Boolean);
  return html`<div class="lrn-progress">
    <p role="status"><span class=${`chip lrn-${run.state.replace(" ", "-")}`} id="lrn-state">${run.state}</span></p>
    <progress max=${Math.max(1, run.steps)} value=${step} aria-label="Steps done">${shareOf(step, run)}</progress>
    <${About} facts=${run.facts} />
    <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </div>`;
}

/** Data and size of the model. */
function About({ facts: { settings = {}, data = {}, config = {}, parameters } }) {
  const source = [settings.data ?? settings.source ?? data.source].flat().filter(Boolean).map((path) => path.split("/").at(-1));
  const about = [
    source.join(", "),
    data.tokens && `${compact(data.tokens)} tokens of text`,
    (config.layers ?? settings.depth) && plural(config.layers ?? settings.depth, "layer"),
    parameters && `${compact(parameters)} parameters`,
  ];
  return html`<span class="quiet small">${about.filter(Boolean).join(" · ")}</span>`;
}

const BROKEN = "The training process is gone: it was killed, or the machine was restarted. Saved checkpoints are shown.";

/** Why a run does not run, and how to resume it. */
function RunError() {
  const { run, name } = training;
  const fault = training.fault ?? training.listFault;
  if (fault) return html`<p class="fault" role="alert">${fault}</p>`;
  if (!run || (run.state !== "failed" && run.state !== "broken off")) return null;
  const message = run.error || (run.state === "failed" ? "The training failed without a message." : BROKEN);
  return html`<p class="fault" role="alert" id="lrn-trouble">${message}
    ${run.can_resume ? html` Resume it from its last checkpoint, here or with <code>unspool train${run.kind === "new" ? "" : ` ${run.kind}`} --resume ${name}</code>.` : ""}</p>`;
}

function StartForm() {
  useChanges("training");
  const { runs, mayStart, whyNot, starting, startFault } = training;
  const [fields, setFields] = useState({ source: "sotu", depth: 4, minutes: 5 });
  const [isOpen, setOpen] = useState(null); // null: open if there are no runs
  if (runs === null) return null;
  const isEmpty = runs.length === 0 && !starting;
  const set = (event) => setFields({ ...fields, [event.target.name]: event.target.value });
  const submit = async (event) => {
    event.preventDefault();
    const { source, depth, minutes } = fields;
    if (await startRun({ source, depth: Number(depth), minutes: Number(minutes) })) setOpen(false);
  };
  return html`<details class="panel lrn-start" open=${isOpen ?? isEmpty} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><h3>Train a small model</h3></summary>
    ${isEmpty && html`<p class="quiet small">There is no training run in ${training.folder} yet.</p>`}
    ${mayStart ? html`<form class="row" onSubmit=${submit}>
      <label class="grow"><span class="small">Data: a data set, file or folder</span>
        <input class="field" name="source" required value=${fields.source} onInput=${set} autocomplete="off" /></label>
      <label><span class="small">Layers</span><input class="field" name="depth" type="number" min="1" max="16" required
        value=${fields.depth} onInput=${set} /></label>
      <label><span class="small">Minutes</span><input class="field" name="minutes" type="number" min="0.1" max="1440" step="any" required
        value=${fields.minutes} onInput=${set} /></label>
      <button class="button main" disabled=${starting || isActive()}>Start</button>
    </form>
    <p class="quiet small">Runs as a separate process, like <code>unspool train</code>: it continues when this server stops.
      “sotu” are the State of the Union addresses, downloaded once.</p>`
      : html`<p class="small">${whyNot}</p>`}
    ${startFault && html`<p class="fault" role="alert">${startFault}</p>`}
  </details>
  ${starting && html`<p class="quiet" role="status">Starting: reading the data, training a tokenizer …</p>`}`;
}

// -- checkpoints side by side; a click on a token opens that text with the side panel -----------------

const NARROWEST = 250; // pixels of a column
const MOST = 6;

function Columns() {
  useChanges("training", "current", "selection", "branches");
  const [frame, width] = useWidth(900);
  const { saved, nearest } = visibleCheckpoints(Math.min(MOST, Math.max(1, Math.floor(width / NARROWEST))));
  useEffect(() => setVisible(saved.map(({ step }) => step)));
  const stats = saved.map(numbersOf);
  const most = (name) => Math.max(1e-9, ...stats.map((numbers) => numbers[name] ?? 0));
  const scales = { bits: most("bits"), entropy: most("entropy"), repeated: 1 };
  return html`<div class="lrn-columns" ref=${frame} role="group" aria-label="Checkpoints"
      style=${{ "--columns": Math.max(1, saved.length) }}>
    ${saved.map((checkpoint, at) => html`<${Column} key=${checkpoint.step} saved=${checkpoint} isNearest=${checkpoint === nearest}
      numbers=${stats[at]} scales=${scales} />`)}
  </div>`;
}

/** The checkpoints nearest to the selected step, by their distance in the chart. */
function visibleCheckpoints(count) {
  const all = checkpoints();
  const { lines, view } = training;
  const place = (step) => along(lines, view.axis, step);
  const unit = view.logX ? lines.find((line) => line[view.axis] > 0)?.[view.axis] ?? 1 : null;
  const { share } = scale(0, Math.max(1, place(all.at(-1)?.step ?? 1)), unit);
  const { nearest, start, end } = checkpointsAround(all.map(({ step }) => share(place(step))), share(place(currentStep())), count);
  return { saved: all.slice(start, end), nearest: all[nearest] };
}

/** Statistics of a checkpoint. */
function numbersOf(saved) {
  const branch = state.branches.get(texts.byStep.get(saved.step)?.id);
  const line = training.lines.findLast(({ step, bits_per_byte }) => step <= saved.step && Number.isFinite(bits_per_byte));
  const card = training.run.facts.data ?? {};
  const perToken = card.held_out_bytes / card.held_out_tokens || card.bytes_per_token;
  const derived = saved.held_out_loss != null && perToken ? saved.held_out_loss / Math.LN2 / perToken : null;
  return {
    heldOut: saved.held_out_loss,
    bits: line?.bits_per_byte ?? derived,
    entropy: branch ? meanEntropy(branch.steps) : null,
    repeated: branch ? repeatedWords(textOf(branch)) : null,
  };
}

function Column({ saved, isNearest, numbers, scales }) {
  const { step, tokens } = saved;
  const text = texts.byStep.get(step);
  const branch = state.branches.get(text?.id);
  const name = `Step ${count(step)}`;
  return html`<section class=${`lrn-column panel ${isNearest ? "nearest" : ""}`} aria-label=${`${name}, ${shareOf(step, training.run)}`}
      data-step=${step} aria-current=${isNearest ? "true" : null}>
    <header><h3>${shareOf(step, training.run) || name}</h3>
      <span class="quiet small">step ${count(step)} · ${compact(tokens)} tokens</span></header>
    <div class="lrn-text">
      ${branch ? html`<${Text} branch=${branch} text=${text} name=${name} />` : html`<${Sample} step=${step} text=${text} />`}
      ${text?.fault && html`<p class="fault" role="alert">${text.fault}</p>`}
    </div>
    <${Numbers} numbers=${numbers} scales=${scales} />
    <button class="button tiny" disabled=${!branch?.steps.length} aria-label=${`Open ${name.toLowerCase()} in Write`}
      onClick=${() => openInWrite(branch.id)}>Open in Write</button>
  </section>`;
}

function Text({ branch, text, name }) {
  if (branch.id === state.current && state.selected !== null) return html`<${Open} />`;
  const pick = async (at) => {
    await jump(branch.id, promptLength(branch) + at);
    showPanel(state.panel === "inside" ? "inside" : "step");
  };
  const words = branch.prompt?.messages?.at(-1).content ?? branch.prompt?.text;
  return html`<span class="quiet lrn-prompt">${words}${branch.prompt?.messages ? "\n" : ""}</span><${TokenText} steps=${branch.steps}
    label=${`Text at ${name.toLowerCase()}`} writing=${text.writing} pick=${pick} />`;
}

/** The text pane, with the focus. */
function Open() {
  useEffect(() => {
    const text = document.getElementById("text");
    text.focus({ preventScroll: true });
    // Scroll the token above the sheet that opens at the bottom.
    if (isNarrow()) text.querySelector(".selected")?.scrollIntoView({ block: "start" });
  }, []);
  return html`<${Pane} />`;
}

/** A sample that the run logged, until this checkpoint generates. */
function Sample({ step, text }) {
  if (text?.writing) return html`<p class="quiet small" role="status">Loading checkpoint ${count(step)} …</p>`;
  const sample = training.samples.findLast((candidate) => candidate.step <= step);
  if (!sample || text?.fault) return null;
  return html`<p class="lrn-sample"><span class="quiet">${sample.prompt}</span>${sample.text}</p>
    <p class="quiet small">Sampled during training${sample.step === step ? "" : `, at step ${count(sample.step)}`}.</p>`;
}

function Numbers({ numbers: { heldOut, bits: perByte, entropy, repeated }, scales }) {
  const bar = (value, most) => html`<div class="track" aria-hidden="true">
    <span style=${{ width: `${value === null ? 0 : Math.min(1, value / most) * 100}%` }} /></div>`;
  return html`<dl class="cmp-numbers">
    <dt title="Held-out loss in bits per byte of text">Bits per byte</dt>
    <dd data-number="bits">${bar(perByte, scales.bits)}${bitsText(perByte)}</dd>
    <dt title="Mean loss on data held out from training">Held-out loss</dt><dd data-number="held">${lossText(heldOut)}</dd>
    <dt title="Mean entropy of the distribution at each token of this text">Entropy</dt>
    <dd data-number="entropy">${bar(entropy, scales.entropy)}${nats(entropy)}${entropy === null ? "" : " nats"}</dd>
    <dt title="Share of words that occur among the 20 words before them">Repeated words</dt>
    <dd data-number="repeated">${bar(repeated, scales.repeated)}${percent(repeated)}</dd>
  </dl>`;
}

// -- the view -----------------------------------------------------------------------------------

const REFRESH_MS = 5000; // for runs started in a terminal

export function TrainingView() {
  useChanges("training", "selection", "current");
  useEffect(() => {
    listRuns();
    const timer = setInterval(listRuns, REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  const isOpen = state.selected !== null && [...texts.byStep.values()].some(({ id }) => id !== null && id === state.current);
  return html`<section class=${`lrn ${isOpen ? "lrn-beside" : ""}`} aria-label="Training runs">
    <div class="stack lrn-main">
      <${Head} />
      ${training.run && html`<${Curve} />
        <${PromptForm} />
        <${Columns} />
        <${TintChoice} />`}
      <${StartForm} />
    </div>
    ${isOpen && html`<${SidePanel} />`}
  </section>`;
}

function PromptForm() {
  const { fault } = texts;
  const invalid = (param) => (fault?.param === param ? "true" : null);
  const set = (event) => setFields({ [event.target.name]: event.target.value });
  const submit = (event) => {
    event.preventDefault();
    writeVisible();
  };
  const field = (name, title, mode) => html`<label class="lrn-number"><span class="small">${title}</span>
    <input class="field" name=${name} inputmode=${mode} autocomplete="off" value=${texts[name]} aria-invalid=${invalid(name)} onInput=${set} /></label>`;
  return html`<form class="row lrn-asking" onSubmit=${submit} aria-label="Prompt and settings of all checkpoints">
    <label class="grow"><span class="small">Prompt for all checkpoints</span>
      <input class="field" name="prompt" dir="auto" autocomplete="off" value=${currentPrompt()} aria-invalid=${invalid("prompt")} onInput=${set} /></label>
    <${ModeSegments} mode=${currentMode()} pick=${(mode) => setFields({ mode })} />
    ${field("length", "Max tokens", "numeric")} ${field("temperature", "Temperature", "decimal")} ${field("seed", "Seed", "numeric")}
    ${isWriting() ? html`<button class="button" type="button" onClick=${stopWriting}>Stop</button>`
      : html`<button class="button main" id="lrn-write">Write</button>`}
    ${fault && html`<p class="fault" role="alert">${fault.message}</p>`}
  </form>`;
}
