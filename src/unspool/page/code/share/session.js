// Sessions of all branches: packing, validation, replay on the server, and showing them on the page.

import { ensureSteps, jump, pushUndo, updateSettings } from "../actions.js";
import { api } from "../api.js";
import { expand } from "./file.js";
import { BadFile } from "./formats.js";
import { adopt, changed, currentModel, isTemplate, promptLength, samePrompt, sharedSteps, state } from "../state.js";
import { PANELS } from "../views.js";
import { loadParts, saveParts } from "../write/parts.js";

const STAGES = [
  "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram", "dry", "logit_bias",
  "top_n_sigma", "top_k", "typical_p", "eta", "top_p", "min_p", "xtc", "dynamic_temperature", "temperature",
];

/** The server's defaults. */
export const DEFAULTS = {
  temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, typical_p: 1, eta: 0, top_n_sigma: 0,
  xtc_probability: 0, xtc_threshold: 0.1, repetition_penalty: 1, frequency_penalty: 0, presence_penalty: 0,
  penalty_window: -1, penalize_prompt: true, no_repeat_ngram: 0, dry_multiplier: 0, dry_base: 1.75,
  dry_allowed_length: 2, dry_window: -1, dry_breakers: [], logit_bias: {}, dynatemp_range: 0,
  dynatemp_exponent: 1, mirostat_tau: 0, mirostat_eta: 0.1, stages: STAGES, stop: [], sample: 0, guard: null,
  regex: null, grammar: null, choice: null, json_schema: null, speculate: null, end: true, cache: true,
  think_budget: null, interventions: [],
};

const GRAMMARS = ["regex", "grammar", "choice", "json_schema"];
const isEqual = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** All settings that affect the text; null and missing ones are defaults. */
function completeSettings(settings) {
  const values = {};
  for (const name of Object.keys(DEFAULTS)) values[name] = settings[name] ?? DEFAULTS[name];
  if (values.mirostat_tau > 0) values.stages = null; // mirostat has its own stages
  return values;
}

/** Only settings that differ from the defaults. */
export function nonDefault(settings) {
  const values = completeSettings(settings);
  for (const name of Object.keys(values)) {
    if (values[name] === null || isEqual(values[name], DEFAULTS[name])) delete values[name];
  }
  return values;
}

const NEVER_NULL = new Set(["sample", "end", "cache", "stop"]);

/** Settings for a request that resets all earlier ones: null is the default. */
function asRequest(settings) {
  const values = completeSettings(settings);
  const grammar = GRAMMARS.find((name) => values[name] !== null) ?? GRAMMARS[0];
  for (const name of Object.keys(values)) {
    if (GRAMMARS.includes(name) && name !== grammar) delete values[name];
    else if (!NEVER_NULL.has(name) && isEqual(values[name], DEFAULTS[name])) values[name] = null;
  }
  return values;
}

/** Only the settings that change from `before` to `after`. */
export function changesBetween(before, after) {
  const [old, now] = [asRequest(before), asRequest(after)];
  return Object.fromEntries(Object.entries(now).filter(([name, value]) => !isEqual(value, old[name] ?? null)));
}

/** The settings of each run of a branch: `{from, settings, seed}`, the first from 0 on. */
export function runsOf(branch) {
  const validRuns = (branch.runs ?? []).filter((run) => run.from <= branch.steps.length);
  const runs = validRuns.map(({ from, settings }) => ({
    from,
    settings: { ...branch.settings, ...settings },
    seed: settings.seed ?? branch.seed,
  }));
  if (!runs.length || runs[0].from > 0) {
    runs.unshift({ from: 0, settings: branch.settings, seed: branch.seed });
  }
  return runs;
}

const runKey = (run) => JSON.stringify([completeSettings(run.settings), run.seed]);

/** Guards and mirostat have a state that starts with each run; without them the start does not matter. */
const startMatters = ({ guard, mirostat_tau }) => Boolean(guard || mirostat_tau);

