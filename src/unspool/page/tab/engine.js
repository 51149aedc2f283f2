// The engine of the tab: a model, its tokenizer, and branches of tokens that share pages of the KV cache.
// For a worker (every call computes until it returns) and for node.

import { chatTurns, readTemplate } from "./chat.js";
import { TabError } from "./errors.js";
import { readHeader, TYPES } from "./gguf.js";
import { MAX_BATCH, Model, PAGE_TOKENS, readConfig } from "./model.js";
import { loadNative } from "./native.js";
import { checkSettings, DEFAULTS, Sampler } from "./sampling.js";
import { isKept, openSource, removeKept } from "./source.js";
import { readable, Tokenizer } from "./tokenizer.js";

export { TabError };

const DEFAULT_CONTEXT = 2048;

async function fetchBeside(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new TabError("network", `${name} cannot be loaded: status ${answer.status}.`);
  return answer.arrayBuffer();
}

/** Pages of the KV cache, counted by the branches that use each. */
class Pages {
  constructor(count) {
    this.users = new Uint32Array(count);
    this.free = Array.from({ length: count }, (_, n) => count - 1 - n);
  }

  take() {
    const page = this.free.pop();
    if (page === undefined) throw new TabError("memory", "The texts in this tab fill the KV cache; close some branches.");
    this.users[page] = 1;
    return page;
  }

  share(pages) {
    for (const page of pages) this.users[page]++;
    return pages.slice();
  }

  release(pages) {
    for (const page of pages) if (--this.users[page] === 0) this.free.push(page);
  }
}

export class Engine {
  /**
   * Load a model. `source` is a URL or a File; `context` limits the tokens of a text; `pages` is the size of the
   * KV cache in pages of 16 tokens. `read` loads the library's files (by default from beside this module); `relaxed`,
   * `threads` and `start` are those of `loadNative`.
   */
  static async open({ source, onProgress = () => {}, signal, context, pages, read = fetchBeside, ...library }) {
    const blob = await openSource(source, { onProgress, signal });
    const native = await loadNative(read, library);
    const header = await readHeader(blob);
    const tokenizer = new Tokenizer(header.metadata);
    const config = readConfig(header);
    const limit = Math.min(context ?? DEFAULT_CONTEXT, config.context);
    const numPages = pages ?? 2 * Math.ceil(limit / PAGE_TOKENS);
    const model = await Model.load(native, header, blob, {
      context: limit,
      numPages,
      onProgress: (done, total) => {
        signal?.throwIfAborted();
        onProgress({ phase: "load", done, total });
      },
    });
    return new Engine({ blob, native, header, tokenizer, model, numPages });
  }

  /** Whether the file of a URL is kept by the browser. */
  static stored(url) {
    return isKept(url);
  }

  static removeStored(url) {
    return removeKept(url);
  }

  constructor({ blob, native, header, tokenizer, model, numPages }) {
    const { config } = model;
    Object.assign(this, { native, tokenizer, model, pages: new Pages(numPages), latest: null });
    this.sampler = new Sampler(native, config.vocabSize, model.context);
    this.defaultSettings = { ...DEFAULTS };
    this.chatFormat = readTemplate(header.metadata.get("tokenizer.chat_template"));
    const sizes = {};
    let parameters = 0;
    for (const { type, bytes, shape } of header.tensors.values()) {
      sizes[TYPES[type][0]] = (sizes[TYPES[type][0]] ?? 0) + bytes;
      parameters += shape.reduce((a, b) => a * b, 1);
    }
    this.info = {
      name: header.metadata.get("general.name") ?? config.family,
      architecture: config.family,
      quantization: Object.keys(sizes).reduce((a, b) => (sizes[a] >= sizes[b] ? a : b)),
      file_bytes: blob.size,
      parameters,
      vocab_size: config.vocabSize,
      context: model.context,
      trained_context: config.context,
      layers: config.layers,
      width: config.width,
      heads: config.heads,
      kv_heads: config.kvHeads,
      head_width: config.headWidth,
      has_chat: this.chatFormat !== null,
      bos: tokenizer.bos,
      eos: [...tokenizer.ends],
      instruction_set: native.instructionSet,
      threads: native.threads,
    };
  }

  memory() {
    return { wasm_bytes: this.native.buffer.byteLength, pages: this.pages.users.length, free_pages: this.pages.free.length };
  }

  // -- text -----------------------------------------------------------------------------------------

  tokenize(text, { special = false, bos = true } = {}) {
    return this.tokenizer.encode(text.toWellFormed(), { special, bos });
  }

  detokenize(ids, options) {
    return this.tokenizer.decode(ids, options);
  }

  piece(id) {
    return this.tokenizer.pieces[id] ?? "";
  }

  text(id) {
    return readable(this.tokenizer.bytes(id));
  }

  bytes(id) {
    return this.tokenizer.bytes(id);
  }

  isSpecial(id) {
    return this.tokenizer.control.has(id);
  }

  isEnd(id) {
    return this.tokenizer.ends.has(id);
  }

  chatPrompt(messages, { addGenerationPrompt = true } = {}) {
    const turns = chatTurns(this.chatFormat, messages);
    const text = turns.map(({ role, content }) => `<|im_start|>${role}\n${content}<|im_end|>\n`).join("");
    return addGenerationPrompt ? `${text}<|im_start|>assistant\n` : text;
  }

  /** Ids of the chat prompt. Control tokens written in a message are text. */
  chat(messages, { addGenerationPrompt = true } = {}) {
    const { tokenizer } = this;
    const [start, end] = ["<|im_start|>", "<|im_end|>"].map((text) => tokenizer.ids.get(text));
    const plain = (text) => tokenizer.encode(text.toWellFormed());
    const ids = chatTurns(this.chatFormat, messages)
      .flatMap(({ role, content }) => [start, ...plain(`${role}\n${content}`), end, ...plain("\n")]);
    return addGenerationPrompt ? [...ids, start, ...plain("assistant\n")] : ids;
  }

