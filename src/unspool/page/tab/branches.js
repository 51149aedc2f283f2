// Branches in the browser tab and their JSON: what server/tree/branches.py and branch_json.py are on the server.

import { incompleteUtf8, readable, TextStream } from "./text.js";

const PREVIEW = 80; // characters
const TITLE = 60;
export const DEFAULT_TOKENS = 256; // most tokens of one resume

export class RequestError extends Error {
  constructor(status, message, { param = null, code = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code });
  }

  body() {
    const type = this.status < 500 ? "invalid_request_error" : "server_error";
    return { error: { message: this.message, type, param: this.param, code: this.code } };
  }
}

export const badRequest = (message, param = null, code = null) => new RequestError(400, message, { param, code });

const randomHex = (bytes) => [...crypto.getRandomValues(new Uint8Array(bytes))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
export const newId = (kind) => `${kind}-${randomHex(12)}`;
export const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];
export const now = () => Date.now() / 1000;
const rounded = (digits, value) => Math.round(value * 10 ** digits) / 10 ** digits;

// -- settings ---------------------------------------------------------------------------------------

const STAGES = [
  "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram", "dry", "logit_bias", "top_n_sigma",
  "top_k", "typical_p", "eta", "top_p", "min_p", "xtc", "dynamic_temperature", "temperature",
];

/** All settings of a branch with the server's defaults. What is not in TAB_SETTINGS must keep its default here. */
const DEFAULTS = {
  temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, typical_p: 1, eta: 0, top_n_sigma: 0, xtc_probability: 0,
  xtc_threshold: 0.1, repetition_penalty: 1, frequency_penalty: 0, presence_penalty: 0, penalty_window: -1,
  penalize_prompt: true, no_repeat_ngram: 0, dry_multiplier: 0, dry_base: 1.75, dry_allowed_length: 2, dry_window: -1,
  dry_breakers: [], logit_bias: {}, dynatemp_range: 0, dynatemp_exponent: 1, mirostat_tau: 0, mirostat_eta: 0.1,
  stages: STAGES, stop: [], sample: 0, top: 5, trace: true, priority: 0, interventions: [], guard: null, regex: null,
  grammar: null, choice: null, json_schema: null, speculate: null, end: true, cache: true, think_budget: null,
};
const SAMPLING = [
  "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
  "penalty_window", "penalize_prompt",
];
const TAB_SETTINGS = new Set([...SAMPLING, "stop", "sample", "top", "trace", "end", "cache", "seed"]);
const LIMITS = {
  temperature: [0, Infinity], top_p: [0, 1], min_p: [0, 1], repetition_penalty: [1e-9, Infinity],
  frequency_penalty: [-Infinity, Infinity], presence_penalty: [-Infinity, Infinity],
};
const INTEGERS = { top_k: 0, penalty_window: -1, sample: 0, top: 0 }; // and the smallest value
const PARTS = ["memory", "author_note", "lorebook"];

function checkSetting(name, value) {
  const refuse = (allowed) => { throw badRequest(`${name} must be ${allowed}, got ${JSON.stringify(value)}`, name); };
  if (name in LIMITS) {
    const [low, high] = LIMITS[name];
    if (typeof value !== "number" || !Number.isFinite(value) || value < low || value > high) refuse(`a number from ${low} to ${high}`);
  } else if (name in INTEGERS) {
    if (!Number.isSafeInteger(value) || value < INTEGERS[name]) refuse(`an integer >= ${INTEGERS[name]}`);
  } else if (name === "seed") {
    if (!Number.isSafeInteger(value)) refuse("an integer");
  } else if (name === "stop") {
    if (!value.every((item) => typeof item === "string" && item)) refuse("a text or a list of texts");
  } else if (typeof value !== "boolean") refuse("true or false");
}

/** The settings of a branch after a request; null resets one. */
export function mergeSettings(before, body) {
  const values = { ...DEFAULTS, ...before };
  for (const [name, value] of Object.entries(body)) {
    if (PARTS.includes(name)) {
      if (value) throw badRequest(`${name} needs a server: it is not available in the browser tab`, name, "needs_server");
      continue;
    }
    if (!(name in DEFAULTS) && name !== "seed") continue;
    if (value === null) {
      if (name === "seed") values.seed = randomSeed();
      else values[name] = DEFAULTS[name];
      continue;
    }
    const setting = name === "stop" ? [value].flat() : value;
    if (!TAB_SETTINGS.has(name)) {
      if (JSON.stringify(setting) === JSON.stringify(DEFAULTS[name])) continue;
      throw badRequest(`${name} needs a server: it is not available in the browser tab`, name, "needs_server");
    }
    checkSetting(name, setting);
    values[name] = setting;
  }
  values.seed ??= randomSeed();
  return values;
}

