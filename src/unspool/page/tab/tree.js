// The tree of tokens in the browser tab: `/v1/tree` on the engine of this worker, with the server's JSON.

import {
  badRequest, branchJson, chosenStep, DEFAULT_TOKENS, forkBranch, mergeSettings, newBranch, newId, now,
  partialOf, promptBytes, readableToken, redecode, reply, RequestError, rewound, samplingOf, setSteps, stepIndex,
  summary, textBytes, titleOf, tokensOf,
} from "./branches.js";
import { editText } from "./edit.js";
import { lookJson } from "./look.js";
import { incompleteUtf8, joinBytes, numCommon, readable } from "./text.js";

const SLICE = 32; // prompt tokens that are computed before the worker reads its messages again
const LONG_PROMPT = 256; // tokens to compute, from which on there are events for their progress
const FUTURES_BATCH = 16;
const MAX_CACHED = 6; // texts whose keys and values stay computed

/** Let the worker read its messages, such as a request to stop. */
const channel = new MessageChannel();
const waiting = [];
channel.port1.onmessage = () => waiting.shift()?.();
const readMessages = () => new Promise((done) => {
  waiting.push(done);
  channel.port2.postMessage(null);
});

// -- computed texts: each request forks the one that begins most like its text ------------------------

class ComputedTexts {
  constructor(engine) {
    this.engine = engine;
    this.branches = []; // of the engine, the last used at the end
  }

  /** Append tokens to a branch of the engine; if the pages do not suffice, drop the oldest text and continue. */
  append(branch, tokens) {
    const end = branch.length + tokens.length;
    for (;;) {
      try {
        return branch.append(tokens.slice(tokens.length - (end - branch.length)));
      } catch (error) {
        if (error.code !== "memory" || !this.branches.length) throw error;
        this.branches.shift().free();
      }
    }
  }

  /** A branch of the engine with the longest computed beginning of these tokens: `{branch, reused}`. */
  take(tokens) {
    let best = null;
    let shared = 0;
    for (const branch of this.branches) {
      const common = numCommon(branch.tokens, tokens);
      if (common > shared) [best, shared] = [branch, common];
    }
    return { branch: best ? best.fork(shared) : this.engine.branch(), reused: shared };
  }

  keep(branch) {
    this.branches.push(branch);
    while (this.branches.length > MAX_CACHED) this.branches.shift().free();
  }
}

// -- the tree -----------------------------------------------------------------------------------------

export class Tree {
  /** `storage`: keeps branches and sessions; null: only in memory. */
  constructor(engine, model, storage = null) {
    Object.assign(this, { engine, model, storage });
    this.branches = new Map();
    this.sessions = new Map();
    this.computed = engine && new ComputedTexts(engine);
  }

  // -- branches by id

  open(id) {
    const branch = this.branches.get(id);
    if (!branch || branch.deleted !== null) throw new RequestError(404, `no such branch: '${String(id).slice(0, 60)}'`, { code: "branch_not_found" });
    return branch;
  }

  /** The branch, which must not be running, and whose model must be the one in use. */
  openFree(id) {
    const branch = this.open(id);
    if (branch.writing !== null) throw new RequestError(409, "the branch is running; wait, stop it first, or fork it", { code: "branch_busy" });
    return branch;
  }

  checkModel(branch) {
    if (branch.model === this.model) return;
    throw new RequestError(409, `${branch.model} wrote this text; open that model to continue it`, { code: "other_model" });
  }

  reply(branch, since, options) {
    return reply(branch, this.branches, this.engine, since, options);
  }

  add(...branches) {
    for (const branch of branches) this.branches.set(branch.id, branch);
    this.save(...branches);
  }

  save(...branches) {
    this.storage?.put("branches", ...branches.map(({ writing, ...fields }) => fields));
  }

  // -- computing

  /** The logits after each of the last `count` tokens of a text, one after another: calls `use(logits, number)`. */
  async eachLogits(tokens, count, use, signal = null) {
    const first = tokens.slice(0, tokens.length - count + 1);
    const { branch, logits } = await this.compute(first, { signal });
    try {
      use(logits, 0);
      for (let number = 1; number < count; number += 1) {
        await readMessages();
        signal?.throwIfAborted();
        use(this.computed.append(branch, [tokens[first.length + number - 1]]), number);
      }
    } finally {
      this.computed.keep(branch);
    }
  }

