// A model of the Llama family in the native library: settings from the GGUF header, weights, and the list of
// operations of a step (the same as `backends/cpu/plan.py` makes for these models).

import { TabError } from "./errors.js";
import { TYPES } from "./gguf.js";

export const PAGE_TOKENS = 16; // tokens of a page of the KV cache
const MAX_BATCH = 128; // tokens of one run
const CHUNK = 1 << 20; // bytes of a tensor that one read returns, about

// -- settings ---------------------------------------------------------------------------------------

// `interleaved`: the file's query and key rows are in pairs, because llama.cpp rotates adjacent dimensions.
const FAMILIES = { llama: { interleaved: true }, qwen2: { interleaved: false }, qwen3: { interleaved: false } };

const unsupported = (words) => new TabError("unsupported_model", `The tab does not support ${words}. Run it with the server: unspool serve.`);

export function readConfig({ metadata, tensors }) {
  const family = metadata.get("general.architecture");
  const get = (name, fallback) => metadata.get(`${family}.${name}`) ?? fallback;
  if (!(family in FAMILIES)) {
    throw unsupported(`models of the architecture ${family}, only ${Object.keys(FAMILIES).join(", ")}`);
  }
  if (get("expert_count", 0)) throw unsupported("mixtures of experts");
  const scaling = get("rope.scaling.type", "none");
  if (!["none", "linear"].includes(scaling)) throw unsupported(`RoPE scaling of type ${scaling}`);
  const embedding = tensors.get("token_embd.weight");
  const numbers = ["block_count", "embedding_length", "attention.head_count", "feed_forward_length"];
  const missing = numbers.find((name) => !Number.isInteger(get(name)) || get(name) <= 0);
  if (missing || !embedding) throw new TabError("damaged", `The model file lacks ${missing ?? "token_embd.weight"}.`);
  const heads = get("attention.head_count");
  const width = get("embedding_length");
  const headWidth = get("attention.key_length", width / heads);
  if (headWidth % 16) throw unsupported(`heads of ${headWidth} columns`);
  return {
    family,
    ...FAMILIES[family],
    layers: get("block_count"),
    width,
    heads,
    kvHeads: get("attention.head_count_kv", heads),
    headWidth,
    inner: get("feed_forward_length"),
    context: get("context_length", 2048),
    epsilon: get("attention.layer_norm_rms_epsilon", 1e-5),
    vocabSize: embedding.shape[0],
    rope: {
      width: get("rope.dimension_count", headWidth),
      base: get("rope.freq_base", 10000),
      factor: scaling === "linear" ? get("rope.scaling.factor", 1) : 1,
    },
  };
}

// -- RoPE: the same arithmetic as `Rotary.tables` in `model/config.py` --------------------------------

const HALF_PI = [1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21];

function roundHalfEven(x) {
  const magic = 6755399441055744; // 1.5 * 2^52: adding it rounds the fraction away
  return x + magic - magic;
}

/** Cosine and sine, from operations that are exact to the last bit everywhere. */
function cosineAndSine(angle) {
  let x = angle;
  const turns = roundHalfEven(x * (2 / Math.PI)); // quarter turns
  for (const part of HALF_PI) x -= turns * part;
  const square = x * x;
  let sine = 1;
  let cosine = 1;
  for (let n = 16; n > 0; n -= 2) {
    sine = 1 - (sine * square) / (n * (n + 1));
    cosine = 1 - (cosine * square) / (n * (n - 1));
  }
  sine *= x;
  switch (turns & 3) {
    case 0: return [cosine, sine];
    case 1: return [-sine, cosine];
    case 2: return [-cosine, -sine];
    default: return [sine, -cosine];
  }
}

