// The same text written once more with the cache the other way round, to see what the cache saves.
//
// A branch forked off for this is deleted when it is done: it says nothing that the text does not
// say already, and would only stand in the map.

import { api } from "../api.js";
import { changed, on, state } from "../state.js";

export const MOST = 60; // tokens; without the cache each takes longer than the one before

const measures = new WeakMap(); // branch → what was measured of it
let running = null;

/** `{start, cache, steps, running, stopped, fault}` or null. */
export const measureOf = (branch) => measures.get(branch) ?? null;

export const isMeasuring = () => running !== null;

/** Whether the step was written with the cache. */
export function hadCache(branch, index) {
  const run = branch.runs.findLast(({ from }) => from <= index);
  return (run?.settings ?? branch.settings)?.cache !== false;
}

/**
 * From where on the text can be written again by its seed: behind what a person put there, and
 * since the settings are what they are now.
 */
export function startOf(branch) {
  const chosen = branch.steps.findLastIndex((step) => step.chosen) + 1;
  let start = 0;
  for (let i = branch.runs.length - 1; i > 0; i--) {
    if (JSON.stringify(branch.runs[i].settings) !== JSON.stringify(branch.runs[i - 1].settings)) {
      start = branch.runs[i].from;
      break;
    }
  }
  return Math.max(chosen, start);
}

export async function measure(branch) {
  const start = startOf(branch);
  const cache = !hadCache(branch, branch.steps.length - 1);
  const control = new AbortController();
  const found = { start, cache, steps: [], running: true, stopped: false, fault: null };
  measures.set(branch, found);
  running = { found, control };
  changed("costs");
  let fork = null;
  try {
    const name = cache ? "with cache" : "without cache";
    fork = await api.post(`/v1/tree/${branch.id}/fork`, { at: start, name });
    const body = {
      cache, speculate: null, seed: branch.seed, stream: true, trace: false,
      max_tokens: Math.min(MOST, branch.steps.length - start),
    };
    const events = api.stream(`/v1/tree/${fork.id}/resume`, body, { signal: control.signal });
    for await (const { event, data } of events) {
      if (event === "step") found.steps[data.index - start] = data;
      else if (event === "retract") found.steps.length = data.to - start;
      changed("costs");
    }
  } catch (error) {
    if (!control.signal.aborted) found.fault = error.message;
  } finally {
    found.running = false;
    running = null;
    changed("costs");
    if (fork) api.delete(`/v1/tree/${fork.id}`).catch(() => {}); // gone with the server, then
  }
}

export function stopMeasuring() {
  if (!running) return;
  running.found.stopped = true;
  running.control.abort();
}

// Two texts at once would take each other's time, and nothing could be read from the curves.
on("writing", () => state.writing && stopMeasuring());
