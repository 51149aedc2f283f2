// Which runs there are, the one that is looked at, and what the server tells of it as it goes. Topic "learn".

import { connect } from "../actions.js";
import { api, ApiFault } from "../api.js";
import { kept } from "../lib.js";
import { changed } from "../state.js";

export const learn = {
  runs: null, // null: not asked yet
  folder: "",
  mayStart: false,
  whyNot: null,
  name: null, // the run that is looked at
  run: null,
  lines: [], // of its log; `next` is the number of the line after them
  next: 0,
  samples: [],
  at: null, // the step that is looked at; null: the newest
  hovered: null, // a step under the pointer
  starting: false,
  fault: null, // of the run that is looked at
  listFault: null,
  startFault: null,
  view: { axis: "step", logX: true, logY: false, smooth: 0.06, ...kept.get("learn", {}) },
};

const GOING = new Set(["running", "paused"]);
export const told = () => changed("learn");
export const isGoing = () => GOING.has(learn.run?.state);
export const checkpoints = () => learn.run?.checkpoints ?? [];

export function setView(some) {
  Object.assign(learn.view, some);
  kept.set("learn", learn.view);
  told();
}

// -- the runs ---------------------------------------------------------------------------------

/** Ask which runs there are; the one the address names, or the newest, is looked at first. */
export async function listRuns() {
  try {
    const found = await api.get("/v1/runs");
    Object.assign(learn, {
      runs: found.data, folder: found.folder, mayStart: found.may_start, whyNot: found.why_not, listFault: null,
    });
    if (learn.name === null && (found.starting || found.data.length)) {
      const wanted = new URLSearchParams(location.search).get("run");
      const is = (name) => found.data.some((run) => run.name === name);
      openRun(is(wanted) ? wanted : found.starting ?? found.data[0].name);
    }
  } catch (error) {
    failed(error, "listFault");
  }
  told();
}

let watching = null; // ends the stream of the run before
const onOpen = new Set();
/** Call `listener` when another run is looked at. */
export const onRun = (listener) => onOpen.add(listener);

export function openRun(name) {
  watching?.abort();
  Object.assign(learn, { name, run: null, lines: [], next: 0, samples: [], at: null, hovered: null, fault: null });
  onOpen.forEach((listener) => listener());
  remember(name);
  told();
  watch(name);
}

function remember(name) {
  const query = new URLSearchParams(location.search);
  query.set("run", name);
  history.replaceState(null, "", `?${query}`);
}

/** Follow a run until it is over; when the server goes away, until it is back. */
async function watch(name) {
  const control = (watching = new AbortController());
  const path = `/v1/runs/${encodeURIComponent(name)}/events`;
  while (!control.signal.aborted) {
    try {
      const query = `?since=${learn.next}&samples=${learn.samples.length}`;
      for await (const { event, data } of api.stream(path + query, null, { signal: control.signal })) {
        if (control.signal.aborted || event === "done") return;
        take(event, data);
      }
    } catch (error) {
      if (control.signal.aborted) return;
      if (!(error instanceof ApiFault)) throw error;
      if (!error.gone && error.code !== "shutting_down") return failed(error);
      connect();
    }
    await new Promise((done) => { setTimeout(done, 1000); });
  }
}

function take(event, data) {
  if (event === "run") learn.run = data;
  else if (event === "log") {
    learn.lines = joined(learn.lines, data.lines);
    learn.next = data.next;
  } else if (event === "samples") learn.samples = [...learn.samples.slice(0, data.from), ...data.lines];
  if (event === "run" && learn.starting) {
    learn.starting = false;
    listRuns();
  }
  told();
}

/** New lines behind those that are known. Of the last known step there may be more to tell; a run that was resumed
 * tells all its steps again. */
function joined(known, [first, ...rest]) {
  const same = known.find((line) => line.step === first.step);
  const lines = [...known.filter((line) => line.step < first.step), { ...same, ...first }, ...rest];
  let before = { tokens: 0, seconds: 0 };
  return lines.map((line) => (before = { ...line, tokens: line.tokens ?? before.tokens, seconds: line.seconds ?? before.seconds }));
}

function failed(error, where = "fault") {
  if (!(error instanceof ApiFault)) throw error;
  learn[where] = error.message;
  learn.starting = false;
  if (error.gone || error.status === 401) connect();
  told();
}

// -- what a person wants of them --------------------------------------------------------------

export async function startRun({ source, depth, minutes }) {
  learn.startFault = null;
  learn.starting = true;
  told();
  try {
    const { name } = await api.post("/v1/runs", { source, depth, minutes });
    openRun(name);
    return true;
  } catch (error) {
    learn.starting = false;
    learn.startFault = error.message;
    told();
    if (!(error instanceof ApiFault)) throw error;
    return false;
  }
}

/** Have the run pause, go on or stop; it says itself when it does. */
export async function ask(want) {
  const { name } = learn;
  const wasGoing = isGoing();
  try {
    learn.fault = null;
    await api.post(`/v1/runs/${encodeURIComponent(name)}/control`, { want });
    if (!wasGoing) openRun(name); // another process goes on with it
  } catch (error) {
    failed(error);
  }
}

// -- where a person looks ---------------------------------------------------------------------

export const lastStep = () => Math.max(learn.lines.at(-1)?.step ?? 0, checkpoints().at(-1)?.step ?? 0);
export const stepNow = () => learn.at ?? lastStep();

export function lookAt(step) {
  learn.at = step === null || step >= lastStep() ? null : Math.max(0, step);
  told();
  changed("scrub");
}

export function point(step) {
  if (learn.hovered === step) return;
  learn.hovered = step;
  told();
}

