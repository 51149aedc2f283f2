// Texts in the browser's storage (IndexedDB). Without one, such as in a private window, they stay in memory.

const NAME = "unspool";
const STORES = ["branches", "sessions"];
const KEPT_SECONDS = 86_400; // what was deleted longer ago is removed for good

const settled = (request) => new Promise((done, failed) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => failed(request.error);
});

/** Open the storage; null if there is none. */
export async function openStorage() {
  try {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => { for (const store of STORES) request.result.createObjectStore(store, { keyPath: "id" }); };
    return new Storage(await settled(request));
  } catch {
    return null;
  }
}

class Storage {
  constructor(database) {
    this.database = database;
  }

  /** All records, by store. */
  async load() {
    const limit = Date.now() / 1000 - KEPT_SECONDS;
    const loaded = {};
    for (const name of STORES) {
      const store = this.database.transaction(name, "readwrite").objectStore(name);
      const records = await settled(store.getAll());
      loaded[name] = records.filter(({ deleted }) => deleted === null || deleted > limit);
      for (const { id, deleted } of records) if (deleted !== null && deleted <= limit) store.delete(id);
    }
    return loaded;
  }

  /** Write records; a full storage is no reason to stop a text. */
  put(name, ...records) {
    try {
      const store = this.database.transaction(name, "readwrite").objectStore(name);
      for (const record of records) store.put(record);
    } catch (error) {
      console.warn(`a text was not stored: ${error.message}`);
    }
  }
}
