// A session's file is somebody else's text until it is checked: every value is looked at, and only
// what is known is taken over, into new objects. Whatever is wrong is said with its place in the file.

import { USUAL } from "./settings.js";
import { VERSION } from "./session.js";

const LARGEST_FILE = 64 * 1024 * 1024;
const FORBIDDEN = ["__proto__", "constructor", "prototype"];

class BadFile extends Error {}

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
  const session = clean(found, SESSION, "the file");
  connect(session);
  return session;
}

// -- a clean copy of what a schema names; everything else is left behind ------------------------------

const LEAVES = {
  text: ["a text", (value) => typeof value === "string"],
  flag: ["true or false", (value) => typeof value === "boolean"],
  number: ["a number", Number.isFinite],
  whole: ["a whole number", Number.isSafeInteger],
  count: ["a whole number of 0 or more", (value) => Number.isSafeInteger(value) && value >= 0],
};

function shown(value) {
  const text = JSON.stringify(value) ?? "nothing";
  return text.length > 40 ? `${text.slice(0, 40)}…` : text;
}

function refuse(value, at, wanted) {
  throw new BadFile(`The session cannot be read: ${at} is ${shown(value)}; it must be ${wanted}.`);
}

/** The name of a leaf (with ? if null will do), [of each], {name: schema}, a Set of values, or a function. */
function clean(value, schema, at) {
  if (typeof schema === "function") return schema(value, at);
  if (schema instanceof Set) {
    return schema.has(value) ? value : refuse(value, at, [...schema].map((each) => JSON.stringify(each)).join(" or "));
  }
  if (Array.isArray(schema)) {
    if (!Array.isArray(value)) refuse(value, at, "a list");
    return value.map((each, place) => clean(each, schema[0], `${at}[${place}]`));
  }
  if (typeof schema === "object") {
    plain(value, at);
    const under = (name) => (at === "the file" ? name : `${at}.${name}`);
    return Object.fromEntries(Object.entries(schema).map(([name, each]) => [name, clean(value[name], each, under(name))]));
  }
  if (schema.endsWith("?")) return value == null ? null : clean(value, schema.slice(0, -1), at);
  const [wanted, fits] = LEAVES[schema];
  return fits(value) ? value : refuse(value, at, wanted);
}

function plain(value, at) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) refuse(value, at, "an object");
  const bad = FORBIDDEN.find((name) => Object.hasOwn(value, name));
  if (bad) throw new BadFile(`The session cannot be read: ${at} has the key ${bad}, which no session has.`);
  return value;
}

const maybe = (schema) => (value, at) => (value == null ? null : clean(value, schema, at));

/** Any JSON, copied; it is only ever handed to the server, which looks at it once more. */
function json(value, at, depth = 0) {
  if (depth > 32) refuse("…", at, "less deeply nested");
  if (Array.isArray(value)) return value.map((each) => json(each, at, depth + 1));
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(Object.entries(plain(value, at)).map(([name, each]) => [name, json(each, at, depth + 1)]));
}

const MORE_SETTINGS = { seed: 0, max_tokens: 0, top: 0, trace: true };

/** Settings by name, each of the kind that its usual value has; those that nobody knows are left out. */
function settings(value, at) {
  const found = {};
  for (const [name, usual] of Object.entries({ ...USUAL, ...MORE_SETTINGS })) {
    if (!Object.hasOwn(plain(value, at), name)) continue;
    const leaf = { number: "number?", boolean: "flag?" }[typeof usual] ?? (Array.isArray(usual) ? maybe([json]) : json);
    found[name] = clean(value[name], leaf, `${at}.${name}`);
  }
  return found;
}

// -- what a session is -----------------------------------------------------------------------------

const STEP = {
  index: "count", position: "count", token: "count", piece: "text", text: "text", bytes: ["count"],
  logprob: "number?", rank: "count", entropy: "number?", probability: "number",
  draw: maybe({ u: "number", low: "number", high: "number" }),
  candidates: [{ token: "count", text: "text", logprob: "number?", probability: "number?" }],
  stages: [{
    name: "text", kept: "count", removed: "count", kept_mass: "number", changed: "count",
    top: [(value, at) => Object.values(clean({ ...value }, { 0: "count", 1: "number", 2: "text" }, at))],
  }],
  seconds: "number", finish_reason: "text?", draft: "text?", retracts: "count", chosen: "flag", thought: "flag?",
};
const PROMPT = {
  text: "text", tokens: [{ id: "count", text: "text", added: "flag" }],
  messages: maybe([{ role: new Set(["system", "developer", "user", "assistant", "tool"]), content: "text?" }]),
  spans: [{ role: "text", start: "count", end: "count", content: maybe(["count"]) }],
};
const SESSION = {
  unspool_session: new Set([VERSION]), saved: "text", model: { id: "text", system_fingerprint: "text?" }, current: "text?",
  view: {
    mode: new Set(["chat", "plain"]), tint: new Set(["probability", "entropy", "rank", "none"]), selected: "count?",
    panel: "text", draft: "text", system: "text?", settings,
  },
  branches: [{
    id: "text", name: "text?", parent: "text?", forked_at: "count?", created: "number", model: "text", prompt: maybe(PROMPT),
    seed: "whole", settings, finish_reason: "text?", runs: [{ from: "count", settings }], since: "count", steps: [STEP],
    retracted: [{ at: "count", steps: [STEP], verb: "text" }],
    added: ["count"], // steps that the template put there, in a later turn of a chat
  }],
};

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