  /** A branch of the engine with these tokens computed: `{branch, logits, reused}`; `progress(computed)` is called on the way. */
  async compute(tokens, { signal = null, isStopped = () => false, progress = () => {}, fresh = false } = {}) {
    const { branch, reused } = fresh ? { branch: this.engine.branch(), reused: 0 } : this.computed.take(tokens);
    let logits = null;
    try {
      progress(reused);
      for (let at = reused; at < tokens.length && !isStopped(); at += SLICE) {
        if (at > reused) await readMessages();
        signal?.throwIfAborted();
        logits = this.computed.append(branch, tokens.slice(at, at + SLICE));
        progress(branch.length);
      }
      return { branch, logits: logits ?? branch.logits(), reused: Math.min(reused, tokens.length - 1) };
    } catch (error) {
      branch.free();
      throw error;
    }
  }

  async logitsAfter(tokens, signal) {
    const { branch, logits } = await this.compute(tokens, { signal });
    this.computed.keep(branch);
    return logits;
  }

  checkLength(count) {
    const { context } = this.engine.info;
    if (count > context) {
      throw badRequest(`the prompt has ${count} tokens and the model's context holds ${context}; shorten the prompt`, null, "context_length_exceeded");
    }
  }

  encode(text) {
    return this.engine.tokenize(text, { special: false, bos: false });
  }

  /** Tokens with their bytes and readable texts. */
  pieces(ids) {
    let partial = [];
    return ids.map((id) => {
      const bytes = promptBytes(this.engine, id);
      const piece = { id, text: readable(bytes, partial), bytes: [...bytes] };
      partial = incompleteUtf8([...partial, ...bytes]);
      return piece;
    });
  }

  /** Steps with the scores of tokens that follow others. */
  async scoredSteps(before, tokens, index, signal) {
    const steps = [];
    await this.eachLogits([...before, ...tokens.slice(0, -1)], tokens.length, (logits, number) => {
      const score = this.engine.score(logits, tokens[number]);
      steps.push(chosenStep(this.engine, tokens[number], before.length + number, index + number, score));
    }, signal);
    return steps;
  }

  // -- prompts

  promptOf({ prompt, messages }) {
    if ((prompt == null) === (messages == null)) throw badRequest("give either prompt or messages", "prompt");
    return messages ? this.chatPrompt(messages) : this.textPrompt(prompt);
  }

  textPrompt(prompt) {
    const { engine } = this;
    const isText = typeof prompt === "string";
    const ids = isText ? [...engine.tokenize(prompt, { special: false, bos: true })] : prompt;
    if (!ids.length) throw badRequest("the prompt is empty; give at least one token", "prompt");
    if (!ids.every((id) => Number.isSafeInteger(id) && id >= 0 && id < engine.info.vocab_size)) {
      throw badRequest(`a prompt of tokens must have integers from 0 to ${engine.info.vocab_size - 1}`, "prompt");
    }
    this.checkLength(ids.length);
    const hasStart = isText && ids.length > this.encode(prompt).length;
    return { ids, text: isText ? prompt : engine.detokenize(ids), added: hasStart ? [0] : [], messages: null, spans: [] };
  }

  /** The prompt of a conversation: its tokens, and which of them are the words of each message. */
  chatPrompt(messages) {
    const { engine } = this;
    if (!messages.length || !messages.every(({ role, content }) => role && typeof (content ?? "") === "string")) {
      throw badRequest("messages must be a list of {role, content} with texts", "messages");
    }
    if (!engine.info.has_chat) throw badRequest("this model has no chat template; give a prompt instead", "messages");
    const ids = [...engine.chat(messages)];
    this.checkLength(ids.length);
    const starts = ids.flatMap((id, at) => (engine.isSpecial(id) && engine.text(id) === "<|im_start|>" ? [at] : []));
    const added = starts.length - 1 - messages.length; // a system message of the template counts to the first message
    const edges = [0, ...starts.slice(added + 1), ids.length];
    const spans = messages.map(({ role, content }, number) => ({
      role, start: edges[number], end: edges[number + 1],
      content: this.contentOf(ids, edges[number], edges[number + 1], content ?? ""),
    }));
    spans.push({ role: "assistant", start: edges.at(-2), end: ids.length, content: null });
    const inContent = new Set(spans.flatMap(({ content }) => (content ? range(...content) : [])));
    return {
      ids, text: engine.chatPrompt(messages), messages, spans, added: range(0, ids.length).filter((at) => !inContent.has(at)),
    };
  }

