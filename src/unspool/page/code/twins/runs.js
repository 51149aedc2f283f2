// One prompt, written left to right by one model and filled in any order by another; and the canvas as a person
// changes it. It outlives the view: a person may look elsewhere.

import { adoptEvent, connect } from "../actions.js";
import { ApiFault, api } from "../api.js";
import { keep, know, letGo } from "../own_texts.js";
import { changed, state } from "../state.js";

const EXAMPLE = "Once upon a time there was a";
const TOP = 6; // candidates told at each place

/** Topic "twins". */
export const twins = {
  prompt: EXAMPLE,
  mode: "plain",
  length: "32",
  order: "threshold",
  threshold: "0.9",
  remask: "",
  causal: null, // which model; null: the first that there is
  masked: null,
  puzzle: null, // "sudoku"; null: a text of one's own
  empty: 40, // cells of a Sudoku
  making: false, // a puzzle is on its way
  fault: null,
  left: { id: null, writing: false, fault: null, seconds: 0, solved: null },
  right: { start: null, passes: [], done: null, writing: false, fault: null, judged: null, control: null, solved: null },
  shown: null, // after how many passes; null: the newest
  place: null, // the place that is looked at
  hand: new Map(), // what a person put in places of the pass that is shown: {token, text}, or null
};

export const told = () => changed("twins");
export const isWriting = () => twins.left.writing || twins.right.writing || twins.making;

export function change(values) {
  Object.assign(twins, values);
  told();
}

// -- models -----------------------------------------------------------------------------------

const loaded = () => state.models.filter(({ unspool }) => unspool.loaded);
export const causalModels = () => loaded().filter(({ unspool }) => unspool.sight === "causal");
/** Those that can fill a canvas; who sees ahead first. */
export const maskedModels = () => loaded()
  .filter(({ unspool }) => unspool.mask_id != null)
  .sort((one, other) => (one.unspool.sight === "causal") - (other.unspool.sight === "causal"));
/** On this machine, but not in memory: nobody knows yet what they can do. */
export const otherModels = () => state.models.filter(({ unspool }) => !unspool.loaded && unspool.fits !== false);
export const causalNow = () => twins.causal ?? causalModels().find(({ id }) => id === state.model)?.id ?? causalModels()[0]?.id ?? null;
export const maskedNow = () => twins.masked ?? maskedModels()[0]?.id ?? null;

// -- writing ----------------------------------------------------------------------------------

function promptBody() {
  return twins.mode === "chat" ? { messages: [{ role: "user", content: twins.prompt }] } : { prompt: twins.prompt };
}

function checked() {
  const length = Number(twins.length);
  if (!twins.prompt.trim()) return { message: "Write a prompt first.", param: "prompt" };
  if (!(Number.isInteger(length) && length > 0)) {
    return { message: `The length was “${twins.length}”; it must be a whole number of 1 or more.`, param: "length" };
  }
  for (const name of ["threshold", "remask"]) {
    const value = twins[name].trim();
    if (value !== "" && !(Number(value) >= 0 && Number(value) <= 1)) {
      return { message: `The ${name} was “${value}”; it may be a probability, from 0 to 1.`, param: name };
    }
  }
  return null;
}

/** One after the other, so that their times can be compared. */
export async function writeBoth() {
  if (isWriting()) return;
  twins.fault = checked();
  Object.assign(twins, { shown: null, place: null, hand: new Map() });
  told();
  if (twins.fault) return;
  const { left, right } = twins;
  letGo([left.id, right.judged]);
  Object.assign(left, { id: null, fault: null, seconds: 0, solved: null });
  Object.assign(right, { start: null, passes: [], done: null, fault: null, judged: null, solved: null });
  if (causalNow()) await tried(left, writeLeft);
  if (maskedNow() && !left.stopped) await tried(right, () => fill([]));
  left.stopped = false;
  await connect(); // a model may have come into memory
  told();
}

async function writeLeft() {
  const { left } = twins;
  const asked = { ...promptBody(), model: causalNow(), max_tokens: Number(twins.length), temperature: 0, top: TOP };
  left.id = keep(await api.post("/v1/tree", { ...asked, name: "left to right" }), {});
  const began = performance.now();
  for await (const { event, data } of api.resume(left.id, { stream: true })) {
    adoptEvent(event, data);
    left.seconds = (performance.now() - began) / 1000;
    told();
  }
  const { model, prompt, steps } = state.branches.get(left.id);
  await know(model);
  if (!left.stopped) left.solved = await isSolved(prompt.text, steps.map(({ text }) => text).join(""));
}

