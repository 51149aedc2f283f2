// Which run is looked at, how it goes, and what can be done about it.

import { count, html, plural, useChanges, useState } from "../lib.js";
import { ask, isGoing, learn, openRun, startRun } from "./run.js";
import { bits, clock, compact, nats, shareOf } from "./words.js";

export function Head() {
  useChanges("learn");
  const { runs, name, run } = learn;
  const isListed = runs?.some((each) => each.name === name);
  return html`<div class="row spread lrn-head">
    <h2>Learn</h2>
    ${name && html`<label class="row"><span class="small">Run</span>
      <select class="field" id="lrn-run" value=${name} onChange=${(event) => openRun(event.target.value)}>
        ${!isListed && html`<option value=${name}>${name}</option>`}
        ${(runs ?? []).map((each) => html`<option value=${each.name}>${each.name}${each.state === "done" ? "" : ` (${each.state})`}</option>`)}
      </select></label>`}
    <span class="grow"></span>
    ${run && html`<${Controls} />`}
  </div>
  ${run && html`<${Progress} />`}
  <${Trouble} />`;
}

function Controls() {
  const { run, mayStart } = learn;
  if (!mayStart) return null;
  const button = (want, title) => html`<button class="button" type="button" id=${`lrn-${want}`} onClick=${() => ask(want)}>${title}</button>`;
  if (isGoing()) {
    return html`<div class="row" role="group" aria-label="The training">
      ${run.state === "paused" ? button("go", "Go on") : button("pause", "Pause")} ${button("stop", "Stop")}</div>`;
  }
  return run.state !== "done" && run.can_resume && html`<div class="row" role="group" aria-label="The training">${button("go", "Go on")}</div>`;
}

function Progress() {
  const { run, lines } = learn;
  const last = lines.at(-1) ?? run.last ?? {};
  const held = lines.findLast((line) => Number.isFinite(line.held_out_loss));
  const step = last.step ?? 0;
  const left = run.state === "running" && step > 0 && run.steps > step ? (last.seconds * (run.steps - step)) / step : null;
  const facts = [
    run.steps ? ["Step", `${count(step)} of ${count(run.steps)}`] : ["Step", count(step)],
    ["Tokens", compact(last.tokens)],
    ["Training loss", nats(last.loss)],
    held && ["Held-out loss", nats(held.held_out_loss)],
    Number.isFinite(held?.bits_per_byte) && ["Bits per byte", bits(held.bits_per_byte)],
    ["Tokens a second", compact(last.tokens_per_second)],
    ["Time", clock(last.seconds)],
    left !== null && ["Left, about", clock(left)],
  ].filter(Boolean);
  return html`<div class="lrn-progress">
    <p role="status"><span class=${`chip lrn-${run.state.replace(" ", "-")}`} id="lrn-state">${run.state}</span></p>
    <progress max=${Math.max(1, run.steps)} value=${step} aria-label="Steps done">${shareOf(step, run)}</progress>
    <${About} facts=${run.facts} />
    <dl>${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </div>`;
}

/** What is trained, and on what. */
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

const BROKEN = "The process that trained is gone: it was ended, or the machine was. What was saved is here.";

/** Why a run is not going, in words, with what to do. */
function Trouble() {
  const { run, name } = learn;
  const fault = learn.fault ?? learn.listFault;
  if (fault) return html`<p class="fault" role="alert">${fault}</p>`;
  if (!run || (run.state !== "failed" && run.state !== "broken off")) return null;
  const said = run.error || (run.state === "failed" ? "The training failed, and did not say why." : BROKEN);
  return html`<p class="fault" role="alert" id="lrn-trouble">${said}
    ${run.can_resume ? html` It can be gone on with from its last checkpoint, here or with <code>unspool train${run.kind === "new" ? "" : ` ${run.kind}`} --resume ${name}</code>.` : ""}</p>`;
}

export function Start() {
  useChanges("learn");
  const { runs, mayStart, whyNot, starting, startFault } = learn;
  const [given, setGiven] = useState({ source: "sotu", depth: 4, minutes: 5 });
  const [isOpen, setOpen] = useState(null); // null: open where there is nothing else to see
  if (runs === null) return null;
  const isEmpty = runs.length === 0 && !starting;
  const set = (event) => setGiven({ ...given, [event.target.name]: event.target.value });
  const submit = async (event) => {
    event.preventDefault();
    const { source, depth, minutes } = given;
    if (await startRun({ source, depth: Number(depth), minutes: Number(minutes) })) setOpen(false);
  };
  return html`<details class="panel lrn-start" open=${isOpen ?? isEmpty} onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary><h3>Train a small model</h3></summary>
    ${isEmpty && html`<p class="quiet small">There is no training run in ${learn.folder} yet.</p>`}
    ${mayStart ? html`<form class="row" onSubmit=${submit}>
      <label class="grow"><span class="small">Text: a data set, a file, a folder</span>
        <input class="field" name="source" required value=${given.source} onInput=${set} autocomplete="off" /></label>
      <label><span class="small">Layers</span><input class="field" name="depth" type="number" min="1" max="16" required
        value=${given.depth} onInput=${set} /></label>
      <label><span class="small">Minutes</span><input class="field" name="minutes" type="number" min="0.1" max="1440" step="any" required
        value=${given.minutes} onInput=${set} /></label>
      <button class="button main" disabled=${starting || isGoing()}>Start</button>
    </form>
    <p class="quiet small">It is a process of its own, as with <code>unspool train</code>: it goes on when this server ends, and is found
      again by the next. “sotu” are the State of the Union addresses, fetched once.</p>`
      : html`<p class="small">${whyNot}</p>`}
    ${startFault && html`<p class="fault" role="alert">${startFault}</p>`}
  </details>
  ${starting && html`<p class="quiet" role="status">The training starts: text is read, a tokenizer is trained …</p>`}`;
}
