// The engine in this browser tab, where the page has no server: a worker that answers the same requests.
//
// The page was written by `unspool page --static` if the document names a model. `requestTab` then takes the place of
// `fetch`, so that nothing else in the page depends on where the model runs.

import { changed } from "../state.js";

const model = document.querySelector("meta[name=unspool-model]")?.content ?? null;

/** Whether the model runs in this tab. */
export const isTab = model !== null;

/** Loading of the model: `phase` is "download", "load", "ready" or "failed". */
export const loading = { phase: "download", done: 0, total: 0, error: null, name: "" };

let worker = null;
let ready = Promise.resolve();
let lastId = 0;
const waiting = new Map(); // id of a request -> what to do with its messages

/** Load a model: the one of the page, an address, or a file. Texts of others stay in the library. */
export function loadModel(source = new URL(model, document.baseURI).href) {
  worker?.terminate();
  for (const { fail } of waiting.values()) fail(new TypeError("another model was opened"));
  waiting.clear();
  const name = (source.name ?? decodeURIComponent(new URL(source).pathname.split("/").at(-1))).replace(/\.gguf$/i, "");
  Object.assign(loading, { phase: "download", done: 0, total: 0, error: null, name });
  changed("tab");
  worker = new Worker(new URL("../../tab/worker.js", import.meta.url), { type: "module" });
  ready = new Promise((done) => {
    const fail = (error) => {
      Object.assign(loading, { phase: "failed", error });
      changed("tab");
    };
    worker.onerror = (event) => {
      fail({ message: `The engine in this tab has stopped: ${event.message ?? "its code could not be loaded"}.`, code: "stopped" });
      for (const { fail: failRequest } of waiting.values()) failRequest(new TypeError("the engine has stopped"));
    };
    worker.onmessage = ({ data }) => {
      if (data.progress) {
        Object.assign(loading, data.progress);
        changed("tab");
      } else if (data.failed) fail(data.failed);
      else if (data.ready) {
        loading.phase = "ready";
        changed("tab");
        done();
      } else waiting.get(data.id)?.receive(data);
    };
  });
  worker.postMessage({ open: { source, name } });
  return ready;
}

/** Answer a request as `fetch` does. It waits for the model. */
export async function requestTab(path, { method = "GET", body, signal } = {}) {
  if (worker === null) loadModel();
  await ready;
  signal?.throwIfAborted();
  const id = lastId += 1;
  return new Promise((done, fail) => {
    let stream = null;
    const abort = () => {
      worker.postMessage({ abort: id });
      waiting.delete(id);
      stream?.error(signal.reason);
      fail(signal.reason);
    };
    const end = () => {
      waiting.delete(id);
      signal?.removeEventListener("abort", abort);
    };
    const receive = ({ status, json, event, end: isOver }) => {
      if (json) {
        end();
        done(new Response(JSON.stringify(json), { status, headers: { "content-type": "application/json" } }));
      } else if (status) {
        const text = new ReadableStream({ start: (control) => { stream = control; }, cancel: () => worker.postMessage({ abort: id }) });
        done(new Response(text, { headers: { "content-type": "text/event-stream" } }));
      } else if (event) stream.enqueue(encoder.encode(`event: ${event[0]}\ndata: ${JSON.stringify(event[1])}\n\n`));
      else if (isOver) {
        end();
        stream.close();
      }
    };
    signal?.addEventListener("abort", abort, { once: true });
    waiting.set(id, { receive, fail: (error) => { stream?.error(error); fail(error); } });
    worker.postMessage({ id, method, path, body: body === undefined ? undefined : JSON.parse(body) });
  });
}

const encoder = new TextEncoder();

if (isTab) navigator.serviceWorker?.register(new URL("sw.js", document.baseURI)).catch(() => {}); // only for use offline
