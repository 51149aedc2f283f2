// Requests to the server, or to the engine in this tab: JSON, and streams of server-sent events.

import { isTab, requestTab } from "./tab/client.js";

/** The one place where requests leave the page. */
const send = isTab ? requestTab : (path, options) => fetch(path, options);

export class ApiError extends Error {
  /** An error that the server answered with; status 0: it did not answer. */
  constructor(status, message, { param = null, code = null } = {}) {
    super(message);
    this.name = "ApiError";
    Object.assign(this, { status, param, code });
  }

  get isOffline() {
    return this.status === 0;
  }
}

const NO_ANSWER = "The server does not answer. Is it still running?";
const KEY = "unspool.key";
const MAX_KEEPALIVE_CHARS = 20_000; // browsers allow 64 KB in all
const started = new Map(); // branch -> promise that its resume request was answered

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export const api = {
  key: storedKey(),
  /** Called with the id of a branch that the server does not have; returns its new id, or null. */
  recover: async () => null,

  /** Use an API key from now on; stored until the tab is closed. */
  useKey(key) {
    this.key = key.trim();
    try {
      sessionStorage.setItem(KEY, this.key);
    } catch {
      /* no storage: the page asks for it again after a reload */
    }
  },

  get: (path, options) => requestJson("GET", path, undefined, options),
  post: (path, body = {}, options) => requestJson("POST", path, body, options),
  patch: (path, body = {}, options) => requestJson("PATCH", path, body, options),
  delete: (path, options) => requestJson("DELETE", path, undefined, options),

  /** Send without waiting; the request is finished when the page closes. */
  sendLater(method, path, value) {
    const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
    const body = value === undefined ? undefined : JSON.stringify(value, wellFormed);
    if (body !== undefined) headers["content-type"] = "application/json";
    const keepalive = (body?.length ?? 0) < MAX_KEEPALIVE_CHARS;
    send(path, { method, headers, body, keepalive }).catch(() => {});
  },

  /** Yield events as they arrive: `{event, data, id}`. POST if there is a body. */
  async *stream(path, body = null, { signal, answered = () => {} } = {}) {
    const answer = await sendRequest(body === null ? "GET" : "POST", path, body ?? undefined, signal);
    answered();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    try {
      for (;;) {
        const { done, value } = await reader.read().catch((error) => {
          throw signal?.aborted ? error : new ApiError(0, NO_ANSWER);
        });
        if (done) return;
        const parts = (buffer + value).split("\n\n");
        buffer = parts.pop();
        for (const part of parts) {
          const message = parseEvent(part);
          if (message === null) continue;
          // An error that names a branch ends only that branch.
          if (message.event === "error" && !message.data.branch) throw errorFrom(500, message.data);
          yield message;
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  },

  /** Resume a branch and yield its events. */
  async *resume(id, body, options = {}) {
    let answered;
    started.set(id, new Promise((done) => { answered = done; }));
    try {
      yield* this.stream(`/v1/tree/${id}/resume`, body, { ...options, answered });
    } finally {
      answered();
      started.delete(id);
    }
  },

  // Requests may overtake each other, and a branch cannot be stopped before its resume request was answered.

  async stop(id) {
    await started.get(id);
    return this.post(`/v1/tree/${id}/stop`);
  },

  async setPace(id, pace) {
    await started.get(id);
    return this.patch(`/v1/tree/${id}`, { pace });
  },
};

function parseEvent(part) {
  const message = { event: "message", data: null, id: null };
  for (const line of part.split("\n")) {
    if (line.startsWith("data: ")) message.data = JSON.parse(line.slice(6));
    else if (line.startsWith("event: ")) message.event = line.slice(7);
    else if (line.startsWith("id: ")) message.id = line.slice(4);
  }
  return message.data === null ? null : message; // null: a keep-alive comment
}

async function requestJson(method, path, body, { signal } = {}) {
  const answer = await sendRequest(method, path, body, signal);
  return answer.json().catch((error) => {
    throw error.name === "AbortError" ? error : new ApiError(answer.status, "The server's answer is not valid JSON.");
  });
}

const LOST = new Set(["branch_not_found", "branch_evicted"]);

async function sendRequest(method, path, body, signal, isRetry = false) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (api.key) headers.authorization = `Bearer ${api.key}`;
  let answer;
  try {
    // A lone surrogate is valid in JSON but not in UTF-8.
    const text = body === undefined ? undefined : JSON.stringify(body, wellFormed);
    answer = await send(path, { method, headers, body: text, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, NO_ANSWER);
  }
  if (answer.ok) return answer;
  const error = errorFrom(answer.status, await answer.json().catch(() => null));
  if (answer.status === 404 && method !== "DELETE" && LOST.has(error.code) && !isRetry) {
    const [, id, rest] = path.match(/^\/v1\/tree\/([^/?]+)(.*)$/) ?? [];
    const now = id && await api.recover(id);
    if (now) return sendRequest(method, `/v1/tree/${now}${rest}`, body, signal, true);
  }
  throw error;
}

const wellFormed = (_, value) => (typeof value === "string" ? value.toWellFormed() : value);

// The name of a field or file, such as `max_tokens`, keeps its case.
const STARTS_WITH_NAME = /^\S*[_.[/]\S/;

function errorFrom(status, body) {
  const error = body?.error;
  if (!error?.message) return new ApiError(status, `The server answered with status ${status}.`);
  const { message: words } = error;
  const message = STARTS_WITH_NAME.test(words) ? words : words.charAt(0).toUpperCase() + words.slice(1);
  return new ApiError(status, message, error);
}
