// A text as its tokens: characters and bytes of each, and the list in which they are colored and selected.

import {
  count, html, markInvisible, Piece, plural, useEffect, useLayoutEffect, useMemo, useRef, useState,
} from "../lib.js";

const decoder = new TextDecoder();
const encoder = new TextEncoder();
// Invisible characters: controls, directions, joiners, unusual spaces, unassigned.
const UNSEEN = /[\p{C}\p{Z}\u034f\u115f\u1160\u3164\ufe00-\ufe0f]/u;
const NEEDS_A_BASE = /^\p{M}/u;

export const bytesOf = (text) => encoder.encode(text);
export const textOfBytes = (bytes) => decoder.decode(Uint8Array.from(bytes));
const hex = (byte) => byte.toString(16).toUpperCase().padStart(2, "0");
const hexes = (bytes) => bytes.map(hex).join(" ");
export const isWhite = (byte) => byte === 0x20 || (byte >= 0x09 && byte <= 0x0d);

function codePoint(letter) {
  return `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** A character in visible form: `{text, mark}`; `mark` if it stands for an invisible one. */
export function visible(letter) {
  const [run] = markInvisible(letter);
  if (run.mark) return run;
  if (UNSEEN.test(letter)) return { text: codePoint(letter), mark: true };
  return NEEDS_A_BASE.test(letter) ? { text: `◌${letter}`, mark: false } : run;
}

/** Number of bytes of the UTF-8 character at `at`; 0 if none starts there. */
function sizeAt(bytes, at) {
  const lead = bytes[at];
  const size = lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  for (let next = 1; next < size; next++) {
    if ((bytes[at + next] & 0xc0) !== 0x80) return 0;
  }
  return size;
}

/**
 * The characters of each piece, as `{letter, bytes, from, to}`: the piece contains bytes `from` to before `to` of it.
 * `letter` is null for bytes that are no valid character.
 */
export function characters(pieces) {
  const bytes = [];
  const ends = [];
  for (const piece of pieces) {
    for (const byte of piece.bytes) bytes.push(byte);
    ends.push(bytes.length);
  }
  const byPiece = pieces.map(() => []);
  let piece = 0;
  for (let at = 0; at < bytes.length;) {
    const size = sizeAt(bytes, at);
    const charBytes = bytes.slice(at, at + (size || 1));
    const letter = size ? textOfBytes(charBytes) : null;
    const end = at + charBytes.length;
    for (let from = at; from < end;) {
      while (ends[piece] <= from) piece += 1;
      const to = Math.min(end, ends[piece]);
      byPiece[piece].push({ letter, bytes: charBytes, from: from - at, to: to - at });
      from = to;
    }
    at = end;
  }
  return byPiece;
}

/** The characters of the pieces from `first` to before `end`; a character may extend over three more pieces. */
function charactersWithin(pieces, first, end) {
  const from = Math.max(0, first - 3);
  return characters(pieces.slice(from, end + 3)).slice(first - from, end - from);
}

const isWhole = (character) =>
  character.letter !== null && character.to - character.from === character.bytes.length;

/** Bytes as text: whole characters, and hex for the others. */
export function readable(bytes) {
  const parts = characters([{ bytes }])[0].map((character) =>
    (isWhole(character) ? visible(character.letter).text : ` ${hexes(character.bytes)} `));
  return parts.join("").replaceAll("  ", " ").replace(/^ | $/g, ""); // spaces of the text are marks by now
}

// -- details of one token -----------------------------------------------------------------------

const MAX_CHARACTERS = 24; // shown for one token

function PieceDetails({ pieces, at }) {
  const chars = useMemo(() => (at === null ? [] : charactersWithin(pieces, at, at + 1)[0]), [pieces, at]);
  if (at === null) {
    return html`<div class="tk-told quiet small">
      <p>Point at a token, or move with Tab and the arrow keys. A click or Enter plays its merges below.</p>
      <p>A text is encoded as UTF-8, one to four bytes a character. Each of the 256 bytes is a token too, so any text can
        be tokenized: what has no longer token is split into bytes.</p>
    </div>`;
  }
  const piece = pieces[at];
  const parts = chars.filter((character) => !isWhole(character) && character.letter !== null);
  return html`<div class="tk-told" aria-live="polite" data-piece=${at}>
    <p class="row">
      <b class="mono">id ${piece.id}</b>
      <${Piece} text=${wholeText(chars)} />
      <span class="quiet small">token ${count(at + 1)} of ${count(pieces.length)}, ${
        plural(piece.bytes.length, "byte")}</span>
    </p>
    <div class="tk-bytes" role="group" aria-label="Bytes">
      ${chars.slice(0, MAX_CHARACTERS).map((character, n) => html`<${Character} key=${n} character=${character} />`)}
      ${chars.length > MAX_CHARACTERS && html`<span class="quiet small">and ${count(chars.length - MAX_CHARACTERS)} more</span>`}
    </div>
    ${parts.map((character) => html`<p class="small" key=${character.letter}>Only part of a character: ${
      range(character)} of the ${character.bytes.length} bytes of ${visible(character.letter).text}.</p>`)}
  </div>`;
}

const wholeText = (chars) => chars.map((character) =>
  isWhole(character) ? character.letter
    : character.bytes.slice(character.from, character.to).map((byte) => `‹${hex(byte)}›`).join("")).join("");

function range({ from, to }) {
  return to - from === 1 ? `byte ${to}` : `bytes ${from + 1} to ${to}`;
}

/** A character above its bytes; bytes of other tokens are hollow. */
function Character({ character }) {
  const { letter, bytes, from, to } = character;
  return html`<span class="tk-character ${isWhole(character) ? "" : "split"}"
      title=${letter === null ? "not a character" : codePoint(letter)}>
    <span class="letter">${letter === null ? "?" : visible(letter).text}</span>
    <span class="row mono">${bytes.map((byte, n) => html`<b key=${n}
      class=${n >= from && n < to ? "" : "elsewhere"}>${hex(byte)}</b>`)}</span>
  </span>`;
}

// -- the list of tokens -------------------------------------------------------------------------

const COLORS = 6;
const BLOCK = 160; // pieces rendered as one unit, extended to the next space
const INITIAL_PIECES = 960; // rendered before "Show all"

/** Content of one piece: text, marks, and bytes of partial characters. */
function pieceContent(piece, chars) {
  const nodes = [];
  for (const character of chars) {
    if (!isWhole(character)) {
      // The character itself is shown at its first byte.
      if (character.from === 0 && character.letter !== null) {
        const { text, mark } = visible(character.letter);
        nodes.push(html`<${mark ? "i" : "span"}>${text}<//>`);
      }
      nodes.push(html`<sub>${hexes(character.bytes.slice(character.from, character.to))}</sub>`);
      continue;
    }
    const { text, mark } = visible(character.letter);
    if (mark) nodes.push(html`<i>${text}</i>`, character.letter === "\n" ? "\n" : "");
    else if (typeof nodes.at(-1) === "string") nodes[nodes.length - 1] += text;
    else nodes.push(text);
  }
  return nodes.length ? nodes : html`<i>${piece.text || "∅"}</i>`;
}

