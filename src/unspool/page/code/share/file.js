// Files: Unspool's own, compact and compressed, and the text of any other.
//
// In memory a session has an object for each step. In the file a branch has columns: one array for each field of its steps,
// tokens as places in a common vocabulary, numbers with six digits or four, and only values that differ from the usual one. All of
// it is gzip-compressed JSON, which `gzip -d` makes readable.

import { BadFile } from "./formats.js";

const LARGEST_FILE = 64 * 1024 * 1024;
const LARGEST_TEXT = 256 * 1024 * 1024; // decompressed
const MAX_STEPS = 200_000; // of a branch

/** The text of a file, decompressed if it is gzip. Throws BadFile. */
export async function readText(file) {
  if (file.size > LARGEST_FILE) {
    throw new BadFile(`The file is too large: ${Math.ceil(file.size / 1048576)} MB, at most 64 MB.`);
  }
  const head = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  const bytes = head[0] === 0x1f && head[1] === 0x8b ? await gunzip(file) : await file.arrayBuffer();
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new BadFile("The file is not UTF-8 text.");
  }
}

async function gunzip(file) {
  const reader = file.stream().pipeThrough(new DecompressionStream("gzip")).getReader();
  const parts = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read().catch(() => {
      throw new BadFile("The file is damaged or was truncated: it cannot be decompressed.");
    });
    if (done) return new Blob(parts).arrayBuffer();
    size += value.length;
    if (size > LARGEST_TEXT) {
      reader.cancel();
      throw new BadFile("The file is too large: more than 256 MB after decompression.");
    }
    parts.push(value);
  }
}

/** A session as a compressed file. */
export async function packFile(session) {
  const text = JSON.stringify(compact(session));
  return new Response(new Blob([text]).stream().pipeThrough(new CompressionStream("gzip"))).blob();
}

// -- columns ---------------------------------------------------------------------------------------

const rounded = (digits) => (value) => (typeof value === "number" && !Number.isInteger(value) ? Number(value.toPrecision(digits)) : value);
const short = rounded(6);
const rough = rounded(4); // of candidates: only shown

/** Fields with a usual value, of which the file has only the others: `[step, value, step, value, ...]`. */
const SPARSE = {
  bytes: null, text: null, finish_reason: null, draft: null, retracts: 0, chosen: false, thought: false,
};
const PLAIN = ["logprob", "rank", "probability", "entropy", "seconds"];

class Vocabulary {
  constructor(entries = []) {
    this.entries = entries;
    this.places = new Map();
  }

  place(token, text) {
    const key = `${token} ${text}`;
    if (!this.places.has(key)) {
      this.places.set(key, this.entries.length);
      this.entries.push([token, text]);
    }
    return this.places.get(key);
  }

  at(place, where) {
    const entry = this.entries[place];
    if (!Array.isArray(entry)) throw new BadFile(`Invalid session file: ${where} names no token of the vocabulary.`);
    return entry;
  }
}

const encoder = new TextEncoder();
const bytesOf = (text) => [...encoder.encode(text)];
const isEqual = (a, b) => a.length === b.length && a.every((item, at) => item === b[at]);

export function compact(session) {
  const vocabulary = new Vocabulary();
  const branches = session.branches.map((branch) => ({
    ...branch,
    steps: columnsOf(branch.steps, vocabulary),
    retracted: branch.retracted.map((cut) => ({ ...cut, steps: columnsOf(cut.steps, vocabulary) })),
  }));
  return { ...session, branches, vocabulary: vocabulary.entries };
}