function ropeTable(native, { width, base, factor }, positions, factors) {
  const pairs = width / 2;
  const cosine = native.allocate(positions * pairs * 4);
  const sine = native.allocate(positions * pairs * 4);
  const cosines = native.floats(cosine, positions * pairs);
  const sines = native.floats(sine, positions * pairs);
  for (let pair = 0; pair < pairs; pair++) {
    const exponent = Math.fround(Math.fround(2 * pair) / Math.fround(width));
    const plain = Math.fround(1 / Math.fround(Math.fround(base) ** exponent));
    const frequency = Math.fround(plain / Math.fround(factors?.[pair] ?? factor));
    for (let position = 0; position < positions; position++) {
      const angle = Math.fround(Math.fround(position) * frequency);
      [cosines[position * pairs + pair], sines[position * pairs + pair]] = cosineAndSine(angle);
    }
  }
  return native.structs("ppqq", [[cosine, sine, positions, pairs]]);
}

// -- weights ----------------------------------------------------------------------------------------

const FORMATS = { F32: 0, F16: 1, BF16: 2 };
const INTEGERS = 3;
const CODES = 4;
const IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
// bits, columns that share a scale, offset, whether there are minima, whether scales are in super groups
const PACKINGS = {
  Q4_0: [4, 32, 8, 0, 0], Q4_1: [4, 32, 0, 1, 0], Q5_0: [5, 32, 16, 0, 0], Q5_1: [5, 32, 0, 1, 0],
  Q8_0: [8, 32, 128, 0, 0], Q2_K: [2, 16, 0, 1, 1], Q3_K: [3, 16, 4, 0, 1], Q4_K: [4, 32, 0, 1, 1],
  Q5_K: [5, 32, 0, 1, 1], Q6_K: [6, 16, 32, 0, 1], IQ4_NL: [4, 32, 0, 0, 0], IQ4_XS: [4, 32, 0, 0, 1],
};
const MATRIX = `pqqiiiiiiif${"b".repeat(16)}`;

function matrixFields(type, [rows, columns]) {
  const [name] = TYPES[type];
  const table = name.startsWith("IQ4") ? IQ4 : Array(16).fill(0);
  if (name in FORMATS) return [0, rows, columns, FORMATS[name], 0, 32, 0, 0, 0, -1, 1, ...table];
  const [bits, group, offset, minima, scales] = PACKINGS[name];
  const format = name.startsWith("IQ4") ? CODES : INTEGERS;
  return [0, rows, columns, format, bits, group, offset, minima, scales, -1, 1, ...table];
}

/** Order of rows in which the halves of a head, not adjacent rows, are rotated together. */
function halvesOrder(rows, headWidth) {
  const half = headWidth / 2;
  return Int32Array.from({ length: rows }, (_, row) => {
    const head = Math.floor(row / headWidth);
    const [part, pair] = [Math.floor((row % headWidth) / half), row % half];
    return head * headWidth + 2 * pair + part;
  });
}

function reorder(bytes, order) {
  const rowBytes = bytes.length / order.length;
  const result = new Uint8Array(bytes.length);
  order.forEach((from, to) => result.set(bytes.subarray(from * rowBytes, (from + 1) * rowBytes), to * rowBytes));
  return result;
}

class Weights {
  constructor(native, header, blob, config) {
    Object.assign(this, { native, header, blob, config });
    this.source = native.allocate(CHUNK * 2);
    this.matrices = [];
    this.vectors = [];
  }

  tensor(name) {
    const tensor = this.header.tensors.get(name);
    if (!tensor) throw new TabError("damaged", `The model file lacks ${name}.`);
    return tensor;
  }

  async read({ start, bytes }, offset = 0, count = bytes) {
    return new Uint8Array(await this.blob.slice(start + offset, start + offset + count).arrayBuffer());
  }

  isRotated(name) {
    return this.config.interleaved && /\.attn_[qk]\./.test(name);
  }

  /** Index of a vector of float32 values. */
  async vector(name) {
    const tensor = this.tensor(name);
    if (TYPES[tensor.type][0] !== "F32") throw unsupported(`vectors of type ${TYPES[tensor.type][0]} (${name})`);
    let bytes = await this.read(tensor);
    if (this.isRotated(name)) bytes = reorder(bytes, halvesOrder(tensor.shape[0], this.config.headWidth));
    const address = this.native.allocate(bytes.length);
    this.native.bytes(address, bytes.length).set(bytes);
    return this.vectors.push([address, bytes.length / 4]) - 1;
  }

