// Runs requests on the tab's engine under node: [model, variant, threads] as arguments, a list of requests as JSON on
// standard input, a list of results on standard output. Floats are base64 of float32.
import { openAsBlob } from "node:fs";
import { readFile } from "node:fs/promises";
import { Worker } from "node:worker_threads";
import { Engine } from "../../src/unspool/page/tab/engine.js";

const folder = new URL("../../src/unspool/page/tab/", import.meta.url);
const floats = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("base64");
const write = (engine, branch, { settings, sample, count }) => {
  const promptLength = branch.length;
  let logits = branch.logits();
  while (branch.length < promptLength + count) {
    const input = { history: branch.tokens, promptLength, position: branch.length, sample };
    const { token } = engine.sample(logits, settings, input);
    logits = branch.append([token]);
  }
  return branch.tokens.slice(promptLength);
};

const ACTIONS = {
  info: (engine) => engine.info,
  encode: (engine, { texts, special }) => texts.map((text) => engine.tokenize(text, { special })),
  decode: (engine, { ids }) => engine.detokenize(ids),
  texts: (engine, { ids }) => ids.map((id) => engine.text(id)),
  chat: (engine, { messages }) => ({ ids: engine.chat(messages), text: engine.chatPrompt(messages) }),
  logits: (engine, { ids }) => {
    const branch = engine.branch();
    const logits = floats(branch.append(ids));
    branch.free();
    return logits;
  },
  // After forks, writes into both branches and rewinds: the logits of each, then those of fresh branches.
  tree: (engine, { ids, first, second, length }) => {
    const trunk = engine.branch();
    trunk.append(ids);
    const fork = trunk.fork(length);
    const early = fork.append(first);
    trunk.rewind(length - 1);
    const late = trunk.append(second);
    const again = fork.logits();
    fork.rewind(length);
    const back = fork.append(second);
    for (const branch of [trunk, fork]) branch.free();
    return { logits: [early, late, again, back].map(floats), memory: engine.memory() };
  },
  write: (engine, { texts, ...options }) => texts.map((ids, sample) => {
    const branch = engine.branch();
    branch.append(ids);
    const written = write(engine, branch, { sample, ...options });
    branch.free();
    return written;
  }),
  step: (engine, { ids, settings, promptLength }) => {
    const branch = engine.branch();
    const logits = branch.append(ids);
    const step = engine.step(logits, settings, { history: ids, promptLength, position: ids.length, top: 5 });
    branch.free();
    return step;
  },
  look: (engine, { ids, index }) => {
    const branch = engine.branch();
    branch.append(ids);
    const { attention, hidden, lens } = branch.look(index, { lens: 3 });
    branch.free();
    return { attention: floats(attention), hidden: floats(hidden), lens };
  },
};

const [model, variant, threads] = process.argv.slice(2);
const startThread = () => {
  if (threads === "failing") return { postMessage: () => {}, terminate: () => {}, set onerror(listener) { listener(); } };
  const worker = new Worker(new URL("tab_thread.mjs", import.meta.url));
  worker.on("message", () => worker.onmessage());
  worker.unref();
  return worker;
};
let text = "";
for await (const chunk of process.stdin) text += chunk;
const attempt = async (call) => {
  try {
    return await call();
  } catch (error) {
    if (error.name !== "TabError") throw error;
    return { error: error.message, code: error.code };
  }
};
const engine = await attempt(async () => Engine.open({
  source: await openAsBlob(model),
  read: (name) => readFile(new URL(name, folder)),
  relaxed: variant === "relaxed",
  threads: threads === "failing" ? 2 : Number(threads),
  start: startThread,
  pages: 64,
}));
const results = [];
for (const request of JSON.parse(text)) {
  results.push(engine.error ? engine : await attempt(() => ACTIONS[request.action](engine, request)));
}
console.log(JSON.stringify(results));
