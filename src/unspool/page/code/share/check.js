// A session's file is somebody else's text until it is checked: every value is looked at, and only
// what is known is taken over, into new objects. Whatever is wrong is said with its place in the file.

import { USUAL } from "./settings.js";
import { VERSION } from "./session.js";

export const LARGEST_FILE = 64 * 1024 * 1024;
const MOST = 0x7fffffff;
const FORBIDDEN = ["__proto__", "constructor", "prototype"];

export class BadFile extends Error {}

/** The session in a file that a person gave; throws BadFile, in words. */
export async function readSession(file) {
  if (file.size > LARGEST_FILE) {
    throw new BadFile(`The file has ${Math.ceil(file.size / 1048576)} MB; a session has at most 64 MB.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new BadFile("This is not a text file, so it cannot be a saved session.");
  }
  return checked(text);
}

export function checked(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new BadFile("This is not a saved session: the file is not JSON, or it was cut off.");
  }
  if (typeof found !== "object" || found === null || !Object.hasOwn(found, "unspool_session")) {
    throw new BadFile("This is JSON, but not a session that Unspool saved.");
  }
  if (found.unspool_session !== VERSION) {
    throw new BadFile(
      `The session has version ${shown(found.unspool_session)}; this page reads version ${VERSION}.`,
    );
  }
  const session = SESSION(found, "the file");
  connect(session);
  return session;
}

// -- readers: each takes a value and its place, and gives a clean copy -----------------------------

function shown(value) {
  const text = JSON.stringify(value) ?? "nothing";
  return text.length > 40 ? `${text.slice(0, 40)}…` : text;
}

function refuse(value, at, wanted) {
  throw new BadFile(`The session cannot be read: ${at} is ${shown(value)}; it must be ${wanted}.`);
}

const whole = (low = 0, high = MOST) => (value, at) =>
  Number.isSafeInteger(value) && value >= low && value <= high
    ? value : refuse(value, at, `a whole number from ${low} to ${high}`);

const number = (low, high = Infinity) => (value, at) =>
  Number.isFinite(value) && value >= low && value <= high
    ? value : refuse(value, at, high === Infinity ? `a number of ${low} or more` : `a number from ${low} to ${high}`);

const anyNumber = (value, at) => (Number.isFinite(value) ? value : refuse(value, at, "a number"));

const words = (most) => (value, at) =>
  typeof value === "string" && value.length <= most
    ? value : refuse(value, at, `a text of at most ${most.toLocaleString("en-US")} characters`);

const yes = (value, at) => (typeof value === "boolean" ? value : refuse(value, at, "true or false"));

const one = (...known) => (value, at) =>
  known.includes(value) ? value : refuse(value, at, known.map((each) => JSON.stringify(each)).join(" or "));

const maybe = (read) => (value, at) => (value === null || value === undefined ? null : read(value, at));

const list = (read, most) => (value, at) =>
  Array.isArray(value) && value.length <= most
    ? value.map((each, number_) => read(each, `${at}[${number_}]`))
    : refuse(value, at, `a list of at most ${most.toLocaleString("en-US")}`);

function plain(value, at) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) refuse(value, at, "an object");
  const bad = FORBIDDEN.find((name) => Object.hasOwn(value, name));
  if (bad) throw new BadFile(`The session cannot be read: ${at} has the key ${bad}, which no session has.`);
  return value;
}

const shape = (fields) => (value, at) => {
  plain(value, at);
  const found = {};
  for (const [name, read] of Object.entries(fields)) {
    found[name] = read(Object.hasOwn(value, name) ? value[name] : undefined, place(at, name));
  }
  return found;
};

const place = (at, name) => (at === "the file" ? name : `${at}.${name}`);

/** Numbers under the ids of tokens. */
function biases(value, at) {
  const found = {};
  for (const [token, amount] of Object.entries(plain(value, at))) {
    if (!/^\d{1,9}$/.test(token)) refuse(token, `a key of ${at}`, "the id of a token");
    found[token] = number(-100, 100)(amount, `${at}.${token}`);
  }
  return found;
}

/** Any JSON, copied; a schema is only ever handed to the server. */
function json(value, at, depth = 0) {
  if (depth > 32) refuse("…", at, "less deeply nested");
  if (Array.isArray(value)) return value.map((each) => json(each, at, depth + 1));
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(
    Object.entries(plain(value, at)).map(([name, each]) => [name, json(each, at, depth + 1)]),
  );
}

// -- what a session is -----------------------------------------------------------------------------

const TOKEN = whole();
const TEXT = words(4_000_000);
const PIECE = words(4096);
const ID = words(80);
const COUNT = 1_000_000;

const SPECIAL = {
  top_k: whole(-MOST), penalty_window: whole(-MOST), no_repeat_ngram: whole(-MOST), dry_allowed_length: whole(-MOST),
  dry_window: whole(-MOST), penalize_prompt: yes, end: yes, cache: yes, sample: whole(), logit_bias: biases,
  stages: list(words(60), 40), stop: list(words(1000), 64), dry_breakers: list(list(TOKEN, 32), 64),
  guard: (value, at) => (Array.isArray(value) ? list(words(2000), 16) : words(2000))(value, at),
  regex: TEXT, grammar: TEXT, choice: list(TEXT, 1000), json_schema: json, speculate: one("lookup"),
};

/** Settings by name; those that nobody knows are left out. */
function settings(value, at) {
  plain(value, at);
  const found = {};
  const known = { ...Object.fromEntries(Object.keys(USUAL).map((name) => [name, anyNumber])), ...SPECIAL };
  known.seed = whole(-Number.MAX_SAFE_INTEGER, Number.MAX_SAFE_INTEGER);
  known.max_tokens = whole(1);
  known.top = whole(0, 100);
  known.trace = yes;
  for (const [name, read] of Object.entries(known)) {
    if (Object.hasOwn(value, name)) found[name] = maybe(read)(value[name], place(at, name));
  }
  return found;
}

const STEP = shape({
  index: whole(), position: whole(), token: TOKEN, piece: PIECE, text: PIECE, bytes: list(whole(0, 255), 4096),
  logprob: maybe(number(-1e9, 1e-3)), rank: whole(), entropy: maybe(number(-1e-3)), probability: number(0, 1.001),
  draw: maybe(shape({ u: number(0, 1), low: number(-1e-3, 1.001), high: number(-1e-3, 1.001) })),
  candidates: list(shape({
    token: TOKEN, text: PIECE, logprob: maybe(number(-1e9, 1e-3)), probability: maybe(number(0, 1.001)),
  }), 100),
  stages: list(shape({
    name: words(60), kept: whole(), removed: whole(), kept_mass: number(0, 1.001), changed: whole(),
    top: list((value, at) => {
      if (!Array.isArray(value) || value.length !== 3) refuse(value, at, "an id, a probability and a text");
      return [TOKEN(value[0], at), number(0, 1.001)(value[1], at), PIECE(value[2], at)];
    }, 100),
  }), 40),
  seconds: number(0), finish_reason: maybe(words(40)), draft: maybe(one("accepted", "rejected")),
  retracts: whole(), chosen: yes,
});

const MESSAGE = shape({
  role: one("system", "developer", "user", "assistant", "tool"), content: maybe(TEXT),
});

const PROMPT = shape({
  text: TEXT,
  tokens: list(shape({ id: TOKEN, text: PIECE, added: yes }), COUNT),
  messages: maybe(list(MESSAGE, 10_000)),
  spans: list(shape({
    role: words(40), start: whole(), end: whole(), content: maybe(list(whole(), 2)),
  }), 10_000),
});

const BRANCH = shape({
  id: ID, name: maybe(words(200)), parent: maybe(ID), forked_at: maybe(whole()), created: number(0), model: words(400),
  prompt: maybe(PROMPT), seed: whole(-Number.MAX_SAFE_INTEGER, Number.MAX_SAFE_INTEGER), settings, finish_reason: maybe(words(40)),
  runs: list(shape({ from: whole(), settings }), COUNT), since: whole(), steps: list(STEP, COUNT),
  retracted: list(shape({ at: whole(), steps: list(STEP, COUNT), verb: words(40) }), COUNT),
  added: list(whole(), COUNT), // steps that the template put there, in a later turn of a chat
});

const SESSION = shape({
  unspool_session: one(VERSION), saved: words(40),
  model: shape({ id: words(400), system_fingerprint: maybe(words(100)) }),
  current: maybe(ID),
  view: shape({
    mode: one("chat", "plain"), tint: one("probability", "entropy", "rank", "none"), selected: maybe(whole()),
    panel: words(40), draft: TEXT, system: maybe(TEXT), settings,
  }),
  branches: list(BRANCH, 1000),
});

// -- whether the parts fit together ----------------------------------------------------------------

/** Each branch gets all its steps, its parent's first; forks that lead nowhere are refused. */
function connect(session) {
  const known = new Map();
  for (const branch of session.branches) {
    const says = (what) => { throw new BadFile(`The session cannot be read: branch ${shown(branch.id)} ${what}.`); };
    if (known.has(branch.id)) says("is there twice");
    const parent = branch.parent === null ? null : known.get(branch.parent);
    if (parent === undefined) says("comes before its parent, or has none");
    branch.prompt ??= parent?.prompt ?? says("has no prompt");
    const shared = parent ? branch.forked_at ?? 0 : 0;
    if (parent && shared > parent.steps.length) says("leaves its parent behind the parent's end");
    if (branch.since > 0 && branch.since !== shared) says("does not begin where it leaves its parent");
    branch.steps = [...(parent && branch.since ? parent.steps.slice(0, branch.since) : []), ...branch.steps];
    const start = branch.prompt.tokens.length;
    branch.steps.forEach((step, index) => {
      if (step.index !== index || step.position !== start + index) says(`has no step ${index} where it should be`);
    });
    known.set(branch.id, branch);
  }
  if (session.current !== null && !known.has(session.current)) {
    throw new BadFile(`The session cannot be read: the current branch, ${shown(session.current)}, is not in it.`);
  }
}
