// Lorebooks of other programs as entries, and back: SillyTavern's world info (also the book of a character card), the
// world info of mikupad and of KoboldAI, and memory and author's note of the last two. Pure functions.

import { BadFile } from "./bad_file.js";

const MAX_ENTRIES = 2000;
const MAX_KEYS = 100;
const LOGIC = ["any", "not_all", "not_any", "all"]; // SillyTavern's `selectiveLogic`
const AT_DEPTH = 4; // SillyTavern's `position`

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const text = (value) => (typeof value === "string" ? value : "");
const strings = (value) => (Array.isArray(value) ? value : text(value).split(","))
  .filter((key) => typeof key === "string").map((key) => key.trim()).filter(Boolean).slice(0, MAX_KEYS);
const integer = (value) => (typeof value === "number" && Number.isFinite(value) ? Math.round(value) : null);
const depthOf = (value) => (integer(value) === null ? null : Math.min(10_000, Math.max(0, integer(value))));

/** Without fields that have their usual value. */
function entryOf(fields) {
  const usual = { secondary_keys: "[]", logic: '"any"', name: '""', enabled: "true", always: "false", order: "100", whole_words: "true" };
  return Object.fromEntries(Object.entries(fields).filter(([name, value]) => value !== null && usual[name] !== JSON.stringify(value)));
}

/** Entries of a lorebook file: `{entries, notes}`. Throws BadFile. */
export function readLorebook(content) {
  let data;
  try {
    data = JSON.parse(content);
  } catch {
    throw new BadFile("The lorebook is not valid JSON, or it was truncated.");
  }
  const book = [data, data?.character_book, data?.data?.character_book, data?.worldInfo].find((item) => isObject(item?.entries) || Array.isArray(item?.entries));
  const list = book ? Object.values(book.entries) : Array.isArray(data) ? data : Array.isArray(data?.worldinfo) ? data.worldinfo : null;
  if (!list?.every(isObject)) throw new BadFile("The file has no lorebook: entries with keys and a text.");
  if (list.length > MAX_ENTRIES) throw new BadFile(`The lorebook has ${list.length} entries; at most ${MAX_ENTRIES} can be opened.`);
  const entries = list.map(readEntry).filter((entry) => entry.text.trim());
  if (!entries.length) throw new BadFile("The lorebook has no entries.");
  const chances = list.filter((item) => item.useProbability !== false && typeof item.probability === "number" && item.probability < 100).length;
  return { entries, notes: chances ? [`${chances} of them had a probability below 100 %: they enter always.`] : [] };
}

function readEntry(item) {
  const extra = isObject(item.extensions) ? item.extensions : {};
  const secondary = strings(item.keysecondary ?? item.secondary_keys);
  const isAtDepth = (extra.position ?? item.position) === AT_DEPTH;
  const isWholeWord = item.matchWholeWords ?? extra.match_whole_words;
  return entryOf({
    text: text(item.content ?? item.text).slice(0, 200_000),
    keys: strings(item.key ?? item.keys),
    secondary_keys: item.selective === false ? [] : secondary,
    logic: LOGIC[item.selectiveLogic ?? extra.selectiveLogic ?? 0] ?? "any",
    name: text(item.comment || item.name || item.displayName).slice(0, 200),
    enabled: item.disable !== true && item.enabled !== false,
    always: item.constant === true,
    order: integer(item.order ?? item.insertion_order) ?? 100,
    depth: isAtDepth ? depthOf(extra.depth ?? item.depth) ?? 4 : null,
    scan_depth: depthOf(item.scanDepth ?? extra.scan_depth),
    whole_words: isWholeWord !== false,
  });
}

