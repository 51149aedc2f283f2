// The server: requests that give JSON, and streams of events.

export class ApiFault extends Error {
  /** What the server said is wrong; status 0: it did not answer at all. */
  constructor(status, message, { param = null, code = null } = {}) {
    super(message);
    this.name = "ApiFault";
    Object.assign(this, { status, param, code });
  }

  get gone() {
    return this.status === 0;
  }
}

const GONE = "The server does not answer. Is it still running?";
const KEY = "unspool.key";
const begun = new Map(); // branch that is asked to go on -> when the server has begun, or has refused

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export const api = {
  key: storedKey(),

  /** A key for all that follows; kept until the tab is closed. */
  useKey(key) {
    this.key = key.trim();
    try {
      sessionStorage.setItem(KEY, this.key);
    } catch {
      /* then it is asked for again after a reload */
    }
  },

  get: (path, options) => told("GET", path, undefined, options),
  post: (path, body = {}, options) => told("POST", path, body, options),
  patch: (path, body = {}, options) => told("PATCH", path, body, options),
  delete: (path, options) => told("DELETE", path, undefined, options),

  /** Events as they come: `{event, data, id}`. POST if there is a body. */
  async *stream(path, body = null, { signal, answered = () => {} } = {}) {
    const answer = await asked(body === null ? "GET" : "POST", path, body ?? undefined, signal);
    answered();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { done, value } = await reader.read().catch((error) => {
          throw signal?.aborted ? error : new ApiFault(0, GONE);
        });
        if (done) return;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          const found = parsed(part);
          if (found === null) continue;
          // An error that names a branch is that branch's own; the others go on.
          if (found.event === "error" && !found.data.branch) throw faultOf(500, found.data);
          yield found;
        }
      }
    } finally {
      reader.cancel().catch(() => {});
    }
  },

  /** Let a branch go on: its events as they come. */
  async *resume(id, body, options = {}) {
    let answered;
    begun.set(id, new Promise((done) => { answered = done; }));
    try {
      yield* this.stream(`/v1/tree/${id}/resume`, body, { ...options, answered });
    } finally {
      answered();
      begun.delete(id);
    }
  },

  // Two requests may overtake each other, and a branch that has not begun cannot be stopped.

  async stop(id) {
    await begun.get(id);
    return this.post(`/v1/tree/${id}/stop`);
  },

  async setPace(id, pace) {
    await begun.get(id);
    return this.patch(`/v1/tree/${id}`, { pace });
  },
};

function parsed(part) {
  const found = { event: "message", data: null, id: null };
  for (const line of part.split("\n")) {
    if (line.startsWith("data: ")) found.data = JSON.parse(line.slice(6));
    else if (line.startsWith("event: ")) found.event = line.slice(7);
    else if (line.startsWith("id: ")) found.id = line.slice(4);
  }
  return found.data === null ? null : found; // a comment, to keep the connection alive
}

async function told(method, path, body, { signal } = {}) {
  const answer = await asked(method, path, body, signal);
  return answer.json().catch((error) => {
    throw error.name === "AbortError" ? error : new ApiFault(answer.status, "The answer of the server cannot be read.");
  });
}

async function asked(method, path, body, signal) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (api.key) headers.authorization = `Bearer ${api.key}`;
  let answer;
  try {
    // Half an emoji is no text: JSON would carry it, UTF-8 cannot.
    const text = body === undefined ? undefined : JSON.stringify(body, wellFormed);
    answer = await fetch(path, { method, headers, body: text, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFault(0, GONE);
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw faultOf(answer.status, said);
}

const wellFormed = (_, value) => (typeof value === "string" ? value.toWellFormed() : value);

function faultOf(status, said) {
  const error = said?.error;
  if (!error?.message) return new ApiFault(status, `The server answered with status ${status}.`);
  const message = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  return new ApiFault(status, message, error);
}