  /** Index of a matrix, packed for the kernels; its bias, if the file has one, is added to products. */
  async matrix(name, [rows, columns]) {
    const tensor = this.tensor(`${name}.weight`);
    if (tensor.shape[0] !== rows || tensor.shape[1] !== columns) {
      throw new TabError("damaged", `${name} must be ${rows} x ${columns}, got ${tensor.shape.join(" x ")}.`);
    }
    const { native } = this;
    const fields = matrixFields(tensor.type, tensor.shape);
    const struct = native.structs(MATRIX, [fields]);
    const size = Number(native.calls.unspool_packed_bytes(struct));
    fields[0] = native.allocate(size);
    await this.pack(tensor, fields[0], size);
    if (this.header.tensors.has(`${name}.bias`)) fields[9] = await this.vector(`${name}.bias`);
    return this.matrices.push(fields) - 1;
  }

  /** Read and pack a tensor in parts of whole blocks of sixteen rows, so that it is never twice in memory. */
  async pack(tensor, target, size) {
    const { native } = this;
    const [rows, columns] = tensor.shape;
    const rowBytes = tensor.bytes / rows;
    const order = this.isRotated(tensor.name) ? halvesOrder(rows, this.config.headWidth) : null;
    const unit = order ? this.config.headWidth : 16;
    const step = Math.max(unit, Math.floor(CHUNK / rowBytes / unit) * unit);
    if (rowBytes * step > 2 * CHUNK) throw unsupported(`rows of ${rowBytes} bytes`);
    const blockBytes = size / Math.ceil(rows / 16);
    for (let row = 0; row < rows; row += step) {
      const count = Math.min(step, rows - row);
      let bytes = await this.read(tensor, row * rowBytes, count * rowBytes);
      if (order) bytes = reorder(bytes, order.subarray(0, count));
      native.bytes(this.source, bytes.length).set(bytes);
      const part = native.scratchStruct(MATRIX, matrixFields(tensor.type, [count, columns]));
      const status = native.calls.unspool_repack(
        part, tensor.type, this.source, BigInt(bytes.length), 0n, BigInt(Math.ceil(count / 16)),
        target + (row / 16) * blockBytes,
      );
      if (status) throw new TabError("damaged", `${tensor.name} holds values that are not finite numbers, or has the wrong size.`);
    }
  }
}

// -- operations -------------------------------------------------------------------------------------

const KIND = { embed: 0, norm: 1, linear: 2, rope: 3, attention: 4, gather: 8, site: 10 };
const ROWS = { tokens: 0, selected: 1 };
const PREPARE = { none: 0, norm: 1, activation: 2 };
const ADD = 1;
const GATED = 2;
const OP = `${"i".repeat(24)}fff`;
const BUFFERS = ["x", "qkv", "mixed", "hidden", "last", "logits"];

function operation(kind, {
  rows = "tokens", source = "", target = "", width = 0, heads = 0, matrices = [], vector = -1, secondVector = -1,
  layer = 0, rotary = -1, prepare = "none", flags = 0, scale = 1, epsilon = 0,
}) {
  return [
    KIND[kind], ROWS[rows], BUFFERS.indexOf(source), BUFFERS.indexOf(target), 0, width, heads,
    matrices[0] ?? 0, matrices.length, vector, secondVector, layer, 0, rotary, PREPARE[prepare], 0, flags,
    0, 0, -1, 0, 0, 0, -1, scale, 0, epsilon,
  ];
}