/** Entries as SillyTavern's world info. */
export function writeLorebook(entries) {
  const rows = entries.map((entry, uid) => [uid, {
    uid, key: entry.keys ?? [], keysecondary: entry.secondary_keys ?? [], comment: entry.name ?? "", content: entry.text,
    constant: entry.always ?? false, selective: true, selectiveLogic: LOGIC.indexOf(entry.logic ?? "any"),
    addMemo: true, order: entry.order ?? 100, position: entry.depth == null ? 0 : AT_DEPTH, depth: entry.depth ?? 4,
    disable: entry.enabled === false, probability: 100, useProbability: true, scanDepth: entry.scan_depth ?? null,
    caseSensitive: null, matchWholeWords: entry.whole_words === false ? false : null, displayIndex: uid,
  }]);
  return JSON.stringify({ entries: Object.fromEntries(rows) }, null, 1);
}

// -- with a text: mikupad and KoboldAI ---------------------------------------------------------------

const lines = (value) => text(value).replaceAll("\\n", "\n"); // mikupad writes line breaks of prefixes as two characters

/** Memory, author's note and world info of a mikupad session; null: none. */
export function partsOfMikupad({ memoryTokens: memory, authorNoteTokens: note, authorNoteDepth: depth, worldInfo }) {
  const around = (item) => (text(item?.text) ? lines(item.prefix) + item.text + lines(item.suffix) : null);
  const entries = (Array.isArray(worldInfo?.entries) ? worldInfo.entries : []).filter(isObject).map((item) => entryOf({
    text: text(item.text), name: text(item.displayName).slice(0, 200),
    // Its keys are regular expressions, found anywhere.
    always: strings(item.keys).includes(".*"),
    keys: strings(item.keys).filter((key) => key !== ".*").map((key) => (/[\\^$.*+?()[\]{}|]/.test(key) ? `/${key}/` : key)), whole_words: false,
  })).filter((entry) => entry.text);
  return partsOf(around(memory), around(note), integer(Number(depth ?? 3)), entries);
}

/** The author's note of a SillyTavern chat; null: none. */
export function partsOfTavern(metadata) {
  return partsOf(null, text(metadata?.note_prompt) || null, integer(metadata?.note_depth), []);
}

export const tavernOf = (parts) => (parts?.author_note?.text
  ? { note_prompt: parts.author_note.text, note_interval: 1, note_position: 1, note_depth: parts.author_note.depth ?? 4, note_role: 0 } : {});

/** The same for mikupad's own file. */
export function mikupadOf(parts) {
  const { memory, author_note: note, lorebook } = parts ?? {};
  const plain = (key) => (/^\/(.+)\/i?$/s.exec(key)?.[1] ?? key.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&"));
  return {
    memoryTokens: { contextOrder: "{memPrefix}{wiPrefix}{wiText}{wiSuffix}{memText}{memSuffix}{prompt}", prefix: "", text: memory ?? "", suffix: memory ? "\\n" : "" },
    authorNoteTokens: { prefix: "", text: note?.text ?? "", suffix: note?.text ? "\\n" : "" },
    authorNoteDepth: note?.depth ?? 3,
    worldInfo: {
      mikuPediaVersion: 1, prefix: "", suffix: "",
      entries: (lorebook?.entries ?? []).filter(({ enabled }) => enabled !== false)
        .map((entry) => ({ displayName: entry.name ?? "", text: entry.text, keys: entry.always ? [".*"] : (entry.keys ?? []).map(plain), search: "" })),
    },
  };
}

/** Memory, author's note and world info of a KoboldAI save; null: none. */
export function partsOfKobold(data) {
  const note = text(data.authorsnote) ? (text(data.anotetemplate) || "<|>").replace("<|>", () => data.authorsnote) : null;
  const entries = (Array.isArray(data.worldinfo) ? data.worldinfo : []).filter(isObject).map(readEntry).filter((entry) => entry.text);
  return partsOf(text(data.memory) || null, note, null, entries);
}

function partsOf(memory, note, depth, entries) {
  if (memory === null && note === null && !entries.length) return null;
  return {
    memory, author_note: note === null ? null : { text: note, ...(depth === null ? {} : { depth: depthOf(depth) }) },
    lorebook: entries.length ? { entries: entries.slice(0, MAX_ENTRIES) } : null,
  };
}
