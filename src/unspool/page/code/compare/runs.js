// What is being compared, and the writing of it. It outlives the view: a person may look elsewhere.

import { adoptEvent, CANDIDATES, promptBody } from "../actions.js";
import { ApiFault, api } from "../api.js";
import { keep, letGo } from "../own_texts.js";
import { changed, state } from "../state.js";
import { FIRST, USUAL, nameOf, sentSettings, settingsOf } from "./settings.js";

export const MOST_COLUMNS = 4;
export const MOST_SAMPLES = 16;
const EXAMPLE = "Why do leaves change color in fall?";

const column = (settings) => (
  { key: (nextKey += 1), settings, id: null, fault: null, writing: false, began: 0, until: 0 });
let nextKey = 0;

/** Topic "compare". */
export const compare = {
  picture: "settings", // or "samples"
  prompt: null, // null: what stands in the composer, or else the example
  length: "60",
  fault: null, // of the prompt or the length, which all share
  columns: FIRST.map(column),
  samples: {
    number: 8, settings: settingsOf(USUAL, ""), root: null, ids: [], fault: null, writing: false,
    shown: null, // the sample whose text is shown
  },
};

export const told = () => changed("compare");
export const promptNow = () => compare.prompt ?? (state.draft || EXAMPLE);
export const isExample = () => promptNow() === EXAMPLE;
export const isWriting = () => (
  compare.samples.writing || compare.columns.some((each) => each.writing));

export function change(values) {
  Object.assign(compare, values);
  told();
}

export function setColumn(one, values) {
  Object.assign(one.settings, values);
  one.fault = null;
  told();
}

export function addColumn() {
  const last = compare.columns[compare.columns.length - 1];
  compare.columns.push(column({ ...last.settings }));
  told();
}

export function removeColumn(one) {
  compare.columns.splice(compare.columns.indexOf(one), 1);
  letGo([one.id]);
  told();
}

// -- writing ----------------------------------------------------------------------------------

/** Write what is shown: all columns, or all samples. */
export async function writeAll() {
  if (isWriting()) return;
  const prompt = promptNow();
  const length = Number(compare.length);
  compare.fault = prompt.trim() === "" ? { message: "Write a prompt first.", param: "prompt" }
    : !(Number.isInteger(length) && length > 0) ? {
      message: `The length was “${compare.length}”; it must be a whole number of 1 or more.`,
      param: "length",
    } : null;
  told();
  if (compare.fault) return;
  const asked = { ...promptBody(prompt), max_tokens: length, top: CANDIDATES };
  if (state.model) asked.model = state.model;
  await (compare.picture === "samples" ? writeSamples(asked) : writeColumns(asked));
}

/** All branches are there before the first is written: then the server writes them in one batch. */
async function writeColumns(asked) {
  const columns = [...compare.columns];
  const before = columns.map((each) => each.id);
  for (const each of columns) {
    Object.assign(each, { id: null, fault: null, writing: true, began: 0, until: 0 });
  }
  letGo(before);
  told();
  await Promise.all(columns.map((each) => tried(each, async () => {
    const settings = sentSettings(each.settings);
    const body = { ...asked, ...settings, name: nameOf(each.settings) };
    each.id = keep(await api.post("/v1/tree", body), settings);
  })));
  await Promise.all(columns.filter((each) => each.id && each.writing).map(async (each) => {
    await tried(each, async () => {
      each.began = each.until = performance.now();
      for await (const { event, data } of api.resume(each.id, { stream: true })) {
        adoptEvent(event, data);
        each.until = performance.now();
        told();
      }
    });
    each.writing = false;
    told();
  }));
}

async function writeSamples(asked) {
  const samples = compare.samples;
  const before = [...samples.ids, samples.root];
  Object.assign(samples, { root: null, ids: [], fault: null, writing: true, shown: null });
  letGo(before);
  told();
  await tried(samples, async () => {
    const settings = sentSettings(samples.settings);
    const name = `${samples.number} samples, ${nameOf(samples.settings)}`;
    samples.root = keep(await api.post("/v1/tree", { ...asked, ...settings, name }), settings);
    const body = { n: samples.number, stream: true };
    for await (const { event, data } of api.resume(samples.root, body)) {
      if (!samples.ids.includes(data.branch)) {
        samples.ids.push(keep({ ...data.data, steps: [], since: 0 }, settings));
      }
      adoptEvent(event, data);
      told();
    }
  });
  samples.writing = false;
  told();
}

/** Do it; what goes wrong is said where it belongs, and the others go on. */
async function tried(place, action) {
  try {
    await action();
  } catch (error) {
    place.writing = false;
    place.fault = { message: error.message, param: error.param ?? null };
    told();
    if (!(error instanceof ApiFault) && !error.param) throw error; // a mistake of ours: show it
  }
}

/** What is being written ends after the step it is at; the streams say so. */
export function stopAll() {
  const { columns, samples } = compare;
  for (const each of columns) if (!each.began) each.writing = false; // not begun: it never will
  const ids = columns.filter((each) => each.writing).map((each) => each.id);
  if (samples.writing) ids.push(...samples.ids);
  for (const id of ids) api.stop(id).catch(() => {}); // then the stream says why
}