/** Load all weights and list the operations. The matrices of an operation have consecutive indices. */
async function buildPlan(weights, config, onLayer) {
  const { width, heads, kvHeads, headWidth, inner, layers, epsilon, vocabSize } = config;
  const has = (name) => weights.header.tensors.has(name);
  const [outWidth, kvWidth] = [heads * headWidth, kvHeads * headWidth];
  const operations = [];
  const add = (kind, fields) => operations.push(operation(kind, { epsilon, ...fields }));
  const site = (layer) => add("site", { source: "x", layer, width });
  const embedding = await weights.matrix("token_embd", [vocabSize, width]);
  add("embed", { target: "x", matrices: [embedding] });
  site(0);
  for (let layer = 0; layer < layers; layer++) {
    const block = `blk.${layer}`;
    const qkv = [
      await weights.matrix(`${block}.attn_q`, [outWidth, width]),
      await weights.matrix(`${block}.attn_k`, [kvWidth, width]),
      await weights.matrix(`${block}.attn_v`, [kvWidth, width]),
    ];
    const normed = async (name) => ({ source: "x", width, prepare: "norm", vector: await weights.vector(`${block}.${name}.weight`) });
    add("linear", { ...await normed("attn_norm"), target: "qkv", matrices: qkv });
    const normsHeads = has(`${block}.attn_q_norm.weight`);
    add("rope", {
      source: "qkv", layer, heads, rotary: 0,
      vector: normsHeads ? await weights.vector(`${block}.attn_q_norm.weight`) : -1,
      secondVector: normsHeads ? await weights.vector(`${block}.attn_k_norm.weight`) : -1,
    });
    add("attention", { source: "qkv", target: "mixed", layer, heads, scale: headWidth ** -0.5 });
    const out = await weights.matrix(`${block}.attn_output`, [width, outWidth]);
    add("linear", { source: "mixed", target: "x", width: outWidth, matrices: [out], flags: ADD });
    site(layers + 1 + layer);
    const gates = [
      await weights.matrix(`${block}.ffn_gate`, [inner, width]),
      await weights.matrix(`${block}.ffn_up`, [inner, width]),
    ];
    add("linear", { ...await normed("ffn_norm"), target: "hidden", matrices: gates });
    const down = await weights.matrix(`${block}.ffn_down`, [width, inner]);
    add("linear", { source: "hidden", target: "x", width: inner, matrices: [down], prepare: "activation", flags: ADD | GATED });
    site(layer + 1);
    onLayer(layer + 1);
  }
  add("gather", { source: "x", target: "last", rows: "selected" });
  const headStart = operations.length;
  add("norm", { source: "last", target: "last", width, rows: "selected", vector: await weights.vector("output_norm.weight") });
  let head = embedding;
  if (has("output.weight")) head = await weights.matrix("output", [vocabSize, width]);
  add("linear", { source: "last", target: "logits", width, matrices: [head], rows: "selected" });
  const buffers = [
    [width, "tokens"], [outWidth + 2 * kvWidth, "tokens"], [outWidth, "tokens"], [2 * inner, "tokens"],
    [width, "selected"], [vocabSize, "selected"],
  ];
  return { operations, buffers, headStart };
}

// -- the model --------------------------------------------------------------------------------------

const KV_BYTES = 2; // of a value in the KV cache
const STATUS = {
  1: ["memory", "There is not enough memory for this step."],
  3: ["damaged", "The step names a token, a position or a page that does not exist."],
};

export class Model {
  /** `context`: the most tokens of a text; `numPages`: pages of the KV cache of all texts. */
  static async load(native, header, blob, { context, numPages, onProgress }) {
    const model = new Model();
    const config = readConfig(header);
    const weights = new Weights(native, header, blob, config);
    const { operations, buffers, headStart } = await buildPlan(weights, config, (layer) => onProgress(layer, config.layers));
    Object.assign(model, { native, config, context, numPages, headStart });
    const widths = native.allocate(buffers.length * 8);
    native.setIntegers(widths, buffers.map(([size]) => size));
    const rows = native.structs("i".repeat(buffers.length), [buffers.map(([, kind]) => ROWS[kind])]);
    const spec = native.structs("pqpqpqppqqiii", [[
      native.structs(OP, operations), operations.length,
      native.structs(MATRIX, weights.matrices), weights.matrices.length,
      native.structs("pq", weights.vectors), weights.vectors.length,
      widths, rows, buffers.length, BUFFERS.indexOf("logits"), 0, 0, native.threads,
    ]]);
    model.handle = native.calls.unspool_model_new(spec);
    await model.allocate(weights);
    return model;
  }