  /** The tokens of a message's words: the last occurrence, as the template may have the same words before it. */
  contentOf(ids, start, end, words) {
    const pieces = ids.slice(start, end).map((id) => promptBytes(this.engine, id));
    const text = latin(joinBytes(pieces));
    let content = latin(new TextEncoder().encode(words));
    if (!text.includes(content)) content = content.trim();
    const place = content ? text.lastIndexOf(content) : -1;
    if (place < 0) return null;
    const span = [];
    let at = 0;
    pieces.forEach((piece, number) => {
      if (at < place + content.length && at + piece.length > place) span.push(start + number);
      at += piece.length;
    });
    return [span[0], span.at(-1) + 1];
  }

  /** The tokens that the chat template adds after an answer for the next message. */
  encodeTurn(branch, { role, content }) {
    const { engine } = this;
    if (branch.prompt.messages === null) throw badRequest("the branch has no messages; append text instead", "message");
    const answer = branch.steps.map(({ text }) => text).join("").trim();
    const before = [...branch.prompt.messages, { role: "assistant", content: answer }];
    const head = engine.chatPrompt(before, { addGenerationPrompt: false });
    const text = engine.chatPrompt([...before, { role, content }]);
    const after = text.slice(head.lastIndexOf("<|im_end|>"));
    const ids = [...engine.tokenize(after, { special: true, bos: false })];
    return engine.isEnd(branch.steps.at(-1)?.token) && engine.isEnd(ids[0]) ? ids.slice(1) : ids;
  }

  // -- the verbs

  create(body) {
    if (body.session != null) this.session(body.session);
    if (body.model != null && body.model !== this.model) {
      throw new RequestError(404, `no such model: '${body.model}'; this tab has ${this.model}`, { code: "model_not_found" });
    }
    const branch = newBranch({
      model: this.model, prompt: this.promptOf(body), settings: mergeSettings({}, body), max_tokens: body.max_tokens ?? null,
      name: body.name ?? null, session: body.session ?? null,
    });
    this.add(branch);
    return this.reply(branch, 0, { prompt: true });
  }

  async append(id, { text, tokens, message }, signal) {
    const branch = this.openFree(id);
    this.checkModel(branch);
    const since = branch.steps.length;
    const added = message ? this.encodeTurn(branch, message) : tokens ?? (text == null ? null : this.encode(text));
    if (!added?.length) throw badRequest("give either text or tokens", "text");
    await this.locked(branch, async () => setSteps(branch, await this.appended(branch, rewound(branch, since), added, signal)));
    this.save(branch);
    return this.reply(branch, Math.min(since, branch.steps.length));
  }

  /** Steps with further tokens, scored by the model. */
  async appended(branch, steps, tokens, signal) {
    const before = [...branch.prompt.ids, ...steps.map(({ token }) => token)];
    this.checkLength(before.length + tokens.length);
    const added = await this.scoredSteps(before, tokens, steps.length, signal);
    return redecode(this.engine, [...steps, ...added]).steps;
  }

  /** Nothing else changes the branch while `work` runs. */
  async locked(branch, work) {
    const lock = { stop: () => {}, setPace: () => {}, over: Promise.resolve() };
    branch.writing = lock;
    try {
      return await work();
    } finally {
      if (branch.writing === lock) branch.writing = null;
    }
  }

