// Inside the model at one position, as server/tree/look.py: attention, residual stream, logit lens and output head.

import { badRequest, partialOf, readableToken } from "./branches.js";

const MAX_NUMBERS = 2_000_000; // of attention in one answer
const MAX_CELLS = 18_000; // of vectors in one answer
const MAX_CELL = 999;
const MAX_DIALS = 8;
const PARTS = ["attention", "lens", "vectors"]; // attribution and neighbours need a server

const round = (value) => Math.round(value * 1e6) / 1e6;
const rounded = (values) => Array.from(values, round);
const norm = (vector) => Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0));

/** `computed`: a branch of the engine with the tokens up to the position. */
export function lookJson(engine, computed, logits, tokens, position, { include = null, heads = false, layer = null, head = null, top = 5, token: target = null }) {
  const { layers, heads: numHeads, width } = engine.info;
  const parts = include === null ? PARTS : include.split(",").map((name) => name.trim()).filter(Boolean);
  const unknown = parts.find((name) => !PARTS.includes(name));
  if (unknown) throw badRequest(`include must be of ${PARTS.join(", ")} in the browser tab, got '${unknown.slice(0, 40)}'`, "include", "needs_server");
  const inside = computed.look(position, { attention: true, hidden: true, lens: 0 });
  const attention = Float32Array.from(inside.attention);
  const hidden = Array.from({ length: layers + 1 }, (_, at) => inside.hidden.slice(at * width, (at + 1) * width));
  const past = position + 1;
  const partial = partialOf(engine, tokens.slice(0, past));
  const named = (id) => ({ id, text: readableToken(engine, id, partial) });
  const likeliest = engine.top(logits, 1)[0].token;
  const picked = tokens[past] ?? null;
  const followed = picked ?? likeliest;
  const json = {
    position, token: named(tokens[position]), picked: picked === null ? null : named(picked), likeliest: named(likeliest),
    layers, heads: numHeads, norms: rounded(hidden.map(norm)),
  };
  json.part_norms = hidden.slice(1).map((after, at) => { // what attention and feed-forward added
    const middle = inside.middle.slice(at * width, (at + 1) * width);
    return rounded([norm(middle.map((value, n) => value - hidden[at][n])), norm(after.map((value, n) => value - middle[n]))]);
  });
  json.token.text = readableToken(engine, tokens[position], partialOf(engine, tokens.slice(0, position)));
  if (parts.includes("attention")) {
    json.tokens = tokens.slice(0, past).map((id, at) => ({ id, text: readableToken(engine, id, partialOf(engine, tokens.slice(0, at))) }));
    json.attention = attentionJson(attention, { layers, heads: numHeads, past }, { heads, layer, head });
  }
  if (parts.includes("lens")) {
    json.lens = lensJson(engine, hidden, position, target ?? followed, top, partial);
    json.lenses = ["logit"];
  }
  if (parts.includes("vectors")) {
    json.vectors = vectorsJson(hidden, width);
    json.position_told = positionJson(engine.model.config.rope, position);
    json.head = headJson(engine, logits, followed, top, partial);
  }
  return json;
}

/** One of `count` layers or heads, from 1; null: all. As indices. */
function indices(number, count, name) {
  if (number === null) return Array.from({ length: count }, (_, at) => at);
  if (!Number.isSafeInteger(number) || number < 1 || number > count) throw badRequest(`${name} must be 1 to ${count}, got ${number}`, name);
  return [number - 1];
}

