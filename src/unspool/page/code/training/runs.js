// The state of the Training view: the runs, the log of the selected run, and texts of its checkpoints.

import { addBranch, applyEvent, CANDIDATES, connect, dropUnused, loadModelInfo } from "../actions.js";
import { api, ApiError } from "../api.js";
import { storage } from "../lib.js";
import { changed, on, state } from "../state.js";

export const training = {
  runs: null, // null: not loaded yet
  folder: "",
  mayStart: false,
  whyNot: null,
  name: null, // the selected run
  run: null,
  lines: [], // of its log; `next` is the index of the next line
  next: 0,
  samples: [],
  at: null, // the selected step; null: the newest
  hovered: null, // the step under the pointer
  starting: false,
  fault: null, // of the selected run
  listFault: null,
  startFault: null,
  view: { axis: "step", logX: true, logY: false, smooth: 0.06, ...storage.get("learn", {}) },
};

const ACTIVE_STATES = new Set(["running", "paused"]);
const notify = () => changed("training");
export const isActive = () => ACTIVE_STATES.has(training.run?.state);
export const checkpoints = () => training.run?.checkpoints ?? [];

export function setView(some) {
  Object.assign(training.view, some);
  storage.set("learn", training.view);
  notify();
}

// -- the runs ---------------------------------------------------------------------------------

/** Load the list of runs; open the one that the address names, or the newest. */
export async function listRuns() {
  try {
    const response = await api.get("/v1/runs");
    Object.assign(training, {
      runs: response.data, folder: response.folder, mayStart: response.may_start, whyNot: response.why_not, listFault: null,
    });
    if (training.name === null && (response.starting || response.data.length)) {
      const requested = new URLSearchParams(location.search).get("run");
      const is = (name) => response.data.some((run) => run.name === name);
      openRun(is(requested) ? requested : response.starting ?? response.data[0].name);
    }
  } catch (error) {
    setError(error, "listFault");
  }
  notify();
}

let watching = null; // AbortController of the event stream
const onOpen = new Set();
/** Call `listener` when another run is opened. */
const onRun = (listener) => onOpen.add(listener);

export function openRun(name) {
  watching?.abort();
  Object.assign(training, { name, run: null, lines: [], next: 0, samples: [], at: null, hovered: null, fault: null });
  onOpen.forEach((listener) => listener());
  rememberRun(name);
  notify();
  watch(name);
}

function rememberRun(name) {
  const query = new URLSearchParams(location.search);
  query.set("run", name);
  history.replaceState(null, "", `?${query}`);
}