  async choose(id, { at: place, token, text, fork = true, name = null }, signal) {
    const branch = fork ? this.open(id) : this.openFree(id);
    this.checkModel(branch);
    const at = stepIndex(branch, place, "at");
    if ((token == null) === (text == null)) throw badRequest("give either text or tokens", "text");
    const steps = await this.appended(branch, rewound(branch, at), token == null ? this.encode(text) : [token], signal);
    return this.changed(branch, steps, at, { fork, name });
  }

  /** The branch with other steps from `at` on, in place or as a fork. */
  changed(branch, steps, at, { fork, name = null, prompt = null }) {
    let target = branch;
    if (fork) target = forkBranch(branch, steps, at, name);
    else setSteps(branch, steps);
    if (prompt) target.prompt = prompt;
    this.add(target);
    return this.reply(target, at, { prompt: prompt !== null });
  }

  fork(id, { at: place, name = null }) {
    const branch = this.open(id);
    const at = stepIndex(branch, place, "at");
    return this.changed(branch, rewound(branch, at), at, { fork: true, name });
  }

  rewind(id, { to: place }) {
    const branch = this.openFree(id);
    const to = stepIndex(branch, place, "to");
    return this.changed(branch, rewound(branch, to), to, { fork: false });
  }

  async edit(id, body, signal) {
    const { fork = true, name = null, score = true } = body;
    const branch = fork ? this.open(id) : this.openFree(id);
    this.checkModel(branch);
    const { prompt, steps, since } = editText(this, branch, body);
    this.checkLength((prompt ?? branch.prompt).ids.length + steps.length);
    const draft = { ...branch, prompt: prompt ?? branch.prompt, steps };
    if (score) {
      for await (const part of this.scoreParts(draft, since, signal)) draft.steps = part.steps;
    }
    return this.changed(branch, draft.steps, since, { fork, name, prompt });
  }

  /** Score steps from `since` on in parts: yields `{first, count, steps}`. */
  async* scoreParts(branch, since, signal) {
    let size = 8;
    let { steps } = branch;
    for (let first = since; first < steps.length;) {
      const part = steps.slice(first, first + size);
      const before = tokensOf({ ...branch, steps }, first);
      const scored = await this.scoredSteps(before, part.map(({ token }) => token), first, signal);
      const added = part.map((step, number) => {
        const { logprob, rank, entropy } = scored[number];
        return { ...step, logprob, rank, entropy };
      });
      steps = [...steps.slice(0, first), ...added, ...steps.slice(first + part.length)];
      yield { first, count: part.length, steps };
      first += part.length;
      size = Math.min(2 * size, 64);
    }
  }

  async* score(id, signal) {
    const branch = this.open(id);
    this.checkModel(branch);
    const since = branch.steps.findIndex(({ logprob, rank }) => logprob === null && rank === null);
    let scored = 0;
    if (since >= 0) {
      let current = branch.steps;
      for await (const { first, count, steps } of this.scoreParts(branch, since, signal)) {
        if (branch.deleted !== null || branch.writing !== null || branch.steps !== current) break;
        current = branch.steps = steps;
        scored += count;
        const part = steps.slice(first, first + count);
        const column = (name) => part.map((step) => step[name]);
        yield ["scores", { first, logprob: column("logprob"), rank: column("rank"), entropy: column("entropy") }];
      }
      this.save(branch);
    }
    yield ["done", { scored, of: id }];
  }

  // -- writing

