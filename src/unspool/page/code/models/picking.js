// Which model writes: picked among those on this machine, taken into memory, remembered in the address.

import { api, ApiFault } from "../api.js";
import { connect } from "../actions.js";
import { changed, state } from "../state.js";

export const faults = new Map(); // of models that could not be loaded: what was said

const pathOf = (id) => `/v1/models/${id.split("/").map(encodeURIComponent).join("/")}/load`;

/** Take a model into memory and write with it from then on. Until it is there the other one is used. */
export async function pickModel(id) {
  if (state.loading) return;
  state.loading = { id, since: performance.now() };
  faults.delete(id);
  changed("models");
  try {
    await api.post(pathOf(id));
    await connect(); // one that lay in memory may have made room
    state.model = id;
    remember(id);
  } catch (error) {
    if (!(error instanceof ApiFault)) throw error;
    faults.set(id, error.message);
    if (error.gone) connect();
  } finally {
    state.loading = null;
    changed("models");
  }
}

function remember(id) {
  const query = new URLSearchParams(location.search);
  if (id === state.models[0]?.id) query.delete("model");
  else query.set("model", id);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

const TRIES = 5; // seconds: the server may still be looking what there is

/** The model that the address names, if there is one of that name. */
export async function restoreModel() {
  const wanted = new URLSearchParams(location.search).get("model");
  if (!wanted || wanted === state.model) return;
  for (let tries = 0; tries < TRIES && !state.models.some(({ id }) => id === wanted); tries += 1) {
    await new Promise((done) => { setTimeout(done, 1000); });
    await connect();
  }
  if (state.models.some(({ id }) => id === wanted)) await pickModel(wanted);
}