/** Follow the events of a run until it ends; reconnect when the server was away. */
async function watch(name) {
  const control = (watching = new AbortController());
  const path = `/v1/runs/${encodeURIComponent(name)}/events`;
  while (!control.signal.aborted) {
    try {
      const query = `?since=${training.next}&samples=${training.samples.length}`;
      for await (const { event, data } of api.stream(path + query, null, { signal: control.signal })) {
        if (control.signal.aborted || event === "done") return;
        applyRunEvent(event, data);
      }
    } catch (error) {
      if (control.signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      if (!error.isOffline && error.code !== "shutting_down") return setError(error);
      connect();
    }
    await new Promise((done) => { setTimeout(done, 1000); });
  }
}

function applyRunEvent(event, data) {
  if (event === "run") training.run = data;
  else if (event === "log") {
    training.lines = mergeLines(training.lines, data.lines);
    training.next = data.next;
  } else if (event === "samples") training.samples = [...training.samples.slice(0, data.from), ...data.lines];
  if (event === "run" && training.starting) {
    training.starting = false;
    listRuns();
  }
  notify();
}

/** Append new log lines. The first may extend the last known step; a resumed run repeats steps. */
function mergeLines(oldLines, [first, ...newer]) {
  const repeated = oldLines.find((line) => line.step === first.step);
  const lines = [...oldLines.filter((line) => line.step < first.step), { ...repeated, ...first }, ...newer];
  let before = { tokens: 0, seconds: 0 };
  return lines.map((line) => (before = { ...line, tokens: line.tokens ?? before.tokens, seconds: line.seconds ?? before.seconds }));
}

function setError(error, where = "fault") {
  if (!(error instanceof ApiError)) throw error;
  training[where] = error.message;
  training.starting = false;
  if (error.isOffline || error.status === 401) connect();
  notify();
}

// -- control ----------------------------------------------------------------------------------

export async function startRun({ source, depth, minutes }) {
  training.startFault = null;
  training.starting = true;
  notify();
  try {
    const { name } = await api.post("/v1/runs", { source, depth, minutes });
    openRun(name);
    return true;
  } catch (error) {
    training.starting = false;
    training.startFault = error.message;
    notify();
    if (!(error instanceof ApiError)) throw error;
    return false;
  }
}

/** Request that the run pauses, resumes ("go") or stops; an event reports when it does. */
export async function controlRun(want) {
  const { name } = training;
  const wasGoing = isActive();
  try {
    training.fault = null;
    await api.post(`/v1/runs/${encodeURIComponent(name)}/control`, { want });
    if (!wasGoing) openRun(name); // another process resumes it
  } catch (error) {
    setError(error);
  }
}

// -- the selected step ------------------------------------------------------------------------

export const lastStep = () => Math.max(training.lines.at(-1)?.step ?? 0, checkpoints().at(-1)?.step ?? 0);
export const currentStep = () => training.at ?? lastStep();

export function lookAt(step) {
  training.at = step === null || step >= lastStep() ? null : Math.max(0, step);
  notify();
  changed("scrub");
}

export function setHovered(step) {
  if (training.hovered === step) return;
  training.hovered = step;
  notify();
}

// -- texts of the checkpoints: each is a model of the server, and generates when it becomes visible ----

const WAIT = 150; // milliseconds after the last movement of the slider

export const texts = {
  prompt: null, // null: that of the run's samples
  mode: null, // "chat" or "plain"; null: "plain" for a model trained from scratch, else "chat"
  length: "60",
  temperature: "0.8",
  seed: "7",
  request: null, // prompt and settings of the texts below; null: nothing generated yet
  frames: [], // steps of the visible checkpoints
  byStep: new Map(), // step: {id, writing, fault}
  fault: null,
};

export const currentPrompt = () => texts.prompt ?? training.samples[0]?.prompt ?? "The";
export const currentMode = () => texts.mode ?? (training.run?.kind === "new" ? "plain" : "chat");
export const isWriting = () => [...texts.byStep.values()].some(({ writing }) => writing);

export function setFields(some) {
  Object.assign(texts, some, { fault: null });
  notify();
}

/** The request for all checkpoints; null if a field is invalid, with the error in `texts.fault`. */
function readFields() {
  const request = { prompt: currentPrompt(), mode: currentMode(), max_tokens: Number(texts.length), seed: Number(texts.seed),
    temperature: Number(texts.temperature.replace(",", ".")) };
  const wrong = (param, message) => { texts.fault = { param, message }; };
  if (!request.prompt.trim()) wrong("prompt", "Enter a prompt first.");
  else if (!(Number.isInteger(request.max_tokens) && request.max_tokens > 0)) {
    wrong("length", `Tokens must be an integer >= 1, got “${texts.length}”.`);
  } else if (!Number.isInteger(request.seed)) wrong("seed", `Seed must be an integer, got “${texts.seed}”.`);
  else if (!(request.temperature >= 0) || texts.temperature.trim() === "") {
    wrong("temperature", `Temperature must be >= 0, got “${texts.temperature}”.`);
  } else return request;
  return null;
}

/** Generate all visible checkpoints again with the current fields. */
export function writeVisible() {
  const request = readFields();
  notify();
  if (!request) return;
  clear();
  texts.request = request;
  writeMissing();
}

let control = new AbortController();

/** Drop all texts and stop their generation. */
function clear() {
  control.abort();
  control = new AbortController();
  clearTimeout(timer);
  dropUnused([...texts.byStep.values()].map(({ id }) => id));
  texts.byStep = new Map();
  texts.request = null;
}

export function stopWriting() {
  control.abort();
  control = new AbortController();
}

onRun(clear);

let timer = 0;

/** Set the visible checkpoints; after a moment they generate, if a request exists. */
export function setVisible(steps) {
  if (String(steps) === String(texts.frames)) return;
  texts.frames = steps;
  if (texts.request) scheduleWriting();
}

function scheduleWriting() {
  clearTimeout(timer);
  timer = setTimeout(writeMissing, WAIT);
}

on("scrub", () => {
  if (!texts.request) texts.request = readFields(); // moving the slider starts the generation
  if (texts.request) scheduleWriting();
});

function writeMissing() {
  for (const step of texts.frames) {
    const text = texts.byStep.get(step);
    if (!text || (text.fault && !text.writing)) writeCheckpoint(step, texts.request, control.signal);
  }
}

async function writeCheckpoint(step, request, signal) {
  const saved = checkpoints().find((candidate) => candidate.step === step);
  if (!saved || !request) return;
  const text = { id: null, writing: true, fault: null };
  texts.byStep.set(step, text);
  notify();
  try {
    const { prompt, mode, ...settings } = request;
    const name = `${training.name}, step ${step}`;
    const words = mode === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    const body = { model: saved.model, name, ...words, top: CANDIDATES, ...settings };
    const branch = await api.post("/v1/tree", body, { signal });
    text.id = addBranch(branch, settings);
    await loadModelInfo(saved.model, signal);
    for await (const { event, data } of api.stream(`/v1/tree/${text.id}/resume`, { stream: true }, { signal })) {
      applyEvent(event, data);
      notify();
    }
    const fault = state.branches.get(text.id)?.error;
    if (fault) throw new ApiError(500, fault.message, fault);
  } catch (error) {
    if (error.name !== "AbortError") text.fault = error.message;
    else if (!text.id) texts.byStep.delete(step);
    if (error.name !== "AbortError" && !(error instanceof ApiError)) throw error;
  } finally {
    text.writing = false;
    notify();
  }
}

// The user edited a token in one of the texts: show the new branch in its column.
on("current", () => {
  const branch = state.branches.get(state.current);
  for (const [step, text] of texts.byStep) {
    if (branch && text.id === branch.parent && branch.model === state.branches.get(text.id)?.model) {
      texts.byStep.set(step, { ...text, id: branch.id });
      notify();
    }
  }
});