  /** Resume a branch: yields events as the server's stream. */
  async* resume(id, body, signal) {
    const branch = body.n > 1 ? this.open(id) : this.openFree(id);
    this.checkModel(branch);
    const settings = mergeSettings(branch.settings, body);
    const max = body.max_tokens ?? branch.max_tokens ?? DEFAULT_TOKENS;
    if (!Number.isSafeInteger(max) || max < 1) throw badRequest(`max_tokens must be an integer >= 1, got ${max}`, "max_tokens");
    const { stream } = redecode(this.engine, branch.steps, settings.stop, false);
    if (stream.matchedStop !== null) {
      throw badRequest(`the text has ended at its stop string '${stream.matchedStop.slice(0, 80)}'; rewind it, or resume with a different stop`, "stop", "text_ended");
    }
    const count = body.n ?? 1;
    const targets = count === 1 ? [branch] : range(0, count).map(() => forkBranch(branch, rewound(branch, branch.steps.length), branch.steps.length));
    const control = { isStopped: false, pace: body.pace ?? null };
    const writings = targets.map((target, number) => new Writing(this, target, { ...settings, sample: settings.sample + number }, max, control));
    if (count > 1) this.add(...targets);
    for (const { branch: target, settings: sampled } of writings) Object.assign(target, { settings: sampled, max_tokens: body.max_tokens ?? target.max_tokens });
    try {
      for (const writing of writings) yield* writing.start();
      let due = performance.now();
      for (let open = writings; open.length; open = open.filter(({ isOver }) => !isOver)) {
        for (const writing of open) {
          signal?.throwIfAborted();
          yield* writing.step(signal);
          await readMessages();
        }
        if (control.pace) {
          due = Math.max(due + 1000 / control.pace, performance.now());
          while (performance.now() < due && !control.isStopped) await new Promise((done) => { setTimeout(done, Math.min(50, due - performance.now())); });
        }
      }
    } finally { // the page has gone, or an error: what was written stays
      for (const writing of writings) if (!writing.isOver) writing.end("interrupted");
      this.save(...targets);
    }
  }

  async stop(id) {
    const branch = this.open(id);
    const { writing } = branch;
    if (writing) {
      writing.stop();
      await writing.over;
    }
    return this.reply(branch, null);
  }

  // -- looking

  /** One step with other settings; the branch stays unchanged. */
  async try(id, { at: place, ...body }, signal) {
    const branch = this.open(id);
    this.checkModel(branch);
    const at = stepIndex(branch, place, "at");
    const settings = mergeSettings(branch.settings, { ...body, stop: null });
    const before = tokensOf(branch, at);
    const head = { object: "tree.try", branch: id, at };
    if (before.length >= this.engine.info.context) return { ...head, step: null };
    const since = performance.now();
    const logits = await this.logitsAfter(before, signal);
    const step = this.stepOf(logits, before, branch.prompt.ids.length, settings);
    step.seconds = (performance.now() - since) / 1000;
    step.text = redecode(this.engine, [...branch.steps.slice(0, at), step]).steps.at(-1).text;
    step.finish_reason = settings.end && this.engine.isEnd(step.token) ? "stop" : "length";
    return { ...head, step };
  }

  /** A sampled step; its text is not decoded yet. */
  stepOf(logits, before, promptLength, settings) {
    const { engine } = this;
    const position = before.length;
    const sampled = engine.step(logits, samplingOf(settings), { history: before, promptLength, position, sample: settings.sample, top: settings.top });
    const partial = partialOf(engine, before);
    const named = partial.length > 0;
    const textAfter = (token, text) => (named || engine.isSpecial(token) ? readableToken(engine, token, partial) : text);
    return {
      index: position - promptLength, position, token: sampled.token, piece: readableToken(engine, sampled.token, partial), text: "",
      bytes: [...textBytes(engine, sampled.token)], logprob: sampled.logprob, rank: sampled.rank, entropy: sampled.entropy,
      probability: sampled.probability, draw: sampled.draw,
      candidates: sampled.candidates.map((candidate) => ({ ...candidate, text: textAfter(candidate.token, candidate.text) })),
      stages: settings.trace ? sampled.stages.map((stage) => ({ ...stage, top: stage.top.map(([token, chance, text]) => [token, chance, textAfter(token, text)]) })) : [],
      seconds: 0, finish_reason: null, draft: null, retracts: 0, chosen: false,
    };
  }

  async look(id, query, signal) {
    const branch = this.open(id);
    this.checkModel(branch);
    const prompt = branch.prompt.ids.length;
    if (query.at != null && query.step != null) throw badRequest("give either at or step", "at");
    let position = query.at ?? -1;
    if (query.step != null) position = prompt + stepIndex(branch, query.step, "step") - 1;
    const tokens = tokensOf(branch);
    if (!(position >= -tokens.length && position < tokens.length)) {
      throw badRequest(`position ${position} is out of range: the text has ${tokens.length} tokens, 0 to ${tokens.length - 1}`, "at");
    }
    position = (position + tokens.length) % tokens.length;
    const { branch: computed, logits } = await this.compute(tokens.slice(0, position + 1), { signal });
    this.computed.keep(computed);
    return { object: "tree.look", branch: id, prompt_tokens: prompt, ...lookJson(this.engine, computed, logits, tokens, position, query) };
  }