/** What guards rewound. */
export const retractions = (branch) => (branch.retracted ?? []).filter(({ verb }) => verb === "retract");

/**
 * The branch from step `since` on as pieces: generated ones, each with the settings of a run, and chosen ones.
 * `reached`: the length that the text had before a guard rewound it, which a replay must allow too.
 */
export function piecesOf(branch, since = 0) {
  const runs = runsOf(branch);
  const pieces = [];
  let at = 0;
  branch.steps.forEach((step, index) => {
    while (at + 1 < runs.length && runs[at + 1].from <= index) at += 1;
    if (index < since) return;
    const run = runs[at];
    const last = pieces[pieces.length - 1];
    const kind = step.chosen ? "chosen" : "written";
    const goesOn = last && last.kind === kind && (kind === "chosen" || last.run === run
      || (!startMatters(run.settings) && runKey(last.run) === runKey(run)));
    if (goesOn) last.to = index + 1;
    else pieces.push({ kind, from: index, to: index + 1, reached: index + 1, run });
  });
  for (const piece of pieces) {
    const cuts = retractions(branch).filter((cut) => cut.at >= piece.from && cut.at < piece.to);
    // One more than was sent: a guard checks a token before it is sent.
    piece.reached = Math.max(piece.to, ...cuts.map((cut) => cut.at + cut.steps.length + 1));
  }
  return pieces;
}

// -- packing --------------------------------------------------------------------------------------

const VERSION = 2;

/** Load all of a branch that a file has: also the arrays of its interventions, which responses leave out. */
export async function loadBranch(id) {
  const branch = await ensureSteps(id);
  if (!branch || branch.recorded || !branch.settings.interventions?.length) return;
  const { data } = await api.get(`/v1/tree/${id}/interventions`);
  branch.settings = { ...branch.settings, interventions: data };
}

/** The contents of a session file. All branches must be loaded (`loadBranch`). */
export function packSession() {
  const model = currentModel();
  return {
    unspool_session: VERSION,
    saved: new Date().toISOString(),
    model: { id: state.model, system_fingerprint: model?.unspool.system_fingerprint ?? null },
    current: state.current,
    view: {
      mode: state.mode,
      tint: state.tint,
      selected: state.selected,
      panel: state.panel,
      draft: state.draft,
      system: state.system,
      settings: state.settings,
      parts: saveParts() ?? null,
    },
    branches: parentsFirst([...state.branches.values()]).map(packBranch),
  };
}

/** Parents before their children, else by creation time. */
function parentsFirst(branches) {
  const byId = new Map(branches.map((branch) => [branch.id, branch]));
  const ordered = new Set();
  const visit = (branch) => {
    if (ordered.has(branch)) return;
    const parent = byId.get(branch.parent);
    if (parent) visit(parent);
    ordered.add(branch);
  };
  [...branches].sort((a, b) => a.created - b.created).forEach(visit);
  return [...ordered];
}

function packBranch(branch) {
  const parent = state.branches.get(branch.parent);
  const since = numSharedSteps(branch, parent);
  return {
    id: branch.id,
    name: branch.name,
    parent: parent ? branch.parent : null,
    forked_at: parent ? branch.forked_at : null,
    created: branch.created,
    model: branch.model,
    prompt: samePrompt(branch, parent) ? null : branch.prompt, // null: the parent's
    seed: branch.seed,
    settings: branch.settings,
    finish_reason: branch.finish_reason,
    runs: branch.runs,
    since,
    steps: branch.steps.slice(since),
    retracted: branch.retracted,
    added: branch.steps.flatMap((_, at) => (isTemplate(branch, promptLength(branch) + at) ? [at] : [])),
  };
}

/** Number of steps that the parent has too, so that the file does not repeat them. */
function numSharedSteps(branch, parent) {
  const at = branch.forked_at ?? 0;
  if (!samePrompt(branch, parent) || parent.steps.length < at) return 0;
  return sharedSteps(parent.steps, branch.steps) >= at ? at : 0;
}

