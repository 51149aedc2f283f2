// Byte-level BPE from the vocabulary of a GGUF file: text to token ids and back.

import { TabError } from "./errors.js";

const NORMAL = 1;
const UNKNOWN = 2;
const CONTROL = 3;
const USER_DEFINED = 4;

// How text is split into words before merging, by `tokenizer.ggml.pre`: expressions that are applied one after
// the other. The same as in `text/tokenizer/pretokenizers.py`; ſ is a lower-case s.
const S = String.raw`\p{White_Space}`;
const NOT_S = String.raw`\P{White_Space}`;
const GPT2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^${S}\\p{L}\\p{N}]+|${S}+(?!${NOT_S})|${S}+`;
const ENDINGS = "'[sSſ]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";
const llama3 = (digits) => `${ENDINGS}|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|${digits}| ?[^${S}\\p{L}\\p{N}]+[\\r\\n]*`
  + `|${S}*[\\r\\n]+|${S}+(?!${NOT_S})|${S}+`;
const SPLITS = {
  smollm: ["\\p{N}", GPT2],
  "gpt-2": [GPT2],
  qwen2: [llama3("\\p{N}")],
  "deepseek-r1-qwen": [llama3("\\p{N}")],
  "llama-bpe": [llama3("\\p{N}{1,3}")],
};
const WHOLE_WORDS = new Set(["llama-bpe"]); // a word that is a token is not merged
const ADDS_BOS = new Set(["llama-bpe"]);

// No vocabulary uses these as ordinary text, so they are control tokens even if the file does not say so.
const END_TEXTS = [
  "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>",
  "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>",
];

/** By byte, the character that stands for it in a vocabulary. */
const CHARACTERS = (() => {
  const isPrintable = (byte) => (byte >= 0x21 && byte < 0x7f) || (byte >= 0xa1 && byte < 0xad) || byte >= 0xae;
  let others = 0;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isPrintable(byte) ? byte : 0x100 + others++));
})();
const BYTES = new Map(CHARACTERS.map((character, byte) => [character, byte]));

const encoder = new TextEncoder();

export class Tokenizer {
  constructor(metadata) {
    const get = (name) => metadata.get(`tokenizer.ggml.${name}`);
    const pre = get("pre");
    if (get("model") !== "gpt2" || !(pre in SPLITS)) {
      const given = get("model") === "gpt2" ? `pre-tokenizer ${pre}` : `kind ${get("model")}`;
      throw new TabError("unsupported_model", `The tab does not support vocabularies of the ${given}; it supports byte-level BPE with ${Object.keys(SPLITS).join(", ")}.`);
    }
    this.pieces = get("tokens");
    this.ids = new Map(this.pieces.map((piece, id) => [piece, id]));
    this.ranks = new Map(get("merges").map((merge, rank) => [merge, rank]));
    this.splits = SPLITS[pre].map((pattern) => new RegExp(pattern, "gu"));
    this.usesWholeWords = WHOLE_WORDS.has(pre);
    this.words = new Map();
    const special = (name) => get(`${name}_token_id`) ?? null;
    this.bos = special("bos");
    this.addsBos = this.bos !== null && (get("add_bos_token") ?? ADDS_BOS.has(pre));
    this.markControl(get("token_type") ?? [], ["bos", "eos", "eot", "eom", "unknown", "padding"].map(special));
    this.ends = new Set([special("eos"), special("eot"), special("eom")].filter((id) => id !== null));
    for (const text of END_TEXTS) if (this.ids.has(text)) this.ends.add(this.ids.get(text));
  }

  /** Find the tokens that text does not become: control tokens, and those that are split off first. */
  markControl(types, named) {
    this.control = new Set(named.slice(0, 4).filter((id) => id !== null));
    types.forEach((type, id) => { if (type === CONTROL || type === UNKNOWN) this.control.add(id); });
    for (const text of END_TEXTS) if (this.ids.has(text)) this.control.add(this.ids.get(text));
    for (const id of named.slice(4)) if (id !== null && (types[id] ?? NORMAL) === NORMAL) this.control.add(id);
    this.userDefined = new Set();
    types.forEach((type, id) => { if (type === USER_DEFINED && !this.control.has(id)) this.userDefined.add(id); });
    this.userPattern = this.pattern([...this.userDefined]);
    this.specialPattern = this.pattern([...this.userDefined, ...this.control]);
  }

  /** An expression that finds any of these tokens, the longest at each position; null if there are none. */
  pattern(ids) {
    const texts = ids.map((id) => this.pieces[id]).sort((a, b) => b.length - a.length);
    return texts.length ? new RegExp(`(${texts.map((text) => text.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")).join("|")})`, "u") : null;
  }

  encode(text, { special = false, bos = false } = {}) {
    const pattern = special ? this.specialPattern : this.userPattern;
    const parts = pattern ? text.split(pattern) : [text];
    const ids = parts.flatMap((part, n) => (n % 2 ? [this.ids.get(part)] : this.encodePlain(part)));
    return bos && this.addsBos && ids[0] !== this.bos ? [this.bos, ...ids] : ids;
  }

  encodePlain(text) {
    return this.splitWords(text).flatMap((word) => this.encodeWord(word));
  }

  splitWords(text) {
    let words = text ? [text] : [];
    for (const pattern of this.splits) words = words.flatMap((word) => splitBy(word, pattern));
    return words;
  }

  /** The merges that turn a text into tokens, word by word: `{start, merges: [{rank, position, pieces}], ids}`. */
  mergeSteps(text) {
    const readable = (pieces) => pieces.map((piece) => new TextDecoder().decode(Uint8Array.from([...piece], (character) => BYTES.get(character))));
    return this.splitWords(text).map((word) => {
      const start = [...encoder.encode(word)].map((byte) => CHARACTERS[byte]);
      const merges = [];
      this.merge(start, (rank, position, pieces) => merges.push({ rank, position, pieces: readable(pieces) }));
      return { start: readable(start), merges, ids: this.encodeWord(word) };
    });
  }

  encodeWord(word) {
    let ids = this.words.get(word);
    if (!ids) {
      if (this.words.size > 50_000) this.words.clear();
      ids = this.merge([...encoder.encode(word)].map((byte) => CHARACTERS[byte])).map((piece) => this.ids.get(piece));
      this.words.set(word, ids);
    }
    return ids;
  }

  /** Merge the pair of neighbours with the best rank, leftmost first, while there is one; `report` gets each merge. */
  merge(pieces, report = () => {}) {
    const word = pieces.join("");
    if (this.usesWholeWords && this.isText(word)) return [word];
    const parts = pieces.filter((piece) => this.isText(piece));
    const rankAt = (n) => {
      const rank = this.ranks.get(`${parts[n]} ${parts[n + 1]}`);
      return rank !== undefined && this.isText(parts[n] + parts[n + 1]) ? rank : Infinity;
    };
    const ranks = parts.slice(1).map((_, n) => rankAt(n)); // of each part and the next
    while (ranks.length) {
      let best = 0;
      for (let n = 1; n < ranks.length; n++) if (ranks[n] < ranks[best]) best = n;
      if (ranks[best] === Infinity) break;
      const rank = ranks[best];
      parts.splice(best, 2, parts[best] + parts[best + 1]);
      ranks.splice(best, 1);
      if (best < ranks.length) ranks[best] = rankAt(best);
      if (best > 0) ranks[best - 1] = rankAt(best - 1);
      report(rank, best, parts);
    }
    return parts;
  }

  isText(piece) {
    const id = this.ids.get(piece);
    return id !== undefined && !this.control.has(id);
  }

  /** The exact bytes of a token. */
  bytes(id) {
    const piece = this.pieces[id] ?? "";
    if (this.control.has(id) || this.userDefined.has(id)) return encoder.encode(piece);
    return Uint8Array.from([...piece].flatMap((character) => (
      BYTES.has(character) ? [BYTES.get(character)] : [...encoder.encode(character)]
    )));
  }

  decode(ids, { special = true } = {}) {
    const chosen = special ? ids : ids.filter((id) => !this.control.has(id));
    const bytes = Array.from(chosen, (id) => this.bytes(id));
    const joined = new Uint8Array(bytes.reduce((total, part) => total + part.length, 0));
    let at = 0;
    for (const part of bytes) {
      joined.set(part, at);
      at += part.length;
    }
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(joined);
  }
}

/** The matches and the text between them, in order. */
function splitBy(text, pattern) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > end) parts.push(text.slice(end, match.index));
    parts.push(match[0]);
    end = match.index + match[0].length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}

/** A token alone as text; bytes that are not UTF-8 as hexadecimal numbers in ⟨⟩. */
export function readable(bytes) {
  const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  let text = "";
  let invalid = [];
  const flush = () => {
    if (invalid.length) text += `⟨${invalid.map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ")}⟩`;
    invalid = [];
  };
  for (let at = 0; at < bytes.length;) {
    const size = [1, 2, 3, 4].find((count) => {
      try {
        return at + count <= bytes.length && decoder.decode(bytes.subarray(at, at + count)) !== null;
      } catch {
        return false;
      }
    });
    if (size) flush();
    if (size) text += decoder.decode(bytes.subarray(at, at + size));
    else invalid.push(bytes[at]);
    at += size ?? 1;
  }
  flush();
  return text;
}