function attentionJson(weights, shape, options) {
  const { past } = shape;
  const layers = indices(options.layer, shape.layers, "layer");
  const heads = indices(options.head, shape.heads, "head");
  const count = (1 + layers.length * (1 + (options.heads ? heads.length : 0))) * past;
  if (count > MAX_NUMBERS) throw badRequest(`that would be ${count} numbers, and an answer may have ${MAX_NUMBERS}; set layer or head, or omit heads`, "layer");
  const row = (layer, head) => weights.subarray((layer * shape.heads + head) * past, (layer * shape.heads + head + 1) * past);
  const rows = layers.map((layer) => heads.map((head) => row(layer, head)));
  const meanOf = (some) => {
    const sum = new Float64Array(past);
    for (const values of some) for (let at = 0; at < past; at += 1) sum[at] += values[at];
    return rounded(sum.map((value) => value / some.length));
  };
  const json = {
    layers: layers.map((at) => at + 1), heads: heads.map((at) => at + 1), mean: meanOf(rows.flat()), by_layer: rows.map(meanOf),
    map: mapOf(rows, 0), map_without_first: past > 1 ? mapOf(rows, 1) : null,
  };
  if (options.heads) json.by_head = rows.map((some) => some.map(rounded));
  return json;
}

/** For each head: the position with the largest weight, that weight, and the entropy; `first` positions are left out. */
function mapOf(rows, first) {
  const facts = rows.map((heads) => heads.map((weights) => {
    let [place, sum, moment] = [first, 0, 0];
    for (let at = first; at < weights.length; at += 1) {
      sum += weights[at];
      if (weights[at] > weights[place]) place = at;
    }
    sum = first ? Math.max(sum, 1e-30) : 1;
    for (let at = first; at < weights.length; at += 1) moment -= (weights[at] / sum) * Math.log(Math.max(weights[at] / sum, 1e-30));
    return { place, weight: round(weights[place] / sum), entropy: round(moment) };
  }));
  const column = (name) => facts.map((heads) => heads.map((fact) => fact[name]));
  return { place: column("place"), weight: column("weight"), entropy: column("entropy") };
}

function lensJson(engine, hidden, position, token, top, partial) {
  const layers = hidden.map((vector, layer) => {
    const logits = Float32Array.from(engine.model.head(vector));
    const { logprob, rank, entropy } = engine.score(logits, token);
    const candidates = engine.top(logits, top).map((candidate) => ({ ...candidate, text: readableToken(engine, candidate.token, partial) }));
    return { layer, probability: Math.exp(logprob), logprob, rank, entropy, candidates };
  });
  return { position, token, text: readableToken(engine, token, partial), layers, kind: "logit" };
}

/** The residual stream, quantized for a picture: a number is its cell times the scale of the row. */
function vectorsJson(rows, width) {
  const every = Math.ceil((width * rows.length) / MAX_CELLS);
  const largest = (row) => Array.from({ length: Math.ceil(width / every) }, (_, at) => (
    row.slice(at * every, (at + 1) * every).reduce((best, value) => (Math.abs(value) > Math.abs(best) ? value : best), 0)));
  const reduced = rows.map((row) => (every > 1 ? largest(row) : Array.from(row)));
  const scales = reduced.map((row) => Math.max(...row.map(Math.abs)) / MAX_CELL);
  return {
    width, every, scales: scales.map((scale) => Number(scale.toPrecision(6))),
    cells: reduced.map((row, at) => row.map((value) => Math.round(value / (scales[at] || 1)))),
  };
}

/** The angles by which RoPE turns some of the pairs, fast ones first. */
function positionJson({ width, base, factor }, position) {
  const pairs = width / 2;
  const count = Math.min(MAX_DIALS, pairs);
  const picked = new Set(Array.from({ length: count }, (_, at) => Math.round((at * (pairs - 1)) / Math.max(1, count - 1))));
  const dials = [...picked].map((pair) => ({ pair: pair + 1, angle: round((position * base ** ((-2 * pair) / width)) / factor) }));
  return { way: "rotary", pairs, dials };
}

/** The most likely tokens with their logits, and the followed one. */
function headJson(engine, logits, followed, top, partial) {
  const candidate = ({ token: id, probability }) => ({ id, text: readableToken(engine, id, partial), logit: round(logits[id]), probability });
  const { logprob, rank } = engine.score(logits, followed);
  return {
    vocabulary: logits.length, candidates: engine.top(logits, top).map(candidate),
    followed: { ...candidate({ token: followed, probability: Math.exp(logprob) }), rank },
  };
}