/** A file name with date and topic: unspool-2026-11-15-leaves.json */
export function fileName(branch, ending) {
  const day = new Date();
  const two = (number) => String(number).padStart(2, "0");
  const date = `${day.getFullYear()}-${two(day.getMonth() + 1)}-${two(day.getDate())}`;
  return ["unspool", date, topic(branch)].filter(Boolean).join("-") + `.${ending}`;
}

/** The first content word of the user's prompt. */
function topic(branch) {
  const question = branch?.prompt?.messages?.findLast((message) => message.role === "user")?.content;
  const words = String(question ?? branch?.prompt?.text ?? "").toLowerCase().match(/[a-z0-9]{4,24}/g) ?? [];
  const first = words.slice(0, 8).filter((word) => !SMALL_WORDS.has(word));
  return first[0] ?? words[0] ?? "";
}

const SMALL_WORDS = new Set(
  ("about after also been does from have into just more most over some that their them then there these "
    + "they this were what when where which while will with would write tell your").split(" "),
);

// -- validation: a file is untrusted; known values are copied into new objects, errors name the path -----

const FORBIDDEN = ["__proto__", "constructor", "prototype"];

/** Whether the text of a file is a session. */
export const isSession = (text) => text.slice(0, 200).includes('"unspool_session"');

/** Parse and validate the text of a session file; throws BadFile. */
export function parseSession(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new BadFile("Not a saved session: the file is not valid JSON, or it was truncated.");
  }
  checkObject(data, "the file");
  if (data.unspool_session !== VERSION) {
    throw new BadFile(
      `Unsupported session version ${quoteValue(data.unspool_session)}; this page reads version ${VERSION}.`,
    );
  }
  const session = validate(expand(data), SESSION, "the file");
  linkBranches(session);
  return session;
}

const LEAVES = {
  text: ["a string", (value) => typeof value === "string"],
  flag: ["true or false", (value) => typeof value === "boolean"],
  number: ["a number", Number.isFinite],
  whole: ["an integer", Number.isSafeInteger],
  count: ["an integer >= 0", (value) => Number.isSafeInteger(value) && value >= 0],
};

function quoteValue(value) {
  const text = JSON.stringify(value) ?? "nothing";
  return text.length > 40 ? `${text.slice(0, 40)}…` : text;
}

function rejectValue(value, at, expected) {
  throw new BadFile(`Invalid session file: ${at} must be ${expected}, got ${quoteValue(value)}.`);
}

/** Validate against a schema: a leaf name (with ? if optional), [item], {name: schema}, a Set of values, or a function. */
function validate(value, schema, at) {
  if (typeof schema === "function") return schema(value, at);
  if (schema instanceof Set) {
    return schema.has(value) ? value : rejectValue(value, at, [...schema].map((choice) => JSON.stringify(choice)).join(" or "));
  }
  if (Array.isArray(schema)) {
    if (!Array.isArray(value)) rejectValue(value, at, "an array");
    return value.map((item, place) => validate(item, schema[0], `${at}[${place}]`));
  }
  if (typeof schema === "object") {
    checkObject(value, at);
    const under = (name) => (at === "the file" ? name : `${at}.${name}`);
    return Object.fromEntries(Object.entries(schema).map(([name, field]) => [name, validate(value[name], field, under(name))]));
  }
  if (schema.endsWith("?")) return value == null ? null : validate(value, schema.slice(0, -1), at);
  const [expected, fits] = LEAVES[schema];
  return fits(value) ? value : rejectValue(value, at, expected);
}

function checkObject(value, at) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) rejectValue(value, at, "an object");
  const bad = FORBIDDEN.find((name) => Object.hasOwn(value, name));
  if (bad) throw new BadFile(`Invalid session file: ${at} has the forbidden key ${bad}.`);
  return value;
}

const optional = (schema) => (value, at) => (value == null ? null : validate(value, schema, at));

