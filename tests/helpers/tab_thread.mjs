// thread.js in a worker of node, which has other names for the messages of a worker.
import { parentPort } from "node:worker_threads";

globalThis.addEventListener = (name, listener) => parentPort.once(name, (data) => listener({ data }));
globalThis.postMessage = (message) => parentPort.postMessage(message);
await import("../../src/unspool/page/tab/thread.js");
