// The same words by every checkpoint: each is a model of the server, and writes when it comes into sight.

import { adoptEvent, CANDIDATES } from "../actions.js";
import { api, ApiFault } from "../api.js";
import { keep, know, letGo } from "../own_texts.js";
import { on, state } from "../state.js";
import { checkpoints, learn, onRun, told } from "./run.js";

const WAIT = 150; // milliseconds after the last movement: what only passes by is not written

export const texts = {
  prompt: null, // null: that of the run's own samples
  mode: null, // "chat" or "plain"; null: a model that was tuned is asked, a new one goes on
  length: "60",
  temperature: "0.8",
  seed: "7",
  asked: null, // what the texts below were written with; null: nothing was written yet
  frames: [], // the steps of the checkpoints in sight
  of: new Map(), // step: {id, writing, fault}
  fault: null,
};

export const promptNow = () => texts.prompt ?? learn.samples[0]?.prompt ?? "The";
export const modeNow = () => texts.mode ?? (learn.run?.kind === "new" ? "plain" : "chat");
export const isWriting = () => [...texts.of.values()].some(({ writing }) => writing);

export function setAsked(some) {
  Object.assign(texts, some, { fault: null });
  told();
}

/** What all checkpoints are asked for, or what is wrong with it. */
function question() {
  const asked = { prompt: promptNow(), mode: modeNow(), max_tokens: Number(texts.length), seed: Number(texts.seed),
    temperature: Number(texts.temperature.replace(",", ".")) };
  const wrong = (param, message) => { texts.fault = { param, message }; };
  if (!asked.prompt.trim()) wrong("prompt", "Write a prompt first.");
  else if (!(Number.isInteger(asked.max_tokens) && asked.max_tokens > 0)) {
    wrong("length", `The number of tokens was “${texts.length}”; it must be a whole number of 1 or more.`);
  } else if (!Number.isInteger(asked.seed)) wrong("seed", `The seed was “${texts.seed}”; it must be a whole number.`);
  else if (!(asked.temperature >= 0) || texts.temperature.trim() === "") {
    wrong("temperature", `The temperature was “${texts.temperature}”; it must be a number of 0 or more.`);
  } else return asked;
  return null;
}

/** Write anew with what stands in the fields. */
export function writeFrames() {
  const asked = question();
  told();
  if (!asked) return;
  clear();
  texts.asked = asked;
  writeMissing();
}

let control = new AbortController();

/** Let all texts go; those being written end. */
function clear() {
  control.abort();
  control = new AbortController();
  clearTimeout(timer);
  letGo([...texts.of.values()].map(({ id }) => id));
  texts.of = new Map();
  texts.asked = null;
}

export function stopWriting() {
  control.abort();
  control = new AbortController();
}

onRun(clear);

let timer = 0;

/** These checkpoints are in sight; after a moment without movement they write, if writing has begun. */
export function showFrames(steps) {
  if (String(steps) === String(texts.frames)) return;
  texts.frames = steps;
  if (texts.asked) later();
}

function later() {
  clearTimeout(timer);
  timer = setTimeout(writeMissing, WAIT);
}

on("scrub", () => {
  if (!texts.asked) texts.asked = question(); // to drag along the curve is to ask
  if (texts.asked) later();
});

function writeMissing() {
  for (const step of texts.frames) {
    const known = texts.of.get(step);
    if (!known || (known.fault && !known.writing)) write(step, texts.asked, control.signal);
  }
}

async function write(step, asked, signal) {
  const saved = checkpoints().find((each) => each.step === step);
  if (!saved || !asked) return;
  const text = { id: null, writing: true, fault: null };
  texts.of.set(step, text);
  told();
  try {
    const { prompt, mode, ...settings } = asked;
    const name = `${learn.name}, step ${step}`;
    const words = mode === "chat" ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    const body = { model: saved.model, name, ...words, top: CANDIDATES, ...settings };
    const branch = await api.post("/v1/tree", body, { signal });
    text.id = keep(branch, settings);
    await know(saved.model, signal);
    for await (const { event, data } of api.stream(`/v1/tree/${text.id}/resume`, { stream: true }, { signal })) {
      adoptEvent(event, data);
      told();
    }
    const fault = state.branches.get(text.id)?.error;
    if (fault) throw new ApiFault(500, fault.message, fault);
  } catch (error) {
    if (error.name !== "AbortError") text.fault = error.message;
    else if (!text.id) texts.of.delete(step);
    if (error.name !== "AbortError" && !(error instanceof ApiFault)) throw error;
  } finally {
    text.writing = false;
    told();
  }
}

// A person chose another word in one of the texts: what is written from there stands in its place.
on("current", () => {
  const branch = state.branches.get(state.current);
  for (const [step, text] of texts.of) {
    if (branch && text.id === branch.parent && branch.model === state.branches.get(text.id)?.model) {
      texts.of.set(step, { ...text, id: branch.id });
      told();
    }
  }
});