const options = (name, at) => name && { id: `${name}-${at}`, role: "option", "aria-selected": "false" };

/** The pieces from `first` on. A line may break before a piece that starts with a space. */
function drawnPieces(pieces, chars, first, name) {
  return pieces.map((piece, n) => html`${isWhite(piece.bytes[0]) && html`<wbr />`}<span
    class="tk c${(first + n) % COLORS + 1}" data-at=${first + n} title=${name ? null : `id ${piece.id}`}
    ...${options(name, first + n)}>${pieceContent(piece, chars[n])}</span>`);
}

const signatureOf = (pieces) => pieces.map((piece) => piece.id).join();

/** A list of pieces without interaction. */
export function PlainSplit({ pieces }) {
  return useMemo(() => html`<span class="tk-text" dir="auto">${
    drawnPieces(pieces, characters(pieces), 0, null)}</span>`, [signatureOf(pieces)]);
}

/** End of the block that starts at `first`: between two words, if possible. */
function blockEnd(pieces, first, limit) {
  const most = Math.min(limit, first + BLOCK * 1.5, pieces.length);
  let end = first + BLOCK;
  while (end < most && !isWhite(pieces[end].bytes[0])) end += 1;
  return Math.min(end, most);
}

/** The pieces as blocks; unchanged blocks are not rendered again. */
function useBlocks(pieces, limit, name) {
  const before = useRef(new Map());
  return useMemo(() => {
    const blocks = new Map();
    for (let first = 0, end; first < Math.min(limit, pieces.length); first = end) {
      end = blockEnd(pieces, first, limit);
      // A character may extend into the pieces beside the block.
      const signature = signatureOf(pieces.slice(Math.max(0, first - 3), end + 3));
      const cached = before.current.get(first);
      blocks.set(first, cached?.signature === signature ? cached : {
        signature,
        drawn: html`<div role="none" key=${first}>${drawnPieces(
          pieces.slice(first, end), charactersWithin(pieces, first, end), first, name)}</div>`,
      });
    }
    before.current = blocks;
    return [...blocks.values()].map((block) => block.drawn);
  }, [pieces, limit]);
}