/** What the engine's sampler reads. */
export const samplingOf = (settings) => Object.fromEntries([...SAMPLING, "seed"].map((name) => [name, settings[name]]));

// -- a branch ---------------------------------------------------------------------------------------

/**
 * A branch: a prompt and steps, which are JSON as in replies. Steps are never changed, only replaced: forks share them.
 * Everything but `writing` is plain data, which the browser's storage keeps.
 */
export function newBranch(fields) {
  const created = now();
  return {
    id: newId("branch"), name: null, origin: null, origin_at: null, session: null, bookmarks: [], created, updated: created,
    finish_reason: null, error: null, last: null, deleted: null, max_tokens: null, steps: [], writing: null, ...fields,
  };
}

export function forkBranch(branch, steps, at, name = null) {
  const { model, prompt, settings, max_tokens, session } = branch;
  return newBranch({ model, prompt, settings, max_tokens, session, name, steps, origin: branch.id, origin_at: at });
}

export const tokensOf = (branch, length = branch.steps.length) => [
  ...branch.prompt.ids, ...branch.steps.slice(0, length).map(({ token }) => token)];

/** An index of a step; negative ones count from the end, null is the end. */
export function stepIndex(branch, at, name) {
  const { length } = branch.steps;
  if (at === null || at === undefined) return length;
  if (!Number.isSafeInteger(at) || at < -length || at > length) {
    throw badRequest(`${name} must be within the ${length} steps of the branch, got ${at}`, name);
  }
  return at >= 0 ? at : length + at;
}

/** The first steps, as a text that can be resumed. */
export const rewound = (branch, length) => branch.steps.slice(0, length).map(
  (step) => (step.finish_reason === null ? step : { ...step, finish_reason: null }));

/** Replace the text of a branch. */
export function setSteps(branch, steps, reason = null) {
  Object.assign(branch, { steps, finish_reason: reason, error: null, updated: now() });
}

// -- tokens as text -----------------------------------------------------------------------------------

/** The bytes of a token in a generated text: control tokens have none. */
export const textBytes = (engine, token) => (engine.isSpecial(token) ? new Uint8Array() : engine.bytes(token));

/** The bytes of a token in a prompt: those of a control token are its name. */
export const promptBytes = (engine, token) => (
  engine.isSpecial(token) ? new TextEncoder().encode(engine.text(token)) : engine.bytes(token));

export const readableToken = (engine, token, partial = []) => readable(promptBytes(engine, token), partial);

/** The incomplete character at the end of a text. */
export function partialOf(engine, tokens) {
  return incompleteUtf8(tokens.slice(-4).flatMap((token) => [...textBytes(engine, token)]));
}

/** The steps with their texts decoded again with these stop strings; steps that stay the same are the same objects. */
export function redecode(engine, steps, stops = [], isComplete = true) {
  const stream = new TextStream(stops);
  const decoded = steps.map((step) => {
    const { partial } = stream;
    return [partial, stream.push(step.bytes)];
  });
  if (isComplete && decoded.length) decoded.at(-1)[1] += stream.finish();
  return { stream, steps: steps.map((step, at) => {
    const [partial, text] = decoded[at];
    const piece = readableToken(engine, step.token, partial);
    return step.text === text && step.piece === piece ? step : { ...step, text, piece };
  }) };
}

/** A step of a token that a person chose; `score`: `{logprob, rank, entropy}`, or null: not scored. */
export const chosenStep = (engine, token, position, index, score) => ({
  index, position, token, piece: "", text: "", bytes: [...textBytes(engine, token)],
  logprob: score?.logprob ?? null, rank: score?.rank ?? null, entropy: score?.entropy ?? null,
  probability: score ? 1 : null, draw: null, candidates: [], stages: [], seconds: 0, finish_reason: null, draft: null,
  retracts: 0, chosen: true,
});

// -- JSON ---------------------------------------------------------------------------------------------

const firstChars = (text, count) => Array.from(text.slice(0, 2 * count)).slice(0, count).join("");

export function titleOf(branch) {
  const { messages, text } = branch.prompt;
  const question = messages?.find(({ role }) => role === "user");
  const words = firstChars(question ? String(question.content ?? "") : text, 10 * TITLE).split(/\s+/).filter(Boolean).join(" ");
  if (words.length <= TITLE) return words;
  const cut = words.slice(0, TITLE - 1);
  return `${cut.slice(0, Math.max(0, cut.lastIndexOf(" ")))}…`;
}