  // -- branches and sampling ------------------------------------------------------------------------

  branch() {
    return new Branch(this, [], [], 0);
  }

  sample(logits, settings, input) {
    return this.sampler.pick(logits, checkSettings(settings), input);
  }

  /** Sample a token and report candidates and stages, with the keys of a step of the server. */
  step(logits, settings, { top = 10, ...input }) {
    const step = this.sampler.step(logits, checkSettings(settings), input, top);
    const text = (id) => this.text(id);
    return {
      ...step,
      text: text(step.token),
      piece: text(step.token),
      candidates: step.candidates.map((candidate) => ({ ...candidate, text: text(candidate.token) })),
      stages: step.stages.map((stage) => ({ ...stage, top: stage.top.map(([id, chance]) => [id, chance, text(id)]) })),
    };
  }

  top(logits, count) {
    return this.sampler.top(logits, count).map((candidate) => ({ ...candidate, text: this.text(candidate.token) }));
  }

  score(logits, token) {
    return this.sampler.score(logits, token);
  }
}

/** A text: its tokens, and pages with the keys and values of the first `computed` of them. */
class Branch {
  constructor(engine, tokens, pages, computed) {
    Object.assign(this, { engine, tokens, pages, computed });
  }

  get length() {
    return this.tokens.length;
  }

  /** Add tokens and compute them. Returns the logits after the last one. */
  append(ids) {
    return this.extend(ids, Infinity);
  }

  /** Add tokens and compute at most `maxTokens`. Returns the logits after the last token, null if some are not computed yet. */
  extend(ids, maxTokens) {
    const { engine } = this;
    const { context, config } = engine.model;
    if (this.length + ids.length > context) {
      throw new TabError("memory", `The text would have ${this.length + ids.length} tokens; this tab holds ${context}.`);
    }
    const unknown = ids.find((id) => !Number.isInteger(id) || id < 0 || id >= config.vocabSize);
    if (unknown !== undefined) throw new TabError("unsupported_setting", `Token ${unknown} is not in the vocabulary.`);
    this.tokens.push(...ids);
    if (this.length === 0) throw new TabError("unsupported_setting", "The text has no tokens.");
    let budget = maxTokens;
    let logits = null;
    while (this.computed < this.length && budget > 0) {
      const count = Math.min(MAX_BATCH, budget, this.length - this.computed);
      const end = this.computed + count;
      this.prepareWriting(end);
      const view = engine.model.run(this.tokens.slice(this.computed, end), this.computed, this.pages, { wantsLogits: end === this.length });
      this.computed = end;
      budget -= count;
      logits = view?.slice() ?? null;
    }
    return this.computed < this.length ? null : logits ?? this.logits();
  }

  /** The logits after the last token, computed again. */
  logits() {
    if (this.computed < this.length) return this.append([]);
    return this.engine.model.run([this.tokens.at(-1)], this.length - 1, this.pages).slice();
  }

  /** Make sure that the pages of the positions from `computed` to `end` exist and belong to this branch only. */
  prepareWriting(end) {
    const { pages: store, model } = this.engine;
    const first = Math.floor(this.computed / PAGE_TOKENS);
    if (first < this.pages.length && store.users[this.pages[first]] > 1) {
      const page = store.take();
      model.copyPage(this.pages[first], page);
      store.release([this.pages[first]]);
      this.pages[first] = page;
    }
    while (this.pages.length * PAGE_TOKENS < end) this.pages.push(store.take());
  }

  /** A branch with the first `length` tokens. Its pages are shared until one of the branches writes. */
  fork(length = this.length) {
    this.checkLength(length);
    const computed = Math.min(this.computed, length);
    const pages = this.engine.pages.share(this.pages.slice(0, Math.ceil(computed / PAGE_TOKENS)));
    return new Branch(this.engine, this.tokens.slice(0, length), pages, computed);
  }

  /** Keep the first `length` tokens. */
  rewind(length) {
    this.checkLength(length);
    this.tokens.length = length;
    this.computed = Math.min(this.computed, length);
    this.engine.pages.release(this.pages.splice(Math.ceil(this.computed / PAGE_TOKENS)));
  }

  /** Release the pages. The branch keeps its tokens and can be computed again. */
  free() {
    this.engine.pages.release(this.pages.splice(0));
    this.computed = 0;
  }

  checkLength(length) {
    if (!Number.isInteger(length) || length < 0 || length > this.length) {
      throw new TabError("unsupported_setting", `The length must be from 0 to ${this.length}, got ${length}.`);
    }
  }

  /** What the model computed at a token: attention [layers][heads][index + 1], the residual stream
   * [layers + 1][width], the same between attention and feed-forward [layers][width], and with `lens` the most
   * likely tokens that the head reads from each layer. */
  look(index, { lens = 0 } = {}) {
    const { engine } = this;
    if (!Number.isInteger(index) || index < 0 || index >= this.length) {
      throw new TabError("unsupported_setting", `The token must be from 0 to ${this.length - 1}, got ${index}.`);
    }
    if (this.computed <= index) this.append([]);
    const inside = engine.model.look(this.tokens[index], index, this.pages);
    const { width, layers } = engine.model.config;
    if (lens > 0) {
      inside.lens = Array.from({ length: layers + 1 }, (_, n) => (
        engine.top(engine.model.head(inside.hidden.subarray(n * width, (n + 1) * width)).slice(), lens)
      ));
    }
    return inside;
  }
}
