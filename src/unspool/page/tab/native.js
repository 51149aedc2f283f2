// The native library compiled to WebAssembly: loading, threads, memory and structures.

import { TabError } from "./errors.js";

// A module with one function, a * b + c by relaxed SIMD. Whether that instruction rounds once or twice depends
// on the processor; results equal those of the native library only if it rounds once.
const MULTIPLY_ADD = new Uint8Array([
  0x00, 0x61, 0x73, 0x6d, 0x01, 0x00, 0x00, 0x00, 0x01, 0x08, 0x01, 0x60, 0x03, 0x7d, 0x7d, 0x7d, 0x01, 0x7d,
  0x03, 0x02, 0x01, 0x00, 0x07, 0x05, 0x01, 0x01, 0x66, 0x00, 0x00, 0x0a, 0x16, 0x01, 0x14, 0x00,
  0x20, 0x00, 0xfd, 0x13, 0x20, 0x01, 0xfd, 0x13, 0x20, 0x02, 0xfd, 0x13, 0xfd, 0x85, 0x02, 0xfd, 0x1f, 0x00, 0x0b,
]);

function hasFusedRelaxedSimd() {
  if (!WebAssembly.validate(MULTIPLY_ADD)) return false;
  const { f } = new WebAssembly.Instance(new WebAssembly.Module(MULTIPLY_ADD)).exports;
  return f(1 + 2 ** -13, 1 - 2 ** -13, -1) !== 0; // the product rounds to 1
}

