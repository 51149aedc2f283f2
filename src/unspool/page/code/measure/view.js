// The Cost report view: what autoregressive decoding costs with this model, as `unspool costs` reports it. The state outlives
// the view.

import { api, ApiError } from "../api.js";
import { duration, html, plural, useChanges, useEffect } from "../lib.js";
import { Report } from "./report.js";
import { shortName } from "../models.js";
import { changed, state } from "../state.js";

/** Topic "measure". */
const measuring = {
  quick: true,
  excluded: new Set(), // parts that are not measured
  seed: "0",
  parts: [], // all parts
  mayMeasure: true,
  whyNot: null,
  saved: [], // reports on the server
  visible: [], // one report, or two to compare: {name, report}
  growing: null, // the report that is being measured
  running: false,
  share: 0, // progress, 0 to 1
  now: "", // the part that is being measured
  stopped: false,
  fault: null,
};
let control = null;

const notify = () => changed("measure");
function setMeasuring(values) {
  Object.assign(measuring, values);
  notify();
}

async function loadReports() {
  try {
    const { data, parts, may_measure: mayMeasure, why_not: whyNot } = await api.get("/v1/costs");
    setMeasuring({ saved: data, parts, mayMeasure, whyNot });
  } catch (error) {
    showError(error);
  }
}

function showError(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof ApiError)) throw error;
  setMeasuring({ fault: error });
}

function togglePart(part, isIncluded) {
  measuring.excluded[isIncluded ? "delete" : "add"](part);
  setMeasuring({ fault: null });
}

/** The request; throws an ApiError for an invalid field. */
function buildRequest() {
  const { quick, parts, excluded, seed } = measuring;
  const included = parts.filter((part) => !excluded.has(part));
  if (!included.length) throw new ApiError(400, "Select at least one part.", { param: "parts" });
  const number = Number(seed);
  if (!seed.trim() || !Number.isInteger(number) || number < 0) {
    throw new ApiError(400, `Seed must be an integer >= 0, got “${seed}”.`, { param: "seed" });
  }
  return { model: state.model, quick, parts: included, seed: number };
}

const EVENT_HANDLERS = {
  start({ model, parts, quick, seed }) {
    measuring.growing = { model, machine: {}, quick, seed, parts: [], requestedParts: parts };
  },
  progress({ part, share }) {
    const { parts, requestedParts } = measuring.growing;
    Object.assign(measuring, { now: part, share: (parts.length + share) / requestedParts.length });
  },
  part(part) {
    const { parts, requestedParts } = measuring.growing;
    parts.push(part);
    measuring.share = parts.length / requestedParts.length;
  },
  done({ name, report }) {
    Object.assign(measuring, { visible: [{ name, report }], growing: null });
  },
};

/** What a part measures; its name is that of the command line. */
const PART_TITLES = {
  waiting: "latency", snowball: "effect of one wrong token", exposure: "exposure bias", loops: "loops", whole: "no lookahead",
  fading: "use of long context", confidence: "calibration", remedies: "remedies and their cost",
};

async function measure() {
  if (measuring.running) return;
  try {
    const request = buildRequest();
    setMeasuring({ running: true, stopped: false, fault: null, visible: [], growing: null, share: 0, now: "" });
    control = new AbortController();
    for await (const { event, data } of api.stream("/v1/costs", request, { signal: control.signal })) {
      EVENT_HANDLERS[event]?.(data);
      notify();
    }
  } catch (error) {
    showError(error);
  } finally {
    setMeasuring({ running: false });
  }
  await loadReports();
}

function stop() {
  control?.abort();
  setMeasuring({ stopped: true });
}

// -- saved reports ------------------------------------------------------------------------------

/** Open a saved report: alone, or beside the visible one. */
async function openSaved(name, beside = false) {
  try {
    const report = await api.get(`/v1/costs/${encodeURIComponent(name)}`);
    const first = measuring.visible.slice(0, beside ? 1 : 0);
    setMeasuring({ visible: [...first, { name, report }], fault: null, growing: null, stopped: false });
  } catch (error) {
    showError(error);
  }
}

async function deleteReport(name) {
  try {
    await api.delete(`/v1/costs/${encodeURIComponent(name)}`);
    setMeasuring({ visible: measuring.visible.filter((entry) => entry.name !== name) });
  } catch (error) {
    showError(error);
  }
  await loadReports();
}

