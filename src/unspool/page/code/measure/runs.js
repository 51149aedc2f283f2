// Measuring: what is asked for, the report as it grows, those that the server has kept, and those that are shown.
// It outlives the view: a person may look elsewhere meanwhile.

import { ApiFault, api } from "../api.js";
import { changed, state } from "../state.js";

/** Topic "measure". */
export const measuring = {
  quick: true,
  left: new Set(), // parts that are left out
  seed: "0",
  parts: [], // that there are
  mayMeasure: true,
  whyNot: null,
  kept: [], // what the server has
  shown: [], // one report, or two to compare: {name, report}
  growing: null, // the one that is being measured
  running: false,
  share: 0, // of its parts
  now: "", // the part that is being measured
  stopped: false,
  fault: null,
};
let control = null;

const told = () => changed("measure");
export function change(values) {
  Object.assign(measuring, values);
  told();
}

export async function list() {
  try {
    const { data, parts, may_measure: mayMeasure, why_not: whyNot } = await api.get("/v1/costs");
    change({ kept: data, parts, mayMeasure, whyNot });
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof ApiFault)) throw error;
  change({ fault: error });
}

export function choose(part, wanted) {
  measuring.left[wanted ? "delete" : "add"](part);
  change({ fault: null });
}

/** The request, or an ApiFault that says what is wrong. */
function question() {
  const { quick, parts, left, seed } = measuring;
  const wanted = parts.filter((part) => !left.has(part));
  if (!wanted.length) throw new ApiFault(400, "Choose a part to measure.", { param: "parts" });
  const number = Number(seed);
  if (!seed.trim() || !Number.isInteger(number) || number < 0) {
    throw new ApiFault(400, `The seed was “${seed}”; it must be a whole number of 0 or more.`, { param: "seed" });
  }
  return { model: state.model, quick, parts: wanted, seed: number };
}

const happened = {
  start({ model, parts, quick, seed }) {
    measuring.growing = { model, machine: {}, quick, seed, parts: [], wanted: parts };
  },
  progress({ part, share }) {
    const { parts, wanted } = measuring.growing;
    Object.assign(measuring, { now: part, share: (parts.length + share) / wanted.length });
  },
  part(part) {
    const { parts, wanted } = measuring.growing;
    parts.push(part);
    measuring.share = parts.length / wanted.length;
  },
  done({ name, report }) {
    Object.assign(measuring, { shown: [{ name, report }], growing: null });
  },
};

export async function measure() {
  if (measuring.running) return;
  try {
    const asked = question();
    change({ running: true, stopped: false, fault: null, shown: [], growing: null, share: 0, now: "" });
    control = new AbortController();
    for await (const { event, data } of api.stream("/v1/costs", asked, { signal: control.signal })) {
      happened[event]?.(data);
      told();
    }
  } catch (error) {
    fail(error);
  } finally {
    change({ running: false });
  }
  await list();
}

export function stop() {
  control?.abort();
  change({ stopped: true });
}

// -- reports that are there ---------------------------------------------------------------------

/** Show a kept report: alone, or beside the one that is shown. */
export async function openKept(name, beside = false) {
  try {
    const report = await api.get(`/v1/costs/${encodeURIComponent(name)}`);
    const first = measuring.shown.slice(0, beside ? 1 : 0);
    change({ shown: [...first, { name, report }], fault: null, growing: null, stopped: false });
  } catch (error) {
    fail(error);
  }
}

export async function forget(name) {
  try {
    await api.delete(`/v1/costs/${encodeURIComponent(name)}`);
    change({ shown: measuring.shown.filter((one) => one.name !== name) });
  } catch (error) {
    fail(error);
  }
  await list();
}

/** A file that `unspool costs` wrote: one report, or a comparison. */
export async function openFile(file) {
  const broken = () => change({ fault: new ApiFault(400, `${file.name} is no report: open the JSON that unspool costs writes beside its page.`) });
  try {
    const found = JSON.parse(await file.text());
    const reports = found.reports ?? [found];
    if (!reports.every((report) => report.model && Array.isArray(report.parts))) return broken();
    change({ shown: reports.slice(0, 2).map((report) => ({ name: file.name, report })), fault: null, growing: null, stopped: false });
  } catch {
    broken();
  }
}