/** A copy of any JSON; it is only sent to the server, which validates it. */
function copyJson(value, at, depth = 0) {
  if (depth > 32) rejectValue("…", at, "less deeply nested");
  if (Array.isArray(value)) return value.map((item) => copyJson(item, at, depth + 1));
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(checkObject(value, at)).map(([name, item]) => [name, copyJson(item, at, depth + 1)]));
}

const OTHER_SETTINGS = { seed: 0, max_tokens: 0, top: 0, trace: true };

/** Known settings, each with the type of its default; unknown ones are left out. */
function settings(value, at) {
  const values = {};
  for (const [name, defaultValue] of Object.entries({ ...DEFAULTS, ...OTHER_SETTINGS })) {
    if (!Object.hasOwn(checkObject(value, at), name)) continue;
    const leaf = { number: "number?", boolean: "flag?" }[typeof defaultValue] ?? (Array.isArray(defaultValue) ? optional([copyJson]) : copyJson);
    values[name] = validate(value[name], leaf, `${at}.${name}`);
  }
  return values;
}

// -- schema of a session ---------------------------------------------------------------------------

const STEP = {
  index: "count", position: "count", token: "count", piece: "text", text: "text", bytes: ["count"],
  logprob: "number?", rank: "count", entropy: "number?", probability: "number",
  draw: optional({ u: "number", low: "number", high: "number" }),
  candidates: [{ token: "count", text: "text", logprob: "number?", probability: "number?" }],
  stages: [{
    name: "text", kept: "count", removed: "count", kept_mass: "number", changed: "count",
    top: [(value, at) => Object.values(validate({ ...value }, { 0: "count", 1: "number", 2: "text" }, at))],
  }],
  seconds: "number", finish_reason: "text?", draft: "text?", retracts: "count", chosen: "flag", thought: "flag?",
};
const PROMPT = {
  text: "text", tokens: [{ id: "count", text: "text", added: "flag" }],
  messages: optional([{ role: new Set(["system", "developer", "user", "assistant", "tool"]), content: "text?" }]),
  spans: [{ role: "text", start: "count", end: "count", content: optional(["count"]) }],
};
const SESSION = {
  unspool_session: new Set([VERSION]), saved: "text", model: { id: "text", system_fingerprint: "text?" }, current: "text?",
  view: {
    mode: new Set(["chat", "plain"]), tint: new Set(["probability", "entropy", "rank", "none"]), selected: "count?",
    panel: "text", draft: "text", system: "text?", settings, parts: optional(copyJson),
  },
  branches: [{
    id: "text", name: "text?", parent: "text?", forked_at: "count?", created: "number", model: "text", prompt: optional(PROMPT),
    seed: "whole", settings, finish_reason: "text?", runs: [{ from: "count", settings }], since: "count", steps: [STEP],
    retracted: [{ at: "count", steps: [STEP], verb: "text" }],
    added: ["count"], // steps that the template added in later turns of a chat
  }],
};

/** Give each branch all its steps, with those of its parent; inconsistent branches are rejected. */
function linkBranches(session) {
  const byId = new Map();
  for (const branch of session.branches) {
    const says = (what) => { throw new BadFile(`Invalid session file: branch ${quoteValue(branch.id)} ${what}.`); };
    if (byId.has(branch.id)) says("occurs twice");
    const parent = branch.parent === null ? null : byId.get(branch.parent);
    if (parent === undefined) says("has no parent before it");
    branch.prompt ??= parent?.prompt ?? says("has no prompt");
    const shared = parent ? branch.forked_at ?? 0 : 0;
    if (parent && shared > parent.steps.length) says("forks after the end of its parent");
    if (branch.since > 0 && branch.since !== shared) says("does not start where it forks");
    branch.steps = [...(parent && branch.since ? parent.steps.slice(0, branch.since) : []), ...branch.steps];
    const start = branch.prompt.tokens.length;
    branch.steps.forEach((step, index) => {
      if (step.index !== index || step.position !== start + index) says(`has no step ${index}`);
    });
    byId.set(branch.id, branch);
  }
  if (session.current !== null && !byId.has(session.current)) {
    throw new BadFile(`Invalid session file: the current branch ${quoteValue(session.current)} is missing.`);
  }
}