function columnsOf(steps, vocabulary) {
  const places = (items) => items.map(({ token, text }) => vocabulary.place(token, text));
  const columns = {
    position: steps[0]?.position ?? 0,
    index: steps[0]?.index ?? 0,
    tokens: steps.map((step) => vocabulary.place(step.token, step.piece)),
    draw: steps.map(({ draw }) => draw && [draw.u, draw.low, draw.high].map(short)),
    candidates: steps.map(({ candidates }) => [
      places(candidates), candidates.map((item) => rough(item.logprob)), candidates.map((item) => rough(item.probability)),
    ]),
    stages: steps.map(({ stages }) => stages.map((stage) => [
      stage.name, stage.kept, stage.removed, short(stage.kept_mass), stage.changed,
      stage.top.map(([token, , text]) => vocabulary.place(token, text)), stage.top.map(([, value]) => rough(value)),
    ])),
  };
  for (const name of PLAIN) columns[name] = steps.map((step) => short(step[name]));
  for (const [name, usual] of Object.entries(SPARSE)) {
    const values = steps.flatMap((step, at) => {
      const value = sparseValue(step, name);
      return (value ?? usual) === usual ? [] : [at, value];
    });
    if (values.length) columns[name] = values;
  }
  return columns;
}

/** A value of the file; null is the usual one, which follows from the token. */
function sparseValue(step, name) {
  if (name === "bytes") return isEqual(step.bytes, bytesOf(step.piece)) ? null : step.bytes;
  if (name === "text") return step.text === step.piece ? null : step.text;
  return short(step[name]);
}

const array = (value, at) => {
  if (!Array.isArray(value)) throw new BadFile(`Invalid session file: ${at} must be an array.`);
  return value;
};

/** The session of a file with columns; values are validated afterwards. */
export function expand(data) {
  const vocabulary = new Vocabulary(array(data.vocabulary ?? [], "vocabulary"));
  const steps = (columns, at) => (Array.isArray(columns) ? columns : stepsOf(columns, vocabulary, at));
  const branches = array(data.branches, "branches").map((branch, number) => ({
    ...branch,
    steps: steps(branch?.steps, `branches[${number}].steps`),
    retracted: array(branch?.retracted ?? [], `branches[${number}].retracted`).map((cut, at) => ({
      ...cut, steps: steps(cut?.steps, `branches[${number}].retracted[${at}].steps`),
    })),
  }));
  return { ...data, branches };
}

function stepsOf(columns, vocabulary, at) {
  const tokens = array(columns?.tokens, `${at}.tokens`);
  if (tokens.length > MAX_STEPS) throw new BadFile(`Invalid session file: ${at} has ${tokens.length} steps, at most ${MAX_STEPS}.`);
  const named = (places, where) => array(places, where).map((place) => vocabulary.at(place, where));
  const column = (name) => array(columns[name] ?? [], `${at}.${name}`);
  const steps = tokens.map((place, number) => {
    const [token, piece] = vocabulary.at(place, `${at}.tokens[${number}]`);
    const where = `${at}.candidates[${number}]`;
    const [candidates = [], logprobs = [], probabilities = []] = array(column("candidates")[number] ?? [], where);
    const step = {
      ...SPARSE, index: columns.index + number, position: columns.position + number, token, piece, text: piece,
      draw: drawOf(column("draw")[number], `${at}.draw[${number}]`),
      bytes: typeof piece === "string" ? bytesOf(piece) : [],
      candidates: named(candidates, where).map(([id, text], rank) => ({
        token: id, text, logprob: logprobs[rank] ?? null, probability: probabilities[rank] ?? null,
      })),
      stages: array(column("stages")[number] ?? [], `${at}.stages[${number}]`).map((stage) => {
        const [name, kept, removed, kept_mass, changed, top = [], values = []] = array(stage, `${at}.stages[${number}]`);
        return { name, kept, removed, kept_mass, changed, top: named(top, `${at}.stages[${number}]`).map(([id, text], rank) => [id, values[rank], text]) };
      }),
    };
    for (const name of PLAIN) step[name] = column(name)[number];
    return step;
  });
  for (const name of Object.keys(SPARSE)) {
    const values = column(name);
    for (let place = 0; place < values.length; place += 2) {
      const step = steps[values[place]];
      if (!step) throw new BadFile(`Invalid session file: ${at}.${name} names no step.`);
      step[name] = values[place + 1];
    }
  }
  return steps;
}

function drawOf(value, at) {
  if (value == null) return null;
  const [u, low, high] = array(value, at);
  return { u, low, high };
}