/** Fill the canvas from these tokens on; what comes is put behind the passes that are there. */
async function fill(given) {
  const { right } = twins;
  right.control = new AbortController();
  const body = {
    ...promptBody(), model: maskedNow(), max_tokens: Number(twins.length), order: twins.order, top: TOP, stream: true,
    ...(given.length ? { given } : {}),
    ...(twins.threshold.trim() && twins.order === "threshold" ? { threshold: Number(twins.threshold) } : {}),
    ...(twins.remask.trim() ? { remask: Number(twins.remask) } : {}),
  };
  for await (const { event, data } of api.stream("/v1/diffuse", body, { signal: right.control.signal })) {
    if (event === "start") right.start ??= data;
    else if (event === "pass") right.passes.push(data);
    else if (event === "done") right.done = data;
    told();
  }
  if (right.done) right.solved = await isSolved(right.start.prompt.map(({ text }) => text).join(""), right.done.text);
  await judge();
}

/** What the exact judge of a puzzle says of an answer; null: there is none, or the prompt is no such puzzle. */
async function isSolved(prompt, answer) {
  if (!twins.puzzle) return null;
  const asked = { puzzle: twins.puzzle, prompt, answer };
  return api.post("/v1/puzzles/judge", asked).then(({ solved }) => solved, () => null);
}

/** What the causal model says of the text that was filled in: as a branch of its own. */
async function judge() {
  const { right } = twins;
  if (!causalNow() || !right.done?.text) return;
  const made = await api.post("/v1/tree", { ...promptBody(), model: causalNow(), top: TOP, name: "filled in any order" });
  right.judged = keep(made, {});
  adoptEvent("branch", { data: await api.post(`/v1/tree/${right.judged}/append`, { text: right.done.text }) });
}

async function tried(side, action) {
  side.writing = true;
  told();
  try {
    await action();
  } catch (error) {
    if (error.name !== "AbortError") {
      side.fault = { message: error.message };
      if (!(error instanceof ApiFault)) throw error;
    }
  } finally {
    side.writing = false;
    told();
  }
}

export function stopBoth() {
  const { left, right } = twins;
  if (left.writing) {
    left.stopped = true;
    if (left.id) api.stop(left.id).catch(() => {}); // then the stream says why
  }
  right.control?.abort();
}

// -- the canvas, pass by pass -----------------------------------------------------------------

/** After how many passes it is looked at, and how many there are on the longer side. */
export const mostPasses = () => Math.max(twins.right.passes.length, state.branches.get(twins.left.id)?.steps.length ?? 0);
export const shownNow = () => Math.min(twins.shown ?? mostPasses(), mostPasses());
export const passNow = () => Math.min(shownNow(), twins.right.passes.length);

/** The places as they are after so many passes: `{token, text, probability, change, candidates, isOpen}`. */
export function placesAfter(count) {
  const { start, passes } = twins.right;
  if (!start) return [];
  const places = start.given.map((given, number) => ({ number, token: given?.token ?? null, text: given?.text ?? "" }));
  passes.slice(0, count).forEach((pass, at) => {
    for (const told of pass.places) {
      if (told.number >= places.length) continue;
      const { token } = places[told.number];
      places[told.number] = { ...told, since: told.change ? at : places[told.number].since ?? null, was: token, at };
    }
  });
  return places.map((place) => ({ ...place, isOpen: place.at === count - 1, change: place.at === count - 1 ? place.change : null }));
}

export function look(shown) {
  Object.assign(twins, { shown, place: null, hand: new Map() });
  told();
}

/** Put a token in a place by hand; null: clear it. Words of several tokens take the places behind it too. */
export function put(number, tokens) {
  tokens.forEach((token, at) => {
    if (number + at < twins.right.start.places) twins.hand.set(number + at, token);
  });
  told();
}

export async function putWords(number, words) {
  const asked = { content: words, parse_special: false, with_pieces: true, model: maskedNow() };
  const { tokens, pieces } = await api.post("/tokenize", asked);
  put(number, tokens.map(({ id }, at) => ({ token: id, text: pieces[at].text ?? words })));
}

/** From the pass that is shown, with what a person changed in it. */
export async function goOnFromHere() {
  if (isWriting()) return;
  const { right, hand } = twins;
  const places = placesAfter(passNow());
  right.passes = right.passes.slice(0, passNow());
  if (hand.size) {
    const changes = [...hand].map(([number, now]) => ({
      ...places[number], ...(now ?? { token: null, text: places[number].text }), change: now ? "hand" : "cleared", probability: null,
    }));
    const tokens = places.map(({ token }, number) => (hand.has(number) ? hand.get(number)?.token ?? null : token));
    right.passes.push({ kind: "hand", tokens, places: changes, set: 0, taken_back: 0, seconds: 0 });
  }
  const given = right.passes.at(-1)?.tokens ?? places.map(({ token }) => token);
  Object.assign(right, { done: null, fault: null, solved: null });
  letGo([right.judged]);
  right.judged = null;
  Object.assign(twins, { shown: null, place: null, hand: new Map() });
  await tried(right, () => fill(given));
}