// -- replay: the server generates every branch again, and each token is compared -------------------------
//
// The random number of a step depends only on seed, sample and position, so pieces can be generated one after another.

/** Number of tokens that a replay generates or appends. */
export const workOf = (session) =>
  session.branches.reduce((sum, branch) => sum + branch.steps.length - inherited(branch, session), 0);

/** Number of steps that a branch inherits from its parent. */
function inherited(branch, session) {
  const parent = session.branches.find((candidate) => candidate.id === branch.parent);
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
 * Replay all branches; `progress(tokens)` is called on the way. Returns, in the file's order, `{branch, replayed,
 * differs}`: the branch of the file; the server's, or null; and null, or `{index, wrote}` of the first different step.
 * On an error or cancellation the new branches are deleted on the server.
 */
export async function replay(session, { signal, progress }) {
  const results = new Map();
  const createdIds = [];
  let done = 0;
  const ticked = (tokens) => progress(done += tokens);
  try {
    for (const branch of session.branches) {
      const result = await replayBranch(branch, session, results, { signal, ticked, createdIds, parts: session.view.parts });
      results.set(branch.id, result);
    }
    for (const result of results.values()) {
      if (result.id && !result.differs) result.replayed = await api.get(`/v1/tree/${result.id}`, { signal });
    }
  } catch (error) {
    deleteBranches(createdIds);
    throw error;
  }
  deleteBranches([...results.values()].filter(({ differs }) => differs).map(({ id }) => id).filter(Boolean));
  return [...results.values()];
}

/** Delete branches on the server that are not shown. */
function deleteBranches(ids) {
  for (const id of ids) api.delete(`/v1/tree/${id}`).catch(() => {});
}

async function replayBranch(branch, session, results, work) {
  const parent = results.get(branch.parent);
  const since = inherited(branch, session);
  if (parent?.differs && parent.differs.index < since) {
    return { branch, id: null, replayed: null, differs: parent.differs };
  }
  const created = parent?.id && (since > 0 || !branch.forked_at)
    ? await api.post(`/v1/tree/${parent.id}/fork`, { at: since, name: branch.name }, work)
    : await createBranch(branch, work);
  work.createdIds.push(created.id);
  const result = { branch, id: created.id, replayed: null, differs: null };
  for (const piece of piecesOf(branch, since)) {
    result.differs = piece.kind === "chosen"
      ? await appendChosen(created.id, branch, piece, work)
      : await rewriteStretch(created.id, branch, piece, work);
    if (result.differs) break;
  }
  return result;
}

async function createBranch(branch, { signal, parts }) {
  const ids = branch.prompt.tokens.map((token) => token.id);
  const [first] = piecesOf({ ...branch, steps: branch.steps.slice(0, 1) });
  const body = { model: branch.model, name: branch.name, ...replaySettings(branch, first?.run), ...parts };
  const { messages, text } = branch.prompt;
  const begin = messages ? { messages } : { prompt: text };
  const created = await api.post("/v1/tree", { ...body, ...begin }, { signal });
  const promptIds = created.prompt.tokens.map((token) => token.id);
  if (promptIds.length === ids.length && promptIds.every((id, place) => id === ids[place])) return created;
  // The text has other tokens now: use the recorded token ids.
  deleteBranches([created.id]);
  return api.post("/v1/tree", { ...body, prompt: ids }, { signal });
}

function replaySettings(branch, run) {
  const { top = 12 } = branch.settings;
  const settings = run?.settings ?? branch.settings;
  return { ...asRequest(settings), seed: run?.seed ?? branch.seed, top, trace: true };
}

/** Append tokens that the user had chosen. */
async function appendChosen(id, branch, { from, to }, { signal, ticked }) {
  const tokens = branch.steps.slice(from, to).map((step) => step.token);
  await api.post(`/v1/tree/${id}/append`, { tokens }, { signal });
  ticked(tokens.length);
  return null;
}

/** Generate a piece, as far as it had grown before a guard rewound it, and rewind to its end. */
async function rewriteStretch(id, branch, { from, to, reached, run }, { signal, ticked }) {
  const steps = [];
  const isGuarded = Boolean(run.settings.guard);
  let counted = from;
  for (;;) {
    const length = from + steps.length;
    const body = { ...replaySettings(branch, run), max_tokens: reached - length, stream: true };
    for await (const { event, data } of api.stream(`/v1/tree/${id}/resume`, body, { signal })) {
      if ("to" in data) steps.length = Math.max(0, data.to - from);
      // Steps before `from` may be sent again with their final text: the tokens are the same.
      if (event !== "step" || data.index < from) continue;
      steps[data.index - from] = data;
      const high = Math.min(to, from + steps.length);
      if (high > counted) ticked(high - counted);
      counted = Math.max(counted, high);
      if (!isGuarded && data.token !== branch.steps[data.index].token) break;
    }
    // The server may limit max_tokens: request the rest.
    const isCut = steps.at(-1)?.finish_reason === "length" && from + steps.length < reached;
    if (!isCut || from + steps.length <= length || isGuarded) break;
  }
  if (from + steps.length > to) await api.post(`/v1/tree/${id}/rewind`, { to }, { signal });
  const wrote = [...branch.steps.slice(0, from), ...steps];
  const index = firstDifference(wrote, branch.steps, from, to);
  return index === null ? null : { index, wrote: wrote[index]?.piece ?? null };
}

// -- showing a session: replayed branches, or recorded ones that can be played but not continued ---------

let recordings = 0;

/** Show the session; `results` of `replay`, or null: all branches as recorded. */
export async function showSession(session, results) {
  const before = state.current;
  const ids = new Map();
  for (const { branch, replayed } of results ?? session.branches.map((branch) => ({ branch, replayed: null }))) {
    const data = replayed ? { ...replayed, recorded: false } : recordedBranch(branch);
    const parent = ids.get(branch.parent) ?? null;
    const added = adopt({ ...data, parent, forked_at: parent === null ? null : branch.forked_at });
    Object.assign(added, { runs: branch.runs, retracted: branch.retracted, added: new Set(replayed?.turns ? [] : branch.added) });
    ids.set(branch.id, added.id);
  }
  const { mode, tint, draft, system, settings, selected, panel } = session.view;
  Object.assign(state, { mode, tint, draft, system, view: "write", settings: {} });
  if (PANELS.some(({ name }) => name === panel)) state.panel = panel;
  updateSettings(settings);
  loadParts(session.view.parts);
  changed("mode", "tint", "draft", "system", "panel", "view", "branches");
  const currentId = ids.get(session.current) ?? [...ids.values()].at(-1) ?? null;
  await jump(currentId, selected);
  pushUndo({ label: "load a session", before: { id: before, length: null }, after: { id: currentId, length: null, selected } });
}

/** A branch of the file in the form of a server response. */
function recordedBranch(branch) {
  recordings += 1;
  const { steps, since, ...fields } = branch;
  return {
    ...fields,
    id: `recorded-${recordings}-${Date.now().toString(36)}`,
    recorded: true,
    writing: false,
    length: steps.length,
    prompt_tokens: branch.prompt.tokens.length,
    preview: steps.slice(branch.forked_at ?? 0).map((step) => step.text).join("").slice(0, 80),
    text: steps.map((step) => step.text).join(""),
    logprob: steps.reduce((sum, step) => sum + (step.logprob ?? 0), 0),
    settings: { ...branch.settings, seed: branch.seed },
    notes: [], error: null, last: null,
    usage: {
      prompt_tokens: branch.prompt.tokens.length,
      completion_tokens: steps.length,
      first_token_seconds: steps[0]?.seconds ?? 0,
      total_seconds: steps.reduce((sum, step) => sum + step.seconds, 0),
      reused_tokens: 0,
      total_tokens: branch.prompt.tokens.length + steps.length,
    },
    since: 0,
    steps: [...steps],
  };
}
