// From tokens to the characters they hold. A token is a run of bytes, and a character may take up to
// four of them: where a token ends in the middle of a character, that is told.

import { marked } from "../lib.js";

const decoder = new TextDecoder();
const encoder = new TextEncoder();
// What has no shape of its own: controls, directions, joiners, odd spaces, unassigned.
const UNSEEN = /[\p{C}\p{Z}\u034f\u115f\u1160\u3164\ufe00-\ufe0f]/u;
const NEEDS_A_BASE = /^\p{M}/u;

export const bytesOf = (text) => encoder.encode(text);
export const textOfBytes = (bytes) => decoder.decode(Uint8Array.from(bytes));
export const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");
export const hexes = (bytes) => bytes.map(hex).join(" ");
export const isWhite = (byte) => byte === 0x20 || (byte >= 0x09 && byte <= 0x0d);

export function codePoint(letter) {
  return `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** A character as the eye can see it: `{shown, mark}`; a mark stands for something invisible. */
export function visible(letter) {
  const [run] = marked(letter);
  if (run.mark) return run;
  if (UNSEEN.test(letter)) return { shown: codePoint(letter), mark: true };
  return NEEDS_A_BASE.test(letter) ? { shown: `◌${letter}`, mark: false } : run;
}

/** How many bytes the character at `at` has; 0 if none begins there. */
function sizeAt(bytes, at) {
  const lead = bytes[at];
  const size = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  for (let next = 1; next < size; next++) {
    if ((bytes[at + next] & 0xc0) !== 0x80) return 0;
  }
  return size;
}

/**
 * The characters of each piece. A character is `{letter, bytes, from, to}`: this piece has its bytes
 * `from` to `to` (not included). `letter` is null for bytes that are no character.
 */
export function characters(pieces) {
  const bytes = [];
  const ends = [];
  for (const piece of pieces) {
    for (const byte of piece.bytes) bytes.push(byte);
    ends.push(bytes.length);
  }
  const found = pieces.map(() => []);
  let piece = 0;
  for (let at = 0; at < bytes.length;) {
    const size = sizeAt(bytes, at);
    const own = bytes.slice(at, at + (size || 1));
    const letter = size ? textOfBytes(own) : null;
    const end = at + own.length;
    for (let from = at; from < end;) {
      while (ends[piece] <= from) piece += 1;
      const to = Math.min(end, ends[piece]);
      found[piece].push({ letter, bytes: own, from: from - at, to: to - at });
      from = to;
    }
    at = end;
  }
  return found;
}

/** The characters of the pieces from `first` to `end`; their rest may lie up to three pieces away. */
export function charactersWithin(pieces, first, end) {
  const from = Math.max(0, first - 3);
  return characters(pieces.slice(from, end + 3)).slice(first - from, end - from);
}

export const isWhole = (character) =>
  character.letter !== null && character.to - character.from === character.bytes.length;

/** Bytes as a person reads them: characters where they are whole, else the bytes themselves. */
export function readable(bytes) {
  const shown = characters([{ bytes }])[0].map((character) =>
    (isWhole(character) ? visible(character.letter).shown : ` ${hexes(character.bytes)} `));
  return shown.join("").replaceAll("  ", " ").replace(/^ | $/g, ""); // true spaces are marks by now
}
