// Where the model file comes from: a local file, or a URL whose content the browser keeps.

import { TabError } from "./errors.js";

const FOLDER = "unspool-models";

/** A name for the kept file of a URL. */
async function keptName(url) {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url));
  return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The browser's private folder for models; null where there is none, as in private windows of some browsers. */
async function folder() {
  try {
    return await (await navigator.storage.getDirectory()).getDirectoryHandle(FOLDER, { create: true });
  } catch {
    return null;
  }
}

async function keptFile(url) {
  try {
    return await (await (await folder()).getFileHandle(await keptName(url))).getFile();
  } catch {
    return null;
  }
}

export async function isKept(url) {
  return (await keptFile(url)) !== null;
}

/** Remove the kept file of a URL. */
export async function removeKept(url) {
  const models = await folder();
  await models?.removeEntry(await keptName(url)).catch(() => {});
}

/** The file as a Blob. A URL is downloaded once; an interrupted download leaves nothing behind. */
export async function openSource(source, { onProgress, signal }) {
  if (source instanceof Blob) return source;
  return (await keptFile(source)) ?? download(source, { onProgress, signal });
}

async function download(url, { onProgress, signal }) {
  const answer = await fetch(url, { signal }).catch((error) => {
    if (signal?.aborted) throw error;
    throw new TabError("network", "The model cannot be downloaded. Is there a connection?");
  });
  if (!answer.ok) throw new TabError("network", `The model cannot be downloaded: the server answered with status ${answer.status}.`);
  const total = Number(answer.headers.get("content-length") ?? 0);
  const kept = await openWriter(url);
  const chunks = [];
  let done = 0;
  try {
    for (const reader = answer.body.getReader(); ;) {
      const { done: isEnd, value } = await reader.read();
      if (isEnd) break;
      if (kept) kept.write(value);
      else chunks.push(value);
      done += value.length;
      onProgress({ phase: "download", done, total });
    }
    return kept ? await kept.finish() : new Blob(chunks);
  } catch (error) {
    await kept?.cancel();
    if (signal?.aborted) throw error;
    if (error.name === "QuotaExceededError") throw new TabError("memory", "The browser has no room to keep the model.");
    throw new TabError("network", "The download of the model broke off; try again.");
  }
}

/** Writes a kept file under another name first. Null: the browser cannot keep files. */
async function openWriter(url) {
  try {
    const models = await folder();
    const name = await keptName(url);
    const handle = await models.getFileHandle(`${name}.part`, { create: true });
    const access = await handle.createSyncAccessHandle();
    access.truncate(0);
    let at = 0;
    return {
      write: (bytes) => { at += access.write(bytes, { at }); },
      finish: async () => {
        access.flush();
        access.close();
        await handle.move(name);
        return (await models.getFileHandle(name)).getFile();
      },
      cancel: async () => {
        access.close();
        await models.removeEntry(`${name}.part`).catch(() => {});
      },
    };
  } catch {
    return null;
  }
}