  async allocate(weights) {
    const { native, config, context, numPages } = this;
    const { layers, kvHeads, headWidth, vocabSize } = config;
    let factors = null;
    if (weights.header.tensors.has("rope_freqs.weight")) {
      const [address, count] = weights.vectors[await weights.vector("rope_freqs.weight")];
      factors = [...native.floats(address, count)];
    }
    this.rope = ropeTable(native, config.rope, context, factors);
    const layerBytes = 2 * kvHeads * PAGE_TOKENS * Math.ceil(headWidth / 16) * 16 * KV_BYTES;
    const pages = native.structs("qii", Array.from({ length: layers }, (_, n) => [n * layerBytes, kvHeads, headWidth]));
    const pageBytes = layers * layerBytes;
    this.pages = native.allocate(numPages * pageBytes);
    this.kv = native.structs("pqqpq", [[this.pages, numPages, pageBytes, pages, KV_BYTES * 8]]);
    this.logits = native.allocate(vocabSize * 4);
    this.numbers = native.allocate((4 * MAX_BATCH + context / PAGE_TOKENS + 16) * 8);
    this.batch = native.allocate(256);
    this.tapped = null;
  }

  copyPage(from, to) {
    this.native.calls.unspool_copy_page(this.kv, BigInt(from), BigInt(to));
  }

  /**
   * Compute tokens from position `start` on, at most `MAX_BATCH`, with the pages of their text. Returns the
   * logits after the last one if `wantsLogits`: a view that the next call overwrites.
   */
  run(tokens, start, pages, { wantsLogits = true, taps = 0 } = {}) {
    const { native, numbers } = this;
    const count = tokens.length;
    const positions = tokens.map((_, n) => start + n);
    let at = numbers;
    const array = (values) => {
      native.setIntegers(at, values);
      at += values.length * 8;
      return at - values.length * 8;
    };
    const addresses = [
      array(tokens), array(positions), array(positions.map((position) => position + 1)),
      array([0, count]), array([0]), array(pages), array([count - 1]),
    ];
    native.writeStruct(this.batch, "pppppppqqqqqppppqqpppp", [
      ...addresses, count, 1, 1, pages.length, wantsLogits ? 1 : 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ]);
    const status = native.calls.unspool_run(this.handle, this.kv, this.rope, this.batch, taps, this.logits);
    if (status) throw new TabError(...(STATUS[status] ?? STATUS[3]));
    return wantsLogits ? native.floats(this.logits, this.config.vocabSize) : null;
  }

  /** Compute one token again and read its attention and the residual stream before and after each layer. */
  look(token, position, pages) {
    const { native } = this;
    const { layers, heads, width } = this.config;
    this.tapped ??= this.allocateTaps();
    const { targets, stream, weights, taps } = this.tapped;
    const size = layers * heads * (position + 1);
    native.floats(weights, size).fill(0);
    const sites = 2 * layers + 1;
    native.writeStruct(targets, "p".repeat(sites), Array.from({ length: sites }, (_, n) => stream + n * width * 4));
    this.run([token], position, pages, { taps });
    return {
      attention: native.floats(weights, size).slice(),
      hidden: native.floats(stream, (layers + 1) * width).slice(),
      middle: native.floats(stream + (layers + 1) * width * 4, layers * width).slice(),
    };
  }

  allocateTaps() {
    const { native, context } = this;
    const { layers, heads, width } = this.config;
    const targets = native.allocate((2 * layers + 1) * 4);
    const stream = native.allocate((2 * layers + 1) * width * 4);
    const weights = native.allocate(layers * heads * context * 4);
    const zero = native.allocate(16);
    native.setIntegers(zero, [0, 0]);
    const taps = native.structs("ppqppqppq", [[targets, zero, 1, zero, weights, heads, 0, 0, 0]]);
    return { targets, stream, weights, taps };
  }

  /** Logits that the head makes of a vector of the residual stream: a view that the next call overwrites. */
  head(vector) {
    const { native } = this;
    this.vectorMemory ??= native.allocate(this.config.width * 4);
    native.floats(this.vectorMemory, vector.length).set(vector);
    const status = native.calls.unspool_run_head(this.handle, this.vectorMemory, 1n, BigInt(this.headStart), this.logits);
    if (status) throw new TabError(...(STATUS[status] ?? STATUS[3]));
    return native.floats(this.logits, this.config.vocabSize);
  }
}

export { MAX_BATCH };
