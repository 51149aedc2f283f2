// A session comes to life again: the server writes every branch anew, and each token is compared.
//
// Draws depend only on seed, sample and position, so stretches can be written one after another and
// give what was written at once. What a guard took back is written and taken back again.

import { api } from "../api.js";
import { asRequest, piecesOf } from "./settings.js";

/** Tokens that a replay has to write or to put. */
export const workOf = (session) =>
  session.branches.reduce((sum, branch) => sum + branch.steps.length - inherited(branch, session), 0);

/** Steps that a branch has from its parent, which need not be written twice. */
function inherited(branch, session) {
  const parent = session.branches.find((each) => each.id === branch.parent);
  if (!parent) return 0;
  const at = branch.forked_at ?? 0;
  return firstDifference(parent.steps, branch.steps, 0, at) === null ? at : 0;
}

function firstDifference(some, others, from, to) {
  for (let index = from; index < to; index += 1) {
    if (some[index]?.token !== others[index]?.token) return index;
  }
  return null;
}

/**
 * Replay all branches. `progress(tokens)` is called as they come. Gives, in the file's order,
 * `{branch, told, differs}`: the branch of the file; the server's, or null where it could not be made;
 * null, or `{index, wrote}`: the first step that is not the same. Throws what the server refuses; then,
 * and when it is cancelled, what was made on the server is deleted again.
 */
export async function replay(session, { signal, progress }) {
  const results = new Map();
  const made = [];
  let done = 0;
  const ticked = (tokens) => progress(done += tokens);
  try {
    for (const branch of session.branches) {
      const result = await replayed(branch, session, results, { signal, ticked, made });
      results.set(branch.id, result);
    }
    for (const result of results.values()) {
      if (result.id && !result.differs) result.told = await api.get(`/v1/tree/${result.id}`, { signal });
    }
  } catch (error) {
    forget(made);
    throw error;
  }
  forget([...results.values()].filter(({ differs }) => differs).map(({ id }) => id).filter(Boolean));
  return [...results.values()];
}

/** Nothing that nobody will see stays on the server. */
function forget(ids) {
  for (const id of ids) api.delete(`/v1/tree/${id}`).catch(() => {});
}

async function replayed(branch, session, results, work) {
  const parent = results.get(branch.parent);
  const since = inherited(branch, session);
  if (parent?.differs && parent.differs.index < since) {
    return { branch, id: null, told: null, differs: parent.differs };
  }
  const begun = parent?.id && (since > 0 || !branch.forked_at)
    ? await api.post(`/v1/tree/${parent.id}/fork`, { at: since, name: branch.name }, work)
    : await created(branch, work);
  work.made.push(begun.id);
  const result = { branch, id: begun.id, told: null, differs: null };
  for (const piece of piecesOf(branch, since)) {
    result.differs = piece.kind === "chosen"
      ? await put(begun.id, branch, piece, work)
      : await written(begun.id, branch, piece, work);
    if (result.differs) break;
  }
  return result;
}

async function created(branch, { signal }) {
  const ids = branch.prompt.tokens.map((token) => token.id);
  const [first] = piecesOf({ ...branch, steps: branch.steps.slice(0, 1) });
  const body = { model: branch.model, name: branch.name, ...settingsOf(branch, first?.run) };
  const { messages, text } = branch.prompt;
  const begin = messages ? { messages } : { prompt: text };
  const told = await api.post("/v1/tree", { ...body, ...begin }, { signal });
  const got = told.prompt.tokens.map((token) => token.id);
  if (got.length === ids.length && got.every((id, place) => id === ids[place])) return told;
  // Words read into other tokens than then; the tokens themselves are what counts.
  forget([told.id]);
  return api.post("/v1/tree", { ...body, prompt: ids }, { signal });
}

function settingsOf(branch, run) {
  const { top = 12 } = branch.settings;
  const settings = run?.settings ?? branch.settings;
  return { ...asRequest(settings), seed: run?.seed ?? branch.seed, top, trace: true };
}

/** Words that a person put there. */
async function put(id, branch, { from, to }, { signal, ticked }) {
  const tokens = branch.steps.slice(from, to).map((step) => step.token);
  await api.post(`/v1/tree/${id}/append`, { tokens }, { signal });
  ticked(tokens.length);
  return null;
}

/** Let the server write; as far as a guard let the text grow, and then back to where it was left. */
async function written(id, branch, { from, to, reached, run }, { signal, ticked }) {
  const steps = [];
  const isGuarded = Boolean(run.settings.guard);
  let counted = from;
  for (;;) {
    const length = from + steps.length;
    const body = { ...settingsOf(branch, run), max_tokens: reached - length, stream: true };
    for await (const { event, data } of api.stream(`/v1/tree/${id}/resume`, body, { signal })) {
      if ("to" in data) steps.length = Math.max(0, data.to - from);
      // Text that was shown because it ended is told again when it goes on: the tokens are the same.
      if (event !== "step" || data.index < from) continue;
      steps[data.index - from] = data;
      const high = Math.min(to, from + steps.length);
      if (high > counted) ticked(high - counted);
      counted = Math.max(counted, high);
      if (!isGuarded && data.token !== branch.steps[data.index].token) break;
    }
    // A server may give fewer tokens at once than it is asked for.
    const isCut = steps.at(-1)?.finish_reason === "length" && from + steps.length < reached;
    if (!isCut || from + steps.length <= length || isGuarded) break;
  }
  if (from + steps.length > to) await api.post(`/v1/tree/${id}/rewind`, { to }, { signal });
  const wrote = [...branch.steps.slice(0, from), ...steps];
  const index = firstDifference(wrote, branch.steps, from, to);
  return index === null ? null : { index, wrote: wrote[index]?.piece ?? null };
}