/** The pieces of a text, to point at and select; `onPick(at)` when one is selected. */
export function Split({ pieces, picked, stale, onPick }) {
  const [limit, setLimit] = useState(INITIAL_PIECES);
  const [pointed, setPointed] = useState(null);
  const [active, setActive] = useState(null);
  const list = useRef(null);
  const blocks = useBlocks(pieces, limit, "tk");
  const last = Math.min(limit, pieces.length) - 1;
  const now = active !== null && active <= last ? active : null;
  useEffect(() => {
    setPointed(null);
    if (document.activeElement !== list.current) setActive(null); // an index of another text
    if (pieces.length <= INITIAL_PIECES) setLimit(INITIAL_PIECES);
  }, [pieces]);
  useMark(list, now, "active", blocks);
  useMark(list, picked, "picked", blocks);

  const placeOf = (event) => {
    const at = event.target.closest?.(".tk")?.dataset.at;
    return at === undefined ? null : Number(at);
  };
  const go = (at) => {
    setActive(at);
    list.current.querySelector(`[data-at="${at}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const pick = (at) => {
    setActive(at);
    if (at !== null) onPick(at);
  };
  const keys = {
    ArrowRight: () => go(Math.min(last, (now ?? -1) + 1)),
    ArrowDown: () => go(Math.min(last, (now ?? -1) + 1)),
    ArrowLeft: () => go(Math.max(0, (now ?? 1) - 1)),
    ArrowUp: () => go(Math.max(0, (now ?? 1) - 1)),
    Home: () => go(0),
    End: () => go(last),
    Enter: () => pick(now),
    " ": () => pick(now),
    Escape: () => setActive(null),
  };
  const onKeyDown = (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  };
  const focused = pointed ?? now;
  return html`<div class="tokens-split">
    <div class="tk-text tk-list ${stale ? "stale" : ""}" dir="auto" role="listbox" tabindex="0" ref=${list}
         aria-label="Tokens of the text" aria-orientation="horizontal"
         aria-activedescendant=${now === null ? null : `tk-${now}`}
         onPointerOver=${(event) => setPointed(placeOf(event))} onPointerLeave=${() => setPointed(null)}
         onFocus=${() => now === null && setActive(0)}
         onClick=${(event) => pick(placeOf(event))} onKeyDown=${onKeyDown}>${blocks}</div>
    ${pieces.length > limit && html`<p class="small row">
      <span class="quiet">Showing the first ${count(limit)} tokens.</span>
      <button type="button" class="button tiny" onClick=${() => setLimit(pieces.length + INITIAL_PIECES)}>
        Show all ${count(pieces.length)}</button></p>`}
    <${PieceDetails} pieces=${pieces} at=${focused !== null && focused < pieces.length ? focused : null} />
  </div>`;
}

/** Set a class on one piece outside of rendering: thousands of pieces are not rendered again. */
function useMark(list, at, name, content) {
  useLayoutEffect(() => {
    const piece = at === null ? null : list.current.querySelector(`[data-at="${at}"]`);
    if (!piece) return undefined;
    piece.classList.add(name);
    if (name === "active") piece.setAttribute("aria-selected", "true");
    return () => {
      piece.classList.remove(name);
      if (name === "active") piece.setAttribute("aria-selected", "false");
    };
  }, [at, content]);
}