  /** The most likely continuations: yields events as they are found, the largest mass first. */
  async* futures(id, { at: place = null, mass = 0.01, depth = 8, nodes = 200, width = 50, sampled = false, seconds = 20 }, signal) {
    const branch = this.open(id);
    this.checkModel(branch);
    const at = stepIndex(branch, place, "at");
    yield ["start", { object: "tree.futures", branch: id, at, sampled }];
    const start = tokensOf(branch, at);
    const until = performance.now() + 1000 * seconds;
    const { engine } = this;
    const open = [{ number: 0, mass: 1, tokens: [], partial: partialOf(engine, start) }];
    let count = 0;
    const batch = []; // the server computes them together
    while (batch.length || (open.length && count < nodes && performance.now() < until)) {
      if (!batch.length) batch.push(...open.sort((a, b) => b.mass - a.mass || a.number - b.number).splice(0, FUTURES_BATCH));
      const node = batch.shift();
      const text = [...start, ...node.tokens];
      const logits = await this.logitsAfter(text, signal);
      const likely = sampled
        ? this.stepOf(logits, text, branch.prompt.ids.length, { ...branch.settings, top: width, trace: false }).candidates.toSorted((a, b) => b.probability - a.probability)
        : engine.top(logits, width);
      const children = [];
      for (const { token, probability } of likely) {
        if (probability <= 0 || node.mass * probability < mass || count >= nodes) break;
        const isFinished = engine.isEnd(token) || text.length + 1 >= engine.info.context;
        const child = { node: count += 1, token, text: readableToken(engine, token, node.partial), p: probability, mass: node.mass * probability };
        children.push(isFinished ? { ...child, finished: true } : child);
        if (!isFinished && node.tokens.length + 1 < depth) {
          open.push({ number: child.node, mass: child.mass, tokens: [...node.tokens, token], partial: incompleteUtf8([...node.partial, ...textBytes(engine, token)]) });
        }
      }
      const listed = children.reduce((sum, { p }) => sum + p, 0);
      yield ["grown", { node: node.number, other_probability: Math.max(0, 1 - listed), children }];
      await readMessages();
      signal?.throwIfAborted();
    }
    yield ["done", { nodes: count, complete: open.length === 0 && count < nodes }];
  }

  // -- lists and sessions

  list({ limit = 100, cursor = null, ids = null }) {
    const position = ({ created, id }) => `${created.toFixed(6).padStart(20, "0")}:${id}`;
    let all = [...this.branches.values()].filter(({ deleted, id }) => deleted === null && (!ids || ids.includes(id)));
    all.sort((a, b) => (position(a) < position(b) ? 1 : -1));
    if (cursor) all = all.filter((branch) => position(branch) < cursor);
    const page = all.slice(0, limit);
    return {
      object: "list", data: page.map((branch) => summary(branch, this.branches)), next: all.length > limit ? position(page.at(-1)) : null,
    };
  }

  update(id, body) {
    const branch = this.open(id);
    for (const name of ["name", "bookmarks"]) if (name in body) branch[name] = body[name];
    if (body.session != null) branch.session = this.session(body.session).id;
    if ("pace" in body) branch.writing?.setPace(body.pace);
    branch.updated = now();
    this.save(branch);
    return this.reply(branch, null);
  }

  delete(id) {
    const branch = this.open(id);
    branch.writing?.stop();
    branch.deleted = now();
    this.save(branch);
    return { id, object: "tree.branch.deleted", deleted: true };
  }

  restore(id) {
    const branch = this.branches.get(id);
    if (branch) branch.deleted = null;
    this.save(this.open(id));
    return this.reply(branch, 0, { prompt: true });
  }

  session(id) {
    const session = this.sessions.get(id);
    if (!session || session.deleted !== null) throw new RequestError(404, `no such session: '${String(id).slice(0, 60)}'`, { code: "session_not_found" });
    return session;
  }

