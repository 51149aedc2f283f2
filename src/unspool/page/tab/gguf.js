// GGUF files: metadata and the table of tensors.

import { TabError } from "./errors.js";

const FIRST_READ = 1 << 22; // bytes; doubled until the header fits
const MAX_HEADER = 1 << 28;
const ALIGNMENT = 32;

/** `{metadata: Map, tensors: Map of {type, shape, start, bytes}}`. `shape` is [rows, columns] or [length]. */
export async function readHeader(blob) {
  for (let size = FIRST_READ; ; size *= 2) {
    const bytes = new Uint8Array(await blob.slice(0, size).arrayBuffer());
    try {
      return parseHeader(bytes, blob.size);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      if (bytes.length >= blob.size || size > MAX_HEADER) throw new TabError("damaged", "The model file is not complete.");
    }
  }
}

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
    this.text = new TextDecoder();
    this.at = 0;
  }

  number(size, read) {
    const value = read.call(this.view, this.at, true);
    this.at += size;
    return value;
  }

  u32() {
    return this.number(4, this.view.getUint32);
  }

  u64() {
    return Number(this.number(8, this.view.getBigUint64));
  }

  string() {
    const length = this.u64();
    if (this.at + length > this.bytes.length) throw new RangeError("past the end");
    this.at += length;
    return this.text.decode(this.bytes.subarray(this.at - length, this.at));
  }

  value(type) {
    const { view } = this;
    switch (type) {
      case 0: return this.number(1, view.getUint8);
      case 1: return this.number(1, view.getInt8);
      case 2: return this.number(2, view.getUint16);
      case 3: return this.number(2, view.getInt16);
      case 4: return this.u32();
      case 5: return this.number(4, view.getInt32);
      case 6: return this.number(4, view.getFloat32);
      case 7: return this.number(1, view.getUint8) !== 0;
      case 8: return this.string();
      case 9: return this.array();
      case 10: return this.u64();
      case 11: return Number(this.number(8, view.getBigInt64));
      case 12: return this.number(8, view.getFloat64);
      default: throw new TabError("damaged", `The model file has a value of unknown type ${type}.`);
    }
  }

  array() {
    const type = this.u32();
    const length = this.u64();
    if (length > this.bytes.length) throw new RangeError("past the end");
    return Array.from({ length }, () => this.value(type));
  }
}

function parseHeader(bytes, fileBytes) {
  const reader = new Reader(bytes);
  if (bytes.length < 24 || reader.u32() !== 0x46554747) {
    throw new TabError("not_a_model", "This file is not a GGUF model.");
  }
  const version = reader.u32();
  if (version < 2 || version > 3) throw new TabError("unsupported_model", `GGUF version ${version} is not supported; 2 and 3 are.`);
  const numTensors = reader.u64();
  const numKeys = reader.u64();
  const metadata = new Map();
  for (let n = 0; n < numKeys; n++) {
    const key = reader.string();
    metadata.set(key, reader.value(reader.u32()));
  }
  const tensors = new Map();
  for (let n = 0; n < numTensors; n++) {
    const name = reader.string();
    const shape = Array.from({ length: reader.u32() }, () => reader.u64()).reverse();
    tensors.set(name, { name, shape, type: reader.u32(), start: reader.u64(), bytes: 0 });
  }
  const alignment = metadata.get("general.alignment") ?? ALIGNMENT;
  const dataStart = Math.ceil(reader.at / alignment) * alignment;
  for (const tensor of tensors.values()) {
    tensor.start += dataStart;
    tensor.bytes = tensorBytes(tensor);
    if (tensor.start + tensor.bytes > fileBytes) throw new TabError("damaged", "The model file is not complete.");
  }
  return { metadata, tensors };
}

/** By GGUF type number: name, and values and bytes of a block. */
export const TYPES = {
  0: ["F32", 1, 4], 1: ["F16", 1, 2], 2: ["Q4_0", 32, 18], 3: ["Q4_1", 32, 20], 6: ["Q5_0", 32, 22],
  7: ["Q5_1", 32, 24], 8: ["Q8_0", 32, 34], 10: ["Q2_K", 256, 84], 11: ["Q3_K", 256, 110],
  12: ["Q4_K", 256, 144], 13: ["Q5_K", 256, 176], 14: ["Q6_K", 256, 210], 20: ["IQ4_NL", 32, 18],
  23: ["IQ4_XS", 256, 136], 30: ["BF16", 1, 2],
};

function tensorBytes({ name, type, shape }) {
  const [, values, bytes] = TYPES[type] ?? [];
  if (!values) {
    const names = Object.values(TYPES).map(([typeName]) => typeName).join(", ");
    throw new TabError("unsupported_model", `Tensor ${name} has type ${type}, which the tab does not support; it supports ${names}.`);
  }
  return (shape.reduce((a, b) => a * b, 1) / values) * bytes;
}
