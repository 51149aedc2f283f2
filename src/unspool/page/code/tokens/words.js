// Which word a piece belongs to, and the tree that its merges make.

import { bytesOf, characters, isWhite, textOfBytes } from "./characters.js";

const LONGEST = 64; // bytes of a word whose merges are drawn

/** Where the run of pieces without a gap around `at` begins and ends (not included). */
function runAround(pieces, at) {
  const opens = (n) => isWhite(pieces[n].bytes[0]);
  const closes = (n) => isWhite(pieces[n].bytes.at(-1));
  let [first, end] = [at, at + 1];
  while (first > 0 && !opens(first) && !closes(first - 1)) first -= 1;
  while (end < pieces.length && !opens(end) && !closes(end - 1)) end += 1;
  return [first, end];
}

/** Some vocabularies put a space before every text; then it is not asked for again. */
function addsSpace(pieces, text) {
  return pieces[0]?.bytes[0] === 0x20 && !text.startsWith(" ");
}

/** What to ask the server about the word at `at`: `{text, offset, cut}`; `offset` in bytes. */
export function wordAt(pieces, at, text) {
  const [first, end] = runAround(pieces, at);
  let bytes = pieces.slice(first, end).flatMap((piece) => piece.bytes);
  let offset = pieces.slice(first, at).reduce((sum, piece) => sum + piece.bytes.length, 0);
  if (addsSpace(pieces, text) && bytes[0] === 0x20 && bytes.length > 1) bytes = bytes.slice(1);
  const cut = bytes.length > LONGEST;
  if (cut) {
    let from = Math.max(0, Math.min(offset - LONGEST / 2, bytes.length - LONGEST));
    while (from > 0 && (bytes[from] & 0xc0) === 0x80) from -= 1; // at the start of a character
    let to = from + LONGEST;
    while ((bytes[to] & 0xc0) === 0x80) to -= 1;
    bytes = bytes.slice(from, to);
    offset -= from;
  }
  return { text: textOfBytes(bytes), offset, cut };
}

const lettersIn = (text) => text.match(/\p{L}/gu)?.length ?? 0;

/** A piece of the longest word; words of letters come before anything else. */
export function longestWord(pieces) {
  let best = null;
  let most = 0;
  for (let at = 0; at < pieces.length;) {
    const [, end] = runAround(pieces, at);
    const run = pieces.slice(at, end);
    const word = run.map((piece) => piece.text).join("");
    const size = lettersIn(word) * 1000 + Math.min(999, word.trim().length);
    if (size > most) {
      const letters = run.map((piece) => lettersIn(piece.text)); // signs around a word are not meant
      best = at + letters.reduce((top, number, n) => (number > letters[top] ? n : top), 0);
      most = size;
    }
    at = end;
  }
  return best;
}

/** Of the words that the server told, the one that has the byte at `offset`. */
export function wordOf(answer, offset) {
  const bytes = new Map(answer.pieces.map((piece) => [piece.id, piece.bytes]));
  let before = 0;
  for (const word of answer.words) {
    const own = word.ids.flatMap((id) => bytes.get(id) ?? []);
    if (offset < before + own.length) return { ...word, bytes: own };
    before += own.length;
  }
  return null;
}

/** How many bytes each of the smallest pieces has; null if that cannot be told. */
function startSizes(word) {
  if (word.start.length === word.bytes.length) return word.start.map(() => 1);
  const sizes = word.start.map((text) => (text === "\ufffd" ? 1 : bytesOf(text).length));
  return sizes.reduce((sum, size) => sum + size, 0) === word.bytes.length ? sizes : null;
}

/**
 * The boxes of a word: a column for each smallest piece, and a box for each merge under the two it
 * joins. `{columns, depth, letters, tokens, boxes: [{from, to, level, until, step, rank, bytes}]}`;
 * `step` is the merge that made it (0: was there), `until` the level at which it is joined again.
 */
export function mergeTree(word) {
  const sizes = startSizes(word);
  let read = 0;
  let row = word.start.map((text, n) => {
    const bytes = sizes ? word.bytes.slice(read, (read += sizes[n])) : [...bytesOf(text)];
    return { from: n, to: n + 1, level: 0, step: 0, rank: null, bytes };
  });
  const boxes = [...row];
  word.merges.forEach(({ position, rank }, n) => {
    const [left, right] = row.slice(position, position + 2);
    const level = 1 + Math.max(left.level, right.level);
    left.until = right.until = level;
    const box = {
      from: left.from, to: right.to, level, step: n + 1, rank, left, right,
      bytes: [...left.bytes, ...right.bytes],
    };
    boxes.push(box);
    row = row.toSpliced(position, 2, box);
  });
  const depth = Math.max(0, ...boxes.map((box) => box.level)) + 1;
  row.forEach((box, n) => Object.assign(box, { until: depth, id: word.ids[n] ?? null }));
  return { columns: word.start.length, depth, boxes, tokens: row, letters: lettersAbove(word) };
}

/** Where the columns are bytes, and some characters have several: the characters, over their bytes. */
function lettersAbove(word) {
  const [found] = characters([word]);
  const apart = word.start.length === word.bytes.length && found.some(({ bytes }) => bytes.length > 1);
  let from = 0;
  return apart ? found.map(({ letter, bytes }) => ({ letter, from, to: (from += bytes.length) })) : [];
}
