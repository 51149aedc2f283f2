// Text of tokens in the browser tab: incremental decoding with stop strings, readable tokens, and edited tokens.
//
// The same as unspool/text/tokenizer: stream.py, pieces.py and splice.py.

import { readable as readableAlone } from "./tokenizer.js";

const utf8 = new TextEncoder();
const strict = () => new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export const bytesOf = (text) => utf8.encode(text.toWellFormed());

/** The text of bytes; null if they are not UTF-8. */
export function decodeStrictly(bytes) {
  try {
    return strict().decode(Uint8Array.from(bytes));
  } catch {
    return null;
  }
}

export function joinBytes(parts) {
  const bytes = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}

/** The length of the UTF-8 character that starts with this byte; 0 if none does. */
function lengthOf(first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return 2;
  if (first >= 0xe0 && first < 0xf0) return 3;
  return first >= 0xf0 && first < 0xf5 ? 4 : 0;
}

/** The bytes of an incomplete character at the end. */
export function incompleteUtf8(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back += 1) {
    const tail = bytes.slice(bytes.length - back);
    if (lengthOf(tail[0]) > back) {
      // Whether the bytes so far can begin a character: the decoder waits for the rest.
      const decoder = new TextDecoder();
      return decoder.decode(Uint8Array.from(tail), { stream: true }) === "" ? tail : tail.slice(0, 0);
    }
    if (tail[0] < 0x80 || tail[0] >= 0xc0) break;
  }
  return bytes.slice(0, 0);
}

/** A token's bytes as text, invalid UTF-8 as hex in ⟨⟩; `partial` is an incomplete character before it. */
export function readable(bytes, partial = []) {
  if (partial.length && bytes.length) {
    const missing = lengthOf(partial[0]) - partial.length;
    const head = decodeStrictly([...partial, ...bytes.slice(0, missing)]);
    if (head !== null) return head + readable(bytes.slice(missing));
  }
  return readableAlone(Uint8Array.from(bytes));
}

/** Turns the bytes of tokens into text, and ends at the first stop string. */
export class TextStream {
  constructor(stops = []) {
    this.stops = stops.filter((stop) => !stops.some((other) => stop.slice(0, -1).includes(other)));
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.partial = new Uint8Array();
    this.pending = ""; // may begin a stop string
    this.matchedStop = null;
  }

  /** The text that is certain with these bytes. */
  push(bytes) {
    if (this.matchedStop !== null) return "";
    this.partial = incompleteUtf8([...this.partial, ...bytes]);
    return this.advance(this.decoder.decode(Uint8Array.from(bytes), { stream: true }));
  }

  /** The text that was held back; an incomplete character becomes U+FFFD. */
  finish() {
    if (this.matchedStop !== null) return "";
    this.partial = new Uint8Array();
    const text = this.advance(this.decoder.decode());
    const rest = this.matchedStop === null ? this.pending : "";
    this.pending = "";
    return text + rest;
  }

  advance(fresh) {
    if (!this.stops.length) return fresh;
    const text = this.pending + fresh;
    for (let end = this.pending.length + 1; end <= text.length; end += 1) {
      const matches = this.stops.filter((stop) => text.slice(0, end).endsWith(stop));
      if (matches.length) {
        this.matchedStop = matches.reduce((a, b) => (b.length > a.length ? b : a));
        this.pending = "";
        return text.slice(0, end - this.matchedStop.length);
      }
    }
    let hold = Math.min(text.length, Math.max(...this.stops.map(({ length }) => length)) - 1);
    while (hold && !this.stops.some((stop) => stop.startsWith(text.slice(text.length - hold)))) hold -= 1;
    this.pending = text.slice(text.length - hold);
    return text.slice(0, text.length - hold);
  }
}

// -- tokens of an edited text: only the tokens around the edit change ---------------------------------

const REACH = 64; // tokens on each side that are encoded with the new text

const sumsOf = (parts) => parts.reduce((sums, { length }) => [...sums, sums.at(-1) + length], [0]);

/**
 * The tokens for `text` between two runs of tokens: `{numLeft, tokens, numRight}`: how many of these tokens
 * stay on each side. `isCanonical`: the run gets the tokens of encoding it as one text.
 */
export function spliceTokens(leftIds, text, rightIds, { encode, bytes, isCanonical }) {
  let first = isCanonical ? 0 : Math.max(0, leftIds.length - REACH);
  const last = isCanonical ? rightIds.length : Math.min(rightIds.length, REACH);
  const startsInside = (part) => part?.length > 0 && part[0] >= 0x80 && part[0] < 0xc0;
  let before = leftIds.slice(first).map(bytes);
  while (startsInside(before[0])) {
    first += 1;
    before = before.slice(1);
  }
  const after = rightIds.slice(0, last).map(bytes);
  const alone = () => ({ numLeft: leftIds.length, tokens: text ? encode(text) : [], numRight: rightIds.length });
  const joined = decodeStrictly(joinBytes([...before, bytesOf(text), ...after]));
  if (joined === null) return alone(); // tokens that are no text
  const ids = joined ? encode(joined) : [];
  const edges = sumsOf(ids.map(bytes));
  if (edges.at(-1) !== bytesOf(joined).length) return alone(); // the tokenizer normalizes the text
  if (isCanonical) {
    const numLeft = numCommon(leftIds, ids);
    const numRight = numCommon(rightIds.toReversed(), ids.slice(numLeft).toReversed());
    return { numLeft, tokens: ids.slice(numLeft, ids.length - numRight), numRight };
  }
  const leftEnds = sumsOf(before);
  let numKept = before.length;
  while (!edges.includes(leftEnds[numKept])) numKept -= 1;
  const start = leftEnds.at(-1) + bytesOf(text).length;
  const rightStarts = sumsOf(after).map((at) => start + at);
  const dropped = rightStarts.findIndex((at) => edges.includes(at));
  const tokens = ids.slice(edges.indexOf(leftEnds[numKept]), edges.indexOf(rightStarts[dropped]));
  return { numLeft: first + numKept, tokens, numRight: rightIds.length - dropped };
}

/** How many first items two lists share. */
export function numCommon(some, others) {
  let count = 0;
  while (count < Math.min(some.length, others.length) && some[count] === others[count]) count += 1;
  return count;
}
