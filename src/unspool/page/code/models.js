// Which model is in use, and notes about it. The dialog that loads another is in model_dialog.js.

import { connect, rewritePrompt } from "./actions.js";
import { api, ApiError } from "./api.js";
import { html, useChanges } from "./lib.js";
import { changed, currentBranch, currentModel, state } from "./state.js";

/** The name without the owner of the repository. */
export const shortName = (id) => id?.split("/").at(-1) ?? "";

export const loadErrors = new Map(); // model id -> message

const loadPath = (id) => `/v1/models/${id.split("/").map(encodeURIComponent).join("/")}/load`;

/** Load a model and use it from then on; until then the current one stays in use. */
export async function pickModel(id) {
  if (state.loading) return;
  state.loading = { id, since: performance.now() };
  loadErrors.delete(id);
  changed("models");
  try {
    await api.post(loadPath(id));
    await connect(); // another model may have been unloaded
    state.model = id;
    rememberModel(id);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    loadErrors.set(id, error.message);
    if (error.isOffline) connect();
  } finally {
    state.loading = null;
    changed("models");
  }
}

function rememberModel(id) {
  const query = new URLSearchParams(location.search);
  if (id === state.models[0]?.id) query.delete("model");
  else query.set("model", id);
  history.replaceState(history.state, "", query.size ? `?${query}` : location.pathname);
}

const MAX_TRIES = 5; // one a second: the server may still be scanning for models

let missing = null; // the model that the address names and the server does not have

/** Load the model that the address names, if there is one. */
export async function restoreModel() {
  const requested = new URLSearchParams(location.search).get("model");
  if (!requested || requested === state.model) return;
  for (let tries = 0; tries < MAX_TRIES && !state.models.some(({ id }) => id === requested); tries += 1) {
    missing = requested;
    changed("models");
    await new Promise((done) => { setTimeout(done, 1000); });
    await connect();
  }
  const exists = state.models.some(({ id }) => id === requested);
  missing = exists ? null : requested;
  if (exists) await pickModel(requested);
  changed("models");
}

/** Shown when the address names a model that the server does not have. */
export function ModelNotice() {
  useChanges("models");
  if (!missing) return null;
  const close = () => {
    missing = null;
    rememberModel(state.model);
    changed("models");
  };
  return html`<div class="notice row" role="alert" id="no-model"><span class="grow">The address names a
    model that this server does not have: <b>${missing}</b>. ${shortName(state.model)} is in use.</span>
    <button class="button tiny" type="button" onClick=${close}>Close</button></div>`;
}

/** A note that the default model is tiny, while it is in use. */
export function DefaultModelNote() {
  useChanges("models");
  if (!currentModel()?.unspool?.default) return null;
  return html`<p class="tiny-note">This is a tiny demo model: fast, and often wrong. For a larger one click
    its name at the top, or start the page with <code>unspool page -m qwen3-0.6b</code>.</p>`;
}

/** Shown when another model than the one in use wrote the text. */
export function OtherModelNote() {
  useChanges("models", "current", "writing");
  const branch = currentBranch();
  if (!branch?.model || !state.model || branch.model === state.model || branch.recorded) return null;
  return html`<p class="notice other-model row" role="status"><span class="grow">${shortName(branch.model)} wrote this text and
    continues it. New texts use <b>${shortName(state.model)}</b>.</span>
    <button class="button tiny" type="button" disabled=${state.writing !== null || !branch.prompt}
      onClick=${rewritePrompt}>Rewrite with this model</button></p>`;
}