const previewOf = ({ steps, origin_at: at }) => firstChars(
  steps.slice(at ?? 0, (at ?? 0) + PREVIEW).map(({ text, piece }) => (text.includes("\ufffd") ? piece : text)).join(""), PREVIEW);

/** The nearest branch it was forked from that is not deleted, and the steps that both share: `{parent, forked_at}`. */
function parentOf(branch, branches) {
  let [id, at] = [branch.origin, branch.origin_at];
  for (let origin = branches.get(id); id !== null && (!origin || origin.deleted !== null); origin = branches.get(id)) {
    if (!origin) return { parent: null, forked_at: null };
    at = origin.origin_at !== null && at !== null ? Math.min(origin.origin_at, at) : origin.origin_at;
    id = origin.origin;
  }
  return { parent: id, forked_at: at };
}

/** A branch in a list. */
export const summary = (branch, branches) => ({
  id: branch.id, object: "tree.branch", model: branch.model, name: branch.name, ...parentOf(branch, branches),
  session: branch.session, bookmarks: branch.bookmarks, created: rounded(6, branch.created), updated: rounded(3, branch.updated),
  length: branch.steps.length, prompt_tokens: branch.prompt.ids.length, preview: previewOf(branch),
  finish_reason: branch.finish_reason, writing: branch.writing !== null,
});

const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);

/** A branch without its prompt and steps. */
export function branchJson(branch, branches) {
  const { steps, settings, prompt } = branch;
  const { seed, ...others } = settings;
  const isScored = steps.every(({ logprob }) => logprob !== null);
  return {
    ...summary(branch, branches),
    text: steps.map(({ text }) => text).join(""),
    logprob: isScored ? sumOf(steps.map(({ logprob }) => logprob)) : null,
    seed,
    settings: { ...others, seed, max_tokens: branch.max_tokens ?? DEFAULT_TOKENS },
    usage: {
      prompt_tokens: prompt.ids.length, completion_tokens: steps.length, first_token_seconds: steps[0]?.seconds ?? 0,
      total_seconds: sumOf(steps.map(({ seconds }) => seconds)), reused_tokens: branch.last?.reused_tokens ?? 0,
      reasoning_tokens: 0, reasoning_seconds: 0, total_tokens: prompt.ids.length + steps.length,
    },
    last: branch.last,
    notes: [],
    error: branch.error,
  };
}

/** The current branch with its steps from `since` on (null: without), its turns and, if asked for, its prompt. */
export function reply(branch, branches, engine, since, { prompt = false } = {}) {
  const json = branchJson(branch, branches);
  if (prompt) json.prompt = promptJson(branch.prompt, engine);
  if (since !== null) {
    json.since = since;
    json.steps = branch.steps.slice(since);
    if (branch.prompt.messages !== null) json.turns = findTurns(branch.steps);
  }
  return json;
}

function promptJson({ ids, added, text, messages, spans }, engine) {
  const stream = new TextStream();
  const isAdded = new Set(added);
  const tokens = ids.map((id, place) => {
    const bytes = promptBytes(engine, id);
    const piece = readable(bytes, stream.partial);
    return { id, piece, text: stream.push(bytes), added: isAdded.has(place) };
  });
  return { text, tokens, messages, spans };
}

// -- the messages of a chat that were appended after answers, as indices of steps -------------------------

const HEAD = /^<\|im_start\|>(user|system|tool)\n$/;

/**
 * Frames of ChatML, the one format of chats here: `<|im_start|>role\n`, the words, `<|im_end|>\n`, and the start of the
 * next answer.
 */
export function findTurns(steps) {
  const turns = [];
  const isControl = (at, name) => steps[at] && steps[at].bytes.length === 0 && steps[at].piece === name;
  for (let at = 0; at < steps.length; at += 1) {
    if (!isControl(at, "<|im_start|>") || !steps[at].chosen) continue;
    let begin = at;
    let head = "";
    while (begin < steps.length && !head.includes("\n")) head += steps[begin++].piece;
    const [, role] = HEAD.exec(head) ?? [];
    if (!role) continue;
    let end = begin;
    while (end < steps.length && !isControl(end, "<|im_end|>")) end += 1;
    let last = end + 1; // after the words: a line break, and the start of the answer
    let tail = "";
    while (last < steps.length && tail.length < "\n<|im_start|>assistant\n".length) tail += steps[last++].piece;
    if (tail !== "\n<|im_start|>assistant\n") return turns;
    let first = at;
    if (steps[first - 1]?.piece === "\n") first -= 1;
    if (isControl(first - 1, "<|im_end|>")) first -= 1;
    turns.push({ role, start: first, end: last, content: [begin, end] });
    at = last - 1;
  }
  return turns;
}
