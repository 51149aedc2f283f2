// The worker of the browser tab: opens the engine and answers the page's requests as the server would.
//
// Messages of the page: `{open: {source, name}}`, then `{id, method, path, body}` and `{abort: id}`. Answers: `{progress}`,
// `{ready}` or `{failed}`; `{id, status, json}`, or `{id, status}` followed by `{id, event: [name, data]}` and `{id, end}`.

import { badRequest, RequestError } from "./branches.js";
import { Engine } from "./engine.js";
import { openStorage } from "./storage.js";
import { decodeStrictly } from "./text.js";
import { Tree } from "./tree.js";

let tree = null;
let details = null; // of the model, for /v1/models
const running = new Map(); // id of a request -> AbortController

addEventListener("message", ({ data }) => {
  if (data.open) openModel(data.open);
  else if (data.abort) running.get(data.abort)?.abort();
  else answer(data);
});

async function openModel({ source, name }) {
  try {
    const engine = await Engine.open({ source, onProgress: (progress) => postMessage({ progress }) });
    const storage = await openStorage();
    tree = new Tree(engine, name, storage);
    const kept = await storage?.load();
    for (const branch of kept?.branches ?? []) tree.branches.set(branch.id, { ...branch, writing: null });
    for (const session of kept?.sessions ?? []) tree.sessions.set(session.id, session);
    const { info } = engine;
    details = {
      id: name, object: "model", created: 0, owned_by: "unspool",
      unspool: {
        loaded: true, loading: false, bytes: info.file_bytes, fits: true, source: "browser", default: typeof source === "string",
        system_fingerprint: null, context: info.context, vocabulary: info.vocab_size, precision: info.quantization,
        device: `this browser (${info.instruction_set}, ${info.threads === 1 ? "1 thread" : `${info.threads} threads`})`, chat: info.has_chat, tools: null, layers: info.layers, heads: info.heads,
        width: info.width, sight: "causal", mask_id: null,
      },
    };
    postMessage({ ready: details });
  } catch (error) {
    postMessage({ failed: { message: error.message, code: error.code ?? null } });
  }
}

async function answer({ id, method, path, body }) {
  const control = new AbortController();
  running.set(id, control);
  try {
    const url = new URL(path, "http://tab");
    const result = await route(method, url, body ?? {}, control.signal);
    if (result?.[Symbol.asyncIterator]) await sendEvents(id, result, control.signal);
    else postMessage({ id, status: 200, json: result });
  } catch (error) {
    if (error.name !== "AbortError") postMessage({ id, status: statusOf(error), json: bodyOf(error) });
  } finally {
    running.delete(id);
  }
}

async function sendEvents(id, events, signal) {
  const iterator = events[Symbol.asyncIterator]();
  let next = await iterator.next(); // an error before the first event is an ordinary answer
  postMessage({ id, status: 200 });
  try {
    for (; !next.done; next = await iterator.next()) {
      if (signal.aborted) {
        await iterator.return();
        return;
      }
      postMessage({ id, event: next.value });
    }
  } catch (error) {
    if (error.name !== "AbortError") postMessage({ id, event: ["error", bodyOf(error)] });
  }
  postMessage({ id, end: true });
}

/** Errors of the engine carry a code and a sentence for the user. */
function bodyOf(error) {
  if (error instanceof RequestError) return error.body();
  if (!error.code) console.error(error);
  return { error: { message: error.message, type: "server_error", param: null, code: error.code ?? null } };
}

const statusOf = (error) => error.status ?? (error.code === "unsupported_setting" || error.code === "unsupported_model" ? 400 : 500);

// -- routes -------------------------------------------------------------------------------------------

const numberOf = (text) => (text === null ? null : Number(text));

/** The query of a request as an object; these names are numbers. */
function queryOf({ searchParams }, ...numbers) {
  const values = Object.fromEntries(searchParams);
  for (const name of numbers) if (name in values) values[name] = numberOf(values[name]);
  return values;
}

async function collect(events, head) {
  const data = [];
  let last = {};
  for await (const [name, item] of events) {
    if (name === "done") last = item;
    else if (name !== "start") data.push(item);
  }
  return { ...head, ...last, data };
}

/** The reply of a resume without a stream. */
async function resumed(id, body, signal) {
  const since = tree.open(id).steps.length;
  const branches = new Set();
  let from = since;
  for await (const [name, data] of tree.resume(id, body, signal)) {
    branches.add(data.branch);
    if (name === "rewind") from = Math.min(from, data.to);
  }
  const replies = [...branches].map((name) => {
    const { turns, ...json } = tree.reply(tree.open(name), from); // they are in the replies of other verbs
    return json;
  });
  return body.n > 1 ? { object: "list", data: replies } : replies[0];
}