/** The content of a gzip file; some file hosts have already unpacked it. */
async function unpack(bytes) {
  const [first, second] = new Uint8Array(bytes, 0, 2);
  if (first !== 0x1f || second !== 0x8b) return bytes;
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

const MEMORY = { initial: 512, maximum: 65535, shared: true }; // in pages of 64 KB

/** Memory for the library. Also where nothing can be shared: the threads of the library are compiled into it. */
function makeMemory() {
  for (let { maximum } = MEMORY; ; maximum >>= 1) {
    try {
      return new WebAssembly.Memory({ ...MEMORY, maximum });
    } catch {
      if (maximum < 4096) throw new TabError("memory", "The browser does not give the tab memory for a model.");
    }
  }
}

const MAX_THREADS = 4;
const START_SECONDS = 10;
const STACK_BYTES = 1 << 20;

/** How many threads to compute with: more than one needs a page that is cross-origin isolated. */
const threadsHere = () => (globalThis.crossOriginIsolated ? Math.min(navigator.hardwareConcurrency, MAX_THREADS) : 1);

const startWorker = () => new Worker(new URL("thread.js", import.meta.url), { type: "module" });

/** Load the library. `read` maps a file name beside this module to its bytes; `start` starts a worker with thread.js. */
export async function loadNative(read, { relaxed = hasFusedRelaxedSimd(), threads = threadsHere(), start = startWorker } = {}) {
  const packed = await read(relaxed ? "unspool-relaxed.wasm.gz" : "unspool.wasm.gz");
  let module;
  try {
    module = await WebAssembly.compile(await unpack(packed));
  } catch {
    throw new TabError("no_simd", "This browser does not have WebAssembly SIMD; use a newer one.");
  }
  const memory = makeMemory();
  const native = new Native(await instantiate(module, memory), memory, relaxed ? "relaxed" : "simd128");
  await native.startThreads(module, threads, start);
  return native;
}

/** An instance of the library on a memory; each thread has one. */
export function instantiate(module, memory) {
  return WebAssembly.instantiate(module, { env: { memory }, wasi_snapshot_preview1: systemCalls(memory) });
}

/** The library has no files, clock or environment: its system calls report none. */
function systemCalls(memory) {
  const calls = {
    environ_sizes_get: (count, bytes) => {
      const view = new DataView(memory.buffer);
      view.setUint32(count, 0, true);
      view.setUint32(bytes, 0, true);
      return 0;
    },
    proc_exit: () => {
      throw new TabError("memory", "There is not enough memory for this model in the browser.");
    },
  };
  return new Proxy(calls, { get: (target, name) => target[name] ?? (() => 0) });
}

const ALIGNMENT = 64;

export class Native {
  constructor(instance, memory, instructionSet) {
    this.calls = instance.exports;
    this.memory = memory;
    this.instructionSet = instructionSet;
    this.threads = 1;
    this.calls._initialize();
    this.calls.unspool_isa(); // chooses the kernels, before threads do
  }

  /** Start threads besides this one. If one of them does not start in time, there is only this one. */
  async startThreads(module, count, start) {
    const workers = [];
    try {
      for (let index = 1; index < count; index++) workers.push(start());
      await Promise.all(workers.map((worker, n) => this.startThread(worker, module, n + 1)));
      this.threads = count;
    } catch (error) {
      console.warn(`computing with one thread: ${error.message}`);
      for (const worker of workers) worker.terminate();
    }
  }

  startThread(worker, module, index) {
    const tls = this.allocate(this.calls.__tls_size.value);
    const stack = this.allocate(STACK_BYTES) + STACK_BYTES;
    worker.postMessage({ module, memory: this.memory, tls, stack, index });
    let timer;
    const started = new Promise((done, failed) => {
      timer = setTimeout(() => failed(new Error("a thread has not started in time")), START_SECONDS * 1000);
      worker.onmessage = done;
      worker.onerror = () => failed(new Error("a thread cannot be started"));
    });
    return started.finally(() => clearTimeout(timer));
  }

  get buffer() {
    return this.memory.buffer;
  }

  /** Memory that starts on a cache line. Never freed: it belongs to the model. */
  allocate(bytes) {
    let start;
    try {
      start = this.calls.malloc(bytes + ALIGNMENT);
    } catch {
      start = 0;
    }
    if (start === 0) {
      throw new TabError("memory", `The browser does not give the tab ${Math.ceil(bytes / 1e6)} MB of memory; close other tabs or use a smaller model.`);
    }
    return Math.ceil((start >>> 0) / ALIGNMENT) * ALIGNMENT;
  }

  // Views are made anew each time: growing memory detaches those made before.

  bytes(address, count) {
    return new Uint8Array(this.buffer, address, count);
  }

  floats(address, count) {
    return new Float32Array(this.buffer, address, count);
  }

  doubles(address, count) {
    return new Float64Array(this.buffer, address, count);
  }

  integers(address, count) {
    return new BigInt64Array(this.buffer, address, count);
  }

  /** Write 64-bit integers. */
  setIntegers(address, values) {
    const target = this.integers(address, values.length);
    for (let i = 0; i < values.length; i++) target[i] = BigInt(values[i]);
  }

  /**
   * Write a C structure field by field, each aligned to its size. `layout` has a letter for each value:
   * p pointer, i int32, q int64, f float32, b int8. Returns the address after it.
   */
  writeStruct(address, layout, values) {
    const view = new DataView(this.buffer);
    let at = address;
    [...layout].forEach((letter, n) => {
      const size = { q: 8, b: 1 }[letter] ?? 4;
      at = Math.ceil(at / size) * size;
      if (letter === "q") view.setBigInt64(at, BigInt(values[n]), true);
      else if (letter === "f") view.setFloat32(at, values[n], true);
      else if (letter === "b") view.setInt8(at, values[n]);
      else view.setInt32(at, values[n], true);
      at += size;
    });
    return at;
  }

  /** Write a structure that is used before the next one. */
  scratchStruct(layout, values) {
    this.scratch ??= this.allocate(1024);
    this.writeStruct(this.scratch, layout, values);
    return this.scratch;
  }

  /** Allocate an array of structures; they contain a 64-bit integer if the layout has q. */
  structs(layout, rows) {
    const address = this.allocate(1024 + rows.length * layout.length * 8);
    const alignment = layout.includes("q") ? 8 : 4;
    let at = address;
    for (const row of rows) at = Math.ceil(this.writeStruct(at, layout, row) / alignment) * alignment;
    return address;
  }
}
