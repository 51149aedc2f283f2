// What stays over a reload of the tab: which branches are this page's own, and how it looked.

import { api } from "./api.js";
import { ensureSteps, jump } from "./actions.js";
import { adopt, changed, state } from "./state.js";

const NAME = "unspool.session";
const KEPT = ["mode", "draft", "system", "settings", "current", "tint", "speed", "panel", "view"];
const TOPICS = ["mode", "draft", "system", "settings", "current", "tint", "speed", "panel", "view", "branches"];

/** Keep it in the tab whenever something changes. */
export function keepSession(on) {
  let timer = 0;
  const put = () => {
    const branches = [...state.branches.values()].filter((branch) => !branch.recorded);
    const found = Object.fromEntries(KEPT.map((name) => [name, state[name]]));
    found.branches = branches.map(({ id, runs }) => [id, runs]);
    try {
      sessionStorage.setItem(NAME, JSON.stringify(found));
    } catch {
      /* not kept: a reload begins anew */
    }
  };
  addEventListener("pagehide", put); // what changed in the last moment counts too
  for (const topic of TOPICS) {
    on(topic, () => {
      clearTimeout(timer);
      timer = setTimeout(put, 300);
    });
  }
}

/** Take up where the tab was before it was loaded again; false if it was nowhere. */
export async function restoreSession() {
  let found = null;
  try {
    found = JSON.parse(sessionStorage.getItem(NAME));
  } catch {
    /* nothing that can be read */
  }
  if (!found || state.branches.size) return Boolean(found);
  const { branches = [], current, ...looks } = found;
  for (const name of KEPT) if (name in looks) state[name] = looks[name];
  changed(...TOPICS);
  if (!branches.length) return true;
  const { data } = await api.get("/v1/tree").catch(() => ({ data: [] }));
  const there = new Map(data.map((told) => [told.id, told]));
  for (const [id, runs] of branches) {
    if (there.has(id)) adopt(there.get(id)).runs = runs;
  }
  if (state.branches.has(current)) {
    await ensureSteps(current).catch(() => {});
    await jump(current);
  }
  return true;
}