const BRANCH = {
  "GET ": (id, body, url) => {
    const query = queryOf(url, "since");
    return tree.reply(tree.open(id), query.steps === "false" ? null : query.since ?? 0, { prompt: query.prompt !== "false" });
  },
  "PATCH ": (id, body) => tree.update(id, body),
  "DELETE ": (id) => tree.delete(id),
  "POST restore": (id) => tree.restore(id),
  "POST append": (id, body, url, signal) => tree.append(id, body, signal),
  "POST fork": (id, body) => tree.fork(id, body),
  "POST rewind": (id, body) => tree.rewind(id, body),
  "POST choose": (id, body, url, signal) => tree.choose(id, body, signal),
  "POST edit": (id, body, url, signal) => tree.edit(id, body, signal),
  "POST try": (id, body, url, signal) => tree.try(id, body, signal),
  "POST stop": (id) => tree.stop(id),
  "POST resume": (id, body, url, signal) => (body.stream ? tree.resume(id, body, signal) : resumed(id, body, signal)),
  "POST score": async (id, body, url, signal) => {
    if (body.stream) return tree.score(id, signal);
    const { scored } = await collect(tree.score(id, signal), {});
    return { object: "tree.score", branch: id, scored };
  },
  "POST futures": (id, body, url, signal) => {
    if (body.stream) return tree.futures(id, body, signal);
    const { at = null, sampled = false } = body;
    return collect(tree.futures(id, body, signal), { object: "tree.futures", branch: id, at: at ?? tree.open(id).steps.length, sampled });
  },
  "GET look": (id, body, url, signal) => {
    const query = queryOf(url, "at", "step", "layer", "head", "top", "token");
    return tree.look(id, { ...query, heads: query.heads === "true" }, signal);
  },
};

const SESSION = {
  "GET ": (id) => tree.fullSession(tree.session(id)),
  "PATCH ": (id, body) => tree.updateSession(id, body),
  "DELETE ": (id) => tree.deleteSession(id),
  "POST restore": (id) => tree.deleteSession(id, null),
  "POST duplicate": (id) => tree.duplicateSession(id),
};

const ROUTES = {
  "GET /v1/models": () => ({ object: "list", data: [details] }),
  "GET /health": () => ({ status: "ok" }),
  "GET /v1/tree": (body, url) => tree.list({ ...queryOf(url, "limit"), ids: url.searchParams.has("id") ? url.searchParams.getAll("id") : null }),
  "POST /v1/tree": (body) => tree.create(body),
  "GET /v1/tree/sessions": (body, url) => tree.listSessions(queryOf(url, "limit")),
  "POST /v1/tree/sessions": (body) => tree.createSession(body),
  "POST /tokenize": (body) => tokenize(body),
  "POST /detokenize": ({ tokens }) => {
    const text = tree.engine.detokenize(tokens);
    return { content: text, prompt: text };
  },
  "GET /vocabularies": () => ({ data: [] }),
};

function route(method, url, body, signal) {
  const handler = ROUTES[`${method} ${url.pathname}`];
  if (handler) return handler(body, url);
  const [, session, sessionVerb = ""] = url.pathname.match(/^\/v1\/tree\/sessions\/([^/]+)(?:\/(\w+))?$/) ?? [];
  if (session) return called(SESSION[`${method} ${sessionVerb}`], method, url)(decodeURIComponent(session), body);
  const [, branch, verb = ""] = url.pathname.match(/^\/v1\/tree\/([^/]+)(?:\/(\w+))?$/) ?? [];
  return called(branch && BRANCH[`${method} ${verb}`], method, url)(branch && decodeURIComponent(branch), body, url, signal);
}

function called(handler, method, { pathname }) {
  if (!handler) throw new RequestError(404, `${method} ${pathname} needs a server: it is not available in the browser tab`, { code: "needs_server" });
  return handler;
}

function tokenize({ content = null, prompt = null, add_special: addStart = false, parse_special: special = true, with_pieces: withPieces = false, merges = false, vocabulary = null }) {
  const { engine } = tree;
  if (vocabulary !== null) throw badRequest("other vocabularies need a server", "vocabulary", "needs_server");
  const text = content ?? prompt;
  if (typeof text !== "string") throw badRequest("content must be a text in the browser tab", "content");
  const ids = [...engine.tokenize(text, { special, bos: content === null || addStart })];
  const reply = { tokens: ids, count: ids.length, max_model_len: engine.info.context };
  if (merges) reply.words = engine.tokenizer.mergeSteps(text);
  if (!withPieces) return reply;
  const pieces = tree.pieces(ids);
  reply.tokens = pieces.map(({ id, bytes }) => ({ id, piece: decodeStrictly(bytes) ?? bytes }));
  reply.pieces = pieces;
  return reply;
}