  inSession(id) {
    return [...this.branches.values()].filter(({ session, deleted }) => session === id && deleted === null);
  }

  sessionJson(session) {
    const branches = this.inSession(session.id);
    const newest = branches.reduce((last, branch) => (last && last.updated >= branch.updated ? last : branch), null);
    const ownTokens = (branch) => (branch.origin_at === null ? branch.prompt.ids.length + branch.steps.length : Math.max(0, branch.steps.length - branch.origin_at));
    return {
      id: session.id, object: "tree.session", title: session.title ?? (branches.length ? titleOf(branches[0]) : ""), tags: session.tags,
      created: session.created, updated: Math.max(session.updated, ...branches.map(({ updated }) => updated)), model: newest?.model ?? null,
      branches: branches.length, tokens: branches.reduce((sum, branch) => sum + ownTokens(branch), 0), preview: newest ? summary(newest, this.branches).preview : "",
    };
  }

  fullSession(session) {
    return { ...this.sessionJson(session), branches: this.inSession(session.id).map((branch) => summary(branch, this.branches)), view: session.view };
  }

  saveSession(session) {
    this.sessions.set(session.id, session);
    this.storage?.put("sessions", session);
    return session;
  }

  createSession({ title = null, tags = [], view = {} }) {
    const time = now();
    return this.fullSession(this.saveSession({ id: newId("session"), title, tags: tags ?? [], view: view ?? {}, created: time, updated: time, deleted: null }));
  }

  updateSession(id, { view, ...body }) {
    const session = this.session(id);
    for (const name of ["title", "tags"]) if (name in body) Object.assign(session, { [name]: body[name], updated: now() });
    if (view != null) session.view = view;
    return this.sessionJson(this.saveSession(session));
  }

  deleteSession(id, deleted = now()) {
    const session = this.sessions.get(id) ?? this.session(id);
    const branches = [...this.branches.values()].filter((branch) => branch.session === id && (deleted === null ? branch.deleted === session.deleted : branch.deleted === null));
    for (const branch of branches) branch.deleted = deleted;
    session.deleted = deleted;
    this.save(...branches);
    this.saveSession(session);
    return deleted === null ? this.fullSession(session) : { id, object: "tree.session.deleted", deleted: true };
  }

  duplicateSession(id) {
    const session = this.session(id);
    const copy = this.createSession({ title: `${this.sessionJson(session).title} (copy)`, tags: session.tags });
    const originals = this.inSession(id);
    const copies = new Map(originals.map((branch) => [branch.id, { ...branch, id: newId("branch"), session: copy.id, writing: null }]));
    for (const branch of copies.values()) branch.origin = copies.get(branch.origin)?.id ?? null;
    this.add(...copies.values());
    let view = JSON.stringify(session.view);
    for (const [old, { id: name }] of copies) view = view.replaceAll(old, name);
    return this.fullSession(this.saveSession({ ...this.session(copy.id), view: JSON.parse(view) }));
  }

  listSessions({ query = "", tag = null, limit = 100, before = null }) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    let all = [...this.sessions.values()].filter(({ deleted, tags }) => deleted === null && (tag === null || tags.includes(tag)));
    all = all.filter((session) => {
      const texts = words.length ? this.inSession(session.id).map(({ prompt, steps }) => prompt.text + steps.map(({ text }) => text).join("")) : [];
      const all = [this.sessionJson(session).title, ...session.tags, ...texts].join("\n").toLowerCase();
      return words.every((word) => all.includes(word));
    }).map((session) => this.sessionJson(session));
    all.sort((a, b) => b.updated - a.updated || (a.id < b.id ? 1 : -1));
    if (before) all = all.slice(all.findIndex(({ id }) => id === before) + 1);
    return { object: "list", data: all.slice(0, limit), has_more: all.length > limit };
  }
}

const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, at) => from + at);
const latin = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");

// -- one resume of one branch ---------------------------------------------------------------------------

class Writing {
  constructor(tree, branch, settings, max, control) {
    Object.assign(this, { tree, branch, settings, max, control, isOver: false, written: 0, stoppedBy: null, first: null });
    this.began = performance.now();
    this.before = branch.prompt.ids.length + branch.steps.length;
    this.over = new Promise((done) => { this.isDone = done; });
    this.computed = null;
    this.isStopped = false;
  }

