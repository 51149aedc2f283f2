// The Measure view: what writing one token at a time costs with this model, as `unspool costs` reports it.

import { duration, html, plural, useChanges, useEffect } from "../lib.js";
import { shortName } from "../models/name.js";
import { state } from "../state.js";
import { Report } from "./report.js";
import { change, choose, forget, list, measure, measuring, openFile, openKept, stop } from "./runs.js";

export function MeasureView() {
  useChanges("measure", "models");
  useEffect(() => { list(); }, []);
  const { shown, growing } = measuring;
  const reports = growing ? [growing] : shown.map(({ report }) => report);
  return html`<section class="msr stack" aria-label="Measure">
    <h2>Measure</h2>
    <p class="quiet small">What writing one token at a time costs: waiting, slips that snowball, loops, no view of the whole, a context that fades.
      Each with its formula, its 95 % interval and an example; and what helps, with its price. As <code>unspool costs</code> on the command line.</p>
    <${Asking} />
    <${Progress} />
    <${Kept} />
    ${reports.some(({ parts }) => parts.length) && html`<${Report} reports=${reports} />`}
  </section>`;
}

function Asking() {
  const { quick, seed, running, parts, left, fault, mayMeasure, whyNot } = measuring;
  const invalid = (name) => (fault?.param === name ? "true" : null);
  const submit = (event) => {
    event.preventDefault();
    measure();
  };
  return html`<form class="stack msr-asking" onSubmit=${submit} aria-label="What is measured">
    <fieldset class="row small" aria-invalid=${invalid("parts")}><legend>Parts</legend>${parts.map((part) => html`<label key=${part}>
      <input type="checkbox" name=${part} checked=${!left.has(part)} onChange=${(event) => choose(part, event.target.checked)} /> ${part}</label>`)}</fieldset>
    <div class="row">
      <div class="segments" role="group" aria-label="How much">
        ${[[true, "Quick"], [false, "Whole"]].map(([value, title]) => html`<button type="button" aria-pressed=${quick === value}
          title=${value ? "Under a minute, with wide intervals" : "Minutes, with narrow intervals"} onClick=${() => change({ quick: value })}>${title}</button>`)}</div>
      <label class="msr-seed"><span class="small">Seed</span> <input class="field" name="seed" inputmode="numeric" autocomplete="off" value=${seed}
        aria-invalid=${invalid("seed")} onInput=${(event) => change({ seed: event.target.value, fault: null })} /></label>
      ${running ? html`<button class="button" type="button" id="measure-stop" onClick=${stop}>Stop</button>`
        : html`<button class="button main" id="measure-start" disabled=${!state.model || !mayMeasure}>Measure ${shortName(state.model)}</button>`}
      <label class="button">Open a file <input class="visually-hidden" type="file" id="measure-file" accept=".json,application/json"
        onChange=${(event) => event.target.files[0] && openFile(event.target.files[0])} /></label>
    </div>
    ${!mayMeasure && html`<p class="quiet small">${whyNot}</p>`}
    ${fault && html`<p class="fault" role="alert">${fault.message}</p>`}
  </form>`;
}

function Progress() {
  const { running, share, now, stopped, growing } = measuring;
  if (!running) {
    return html`<p role="status" class="small">${stopped ? `Stopped${growing?.parts.length ? "; what was measured before is below" : ""}.` : ""}</p>`;
  }
  const done = Math.round(share * 100);
  return html`<div class="msr-progress">
    <div class="track" role="progressbar" aria-label="Measured" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${done}><span style=${{ width: `${done}%` }} /></div>
    <p role="status" class="small">Measuring ${now || "…"}</p></div>`;
}

/** What the server has kept, to be opened or put beside the one that is shown. */
function Kept() {
  const { kept, shown, running } = measuring;
  if (!kept.length) return null;
  const isShown = (name) => shown.some((one) => one.name === name);
  return html`<details class="msr-kept" open=${!shown.length && !running}><summary>${plural(kept.length, "report")} on this machine</summary>
    <ul>${kept.map(({ name, model, quick, parts, seconds, made }) => html`<li key=${name} class="row small" aria-current=${isShown(name) ? "true" : null}>
      <span class="grow"><b>${shortName(model)}</b> ${new Date(made * 1000).toLocaleString()} · ${quick ? "quick" : "whole"} · ${plural(parts.length, "part")} · ${duration(seconds)}</span>
      <button class="button tiny" type="button" disabled=${running} onClick=${() => openKept(name)} aria-label=${`Open ${name}`}>Open</button>
      <button class="button tiny" type="button" disabled=${running || !shown.length || isShown(name)} onClick=${() => openKept(name, true)}
        aria-label=${`Compare with ${name}`}>Compare</button>
      <button class="button tiny plain" type="button" disabled=${running} onClick=${() => forget(name)} aria-label=${`Forget ${name}`}>Forget</button>
    </li>`)}</ul></details>`;
}
