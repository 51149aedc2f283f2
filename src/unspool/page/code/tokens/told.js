// One token told: its id, its bytes, and which characters they are or are part of.

import { count, html, Piece, plural, useMemo } from "../lib.js";
import { charactersWithin, codePoint, hex, isWhole, visible } from "./characters.js";

const MOST = 24; // characters told of one token

export function PieceTold({ pieces, at }) {
  const found = useMemo(() => (at === null ? [] : charactersWithin(pieces, at, at + 1)[0]), [pieces, at]);
  if (at === null) {
    return html`<div class="tk-told quiet small">
      <p>Point at a piece, or walk with Tab and the arrow keys. A click or Enter plays its merges below.</p>
      <p>Every text is bytes first, one to four for a character. Each of the 256 bytes can be a token too, so
        nothing is unreadable: what has no token of its own is written byte by byte.</p>
    </div>`;
  }
  const piece = pieces[at];
  const parts = found.filter((character) => !isWhole(character) && character.letter !== null);
  return html`<div class="tk-told" aria-live="polite" data-piece=${at}>
    <p class="row">
      <b class="mono">id ${piece.id}</b>
      <${Piece} text=${wholeText(found)} />
      <span class="quiet small">token ${count(at + 1)} of ${count(pieces.length)}, ${
        plural(piece.bytes.length, "byte")}</span>
    </p>
    <div class="tk-bytes" role="group" aria-label="Bytes">
      ${found.slice(0, MOST).map((character, n) => html`<${Character} key=${n} character=${character} />`)}
      ${found.length > MOST && html`<span class="quiet small">and ${count(found.length - MOST)} more</span>`}
    </div>
    ${parts.map((character) => html`<p class="small" key=${character.letter}>Only part of a character: ${
      range(character)} of the ${character.bytes.length} bytes of ${visible(character.letter).shown}.</p>`)}
  </div>`;
}

const wholeText = (found) => found.map((character) =>
  isWhole(character) ? character.letter
    : character.bytes.slice(character.from, character.to).map((byte) => `‹${hex(byte)}›`).join("")).join("");

function range({ from, to }) {
  return to - from === 1 ? `byte ${to}` : `bytes ${from + 1} to ${to}`;
}

/** A character above its bytes; those that other tokens hold are hollow. */
function Character({ character }) {
  const { letter, bytes, from, to } = character;
  return html`<span class="tk-character ${isWhole(character) ? "" : "split"}"
      title=${letter === null ? "no character" : codePoint(letter)}>
    <span class="letter">${letter === null ? "?" : visible(letter).shown}</span>
    <span class="row mono">${bytes.map((byte, n) => html`<b key=${n}
      class=${n >= from && n < to ? "" : "elsewhere"}>${hex(byte)}</b>`)}</span>
  </span>`;
}