  stop() {
    this.isStopped = true;
    this.control.isStopped = true; // ends the pause of a pace
  }

  setPace(pace) {
    this.control.pace = pace;
  }

  event(name, data) {
    return [name, { branch: this.branch.id, ...data }];
  }

  json() {
    return branchJson(this.branch, this.tree.branches);
  }

  /** Text that was shown only because the text had ended is held back again. */
  * start() {
    const { branch, tree } = this;
    const before = branch.steps;
    const { stream, steps } = redecode(tree.engine, rewound(branch, before.length), this.settings.stop, false);
    const firstNew = steps.findIndex((step, at) => step.text !== before[at].text);
    setSteps(branch, steps);
    branch.writing = this;
    this.stream = stream;
    this.last = performance.now();
    yield this.event("branch", { data: this.json() });
    if (firstNew < 0) return;
    yield this.event("rewind", { to: firstNew, taken: before.length - firstNew });
    for (const step of steps.slice(firstNew)) yield this.event("step", step);
  }

  * tryEnd(reason) {
    this.end(reason);
    yield this.event("done", { data: this.json() });
  }

  /** Write one token. */
  async* step(signal) {
    const { branch, tree, settings } = this;
    const { engine } = tree;
    const tokens = tokensOf(branch);
    if (this.isStopped) return yield* this.tryEnd("interrupted");
    if (tokens.length >= engine.info.context) return yield* this.tryEnd("context");
    let logits;
    if (this.computed === null || !settings.cache) {
      this.computed?.free();
      this.computed = null; // a failure below must not free it again
      const progress = [];
      const report = (computed) => { if (tokens.length - computed >= LONG_PROMPT || progress.length) progress.push(computed); };
      const computing = tree.compute(tokens, { signal, isStopped: () => this.isStopped, progress: report, fresh: !settings.cache });
      let isDone = false;
      computing.then(() => { isDone = true; }, () => { isDone = true; });
      while (!isDone) { // events while a long prompt is computed
        await readMessages();
        if (progress.length && this.written === 0) yield this.event("prompt", { computed: progress.splice(0).at(-1), total: tokens.length });
      }
      const result = await computing;
      this.computed = result.branch;
      logits = result.logits;
      this.reused ??= result.reused;
      if (this.isStopped) return yield* this.tryEnd("interrupted");
    } else logits = tree.computed.append(this.computed, tokens.slice(this.computed.length));
    const step = tree.stepOf(logits, tokens, branch.prompt.ids.length, settings);
    this.written += 1;
    step.text = this.stream.push(step.bytes);
    step.finish_reason = this.reasonAfter(step);
    if (step.finish_reason !== null) step.text += this.stream.finish();
    const time = performance.now();
    step.seconds = (time - this.last) / 1000;
    this.last = time;
    this.first ??= (time - this.began) / 1000;
    branch.steps = [...branch.steps, step];
    yield this.event("step", step);
    if (step.finish_reason !== null) yield* this.tryEnd(step.finish_reason);
  }

  reasonAfter(step) {
    if (this.stream.matchedStop !== null) {
      this.stoppedBy = this.stream.matchedStop;
      return "stop";
    }
    if (this.settings.end && this.tree.engine.isEnd(step.token)) return "stop";
    if (this.written >= this.max) return "length";
    return step.position + 1 >= this.tree.engine.info.context ? "context" : null;
  }

  end(reason) {
    const { branch } = this;
    if (this.computed) this.tree.computed.keep(this.computed);
    this.computed = null;
    Object.assign(branch, { writing: null, finish_reason: reason, updated: now() });
    branch.last = {
      tokens_before: this.before, inserted_tokens: 0, reused_tokens: this.reused ?? 0, written_tokens: this.written,
      stopped_by: this.stoppedBy, drafted_tokens: 0, accepted_tokens: 0, first_token_seconds: this.first,
      total_seconds: (performance.now() - this.began) / 1000,
    };
    this.isOver = true;
    this.isDone();
  }
}