/** Open a JSON file of `unspool costs`: one report, or a comparison. */
async function openFile(file) {
  const broken = () => setMeasuring({ fault: new ApiError(400, `${file.name} is not a report. Open the JSON file that unspool costs writes.`) });
  try {
    const data = JSON.parse(await file.text());
    const reports = data.reports ?? [data];
    if (!reports.every((report) => report.model && Array.isArray(report.parts))) return broken();
    setMeasuring({ visible: reports.slice(0, 2).map((report) => ({ name: file.name, report })), fault: null, growing: null, stopped: false });
  } catch {
    broken();
  }
}

// -- the view -----------------------------------------------------------------------------------

export function MeasureView() {
  useChanges("measure", "models");
  useEffect(() => { loadReports(); }, []);
  const { visible, growing } = measuring;
  const reports = growing ? [growing] : visible.map(({ report }) => report);
  return html`<section class="msr stack" aria-label="Cost report">
    <h2>Cost report</h2>
    <p class="quiet small">What autoregressive decoding costs: latency, compounding errors, loops, no lookahead, fading context.
      Each with its formula, 95 % interval and an example, and the remedies with their price. Same as <code>unspool costs</code> on the command line.</p>
    <${MeasureForm} />
    <${Progress} />
    <${SavedReports} />
    ${reports.some(({ parts }) => parts.length) && html`<${Report} reports=${reports} />`}
  </section>`;
}

function MeasureForm() {
  const { quick, seed, running, parts, excluded, fault, mayMeasure, whyNot } = measuring;
  const invalid = (name) => (fault?.param === name ? "true" : null);
  const submit = (event) => {
    event.preventDefault();
    measure();
  };
  return html`<form class="stack msr-asking" onSubmit=${submit} aria-label="Parts and settings">
    <fieldset class="row small" aria-invalid=${invalid("parts")}><legend>Parts</legend>${parts.map((part) => html`<label key=${part}>
      <input type="checkbox" name=${part} checked=${!excluded.has(part)} onChange=${(event) => togglePart(part, event.target.checked)} /> ${PART_TITLES[part] ?? part}</label>`)}</fieldset>
    <div class="row">
      <div class="segments" role="group" aria-label="Length">
        ${[[true, "Quick"], [false, "Full"]].map(([value, title]) => html`<button type="button" aria-pressed=${quick === value}
          title=${value ? "Under a minute, with wide intervals" : "Minutes, with narrow intervals"} onClick=${() => setMeasuring({ quick: value })}>${title}</button>`)}</div>
      <label class="msr-seed"><span class="small">Seed</span> <input class="field" name="seed" inputmode="numeric" autocomplete="off" value=${seed}
        aria-invalid=${invalid("seed")} onInput=${(event) => setMeasuring({ seed: event.target.value, fault: null })} /></label>
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
    return html`<p role="status" class="small">${stopped ? `Stopped${growing?.parts.length ? "; finished parts are shown below" : ""}.` : ""}</p>`;
  }
  const done = Math.round(share * 100);
  return html`<div class="msr-progress">
    <div class="track" role="progressbar" aria-label="Measured" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${done}><span style=${{ width: `${done}%` }} /></div>
    <p role="status" class="small">Measuring ${PART_TITLES[now] ?? now ?? "…"} …</p></div>`;
}

/** Saved reports, to open, compare or delete. */
function SavedReports() {
  const { saved, visible, running } = measuring;
  if (!saved.length) return null;
  const isShown = (name) => visible.some((entry) => entry.name === name);
  return html`<details class="msr-kept" open=${!visible.length && !running}><summary>${plural(saved.length, "report")} on this machine</summary>
    <ul>${saved.map(({ name, model, quick, parts, seconds, made: createdAt }) => html`<li key=${name} class="row small" aria-current=${isShown(name) ? "true" : null}>
      <span class="grow"><b>${shortName(model)}</b> ${new Date(createdAt * 1000).toLocaleString()} · ${quick ? "quick" : "full"} · ${plural(parts.length, "part")} · ${duration(seconds)}</span>
      <button class="button tiny" type="button" disabled=${running} onClick=${() => openSaved(name)} aria-label=${`Open ${name}`}>Open</button>
      <button class="button tiny" type="button" disabled=${running || !visible.length || isShown(name)} onClick=${() => openSaved(name, true)}
        aria-label=${`Compare with ${name}`}>Compare</button>
      <button class="button tiny plain" type="button" disabled=${running} onClick=${() => deleteReport(name)} aria-label=${`Delete ${name}`}>Delete</button>
    </li>`)}</ul></details>`;
}
