// A text as its tokens: each piece in a color of its own, spaces and line breaks made visible.

import { count, html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../lib.js";
import { characters, charactersWithin, hexes, isWhite, isWhole, visible } from "./characters.js";
import { PieceTold } from "./told.js";

const COLORS = 6;
const BLOCK = 160; // pieces drawn as one unit, or some more: up to the next space
const AT_FIRST = 960; // pieces drawn before "Show all"

/** What stands in one piece: text, marks, and the bytes of characters that it has only in part. */
function inside(piece, found) {
  const drawn = [];
  for (const character of found) {
    if (!isWhole(character)) {
      // The character itself stands where its first byte does.
      if (character.from === 0 && character.letter !== null) {
        const { shown, mark } = visible(character.letter);
        drawn.push(html`<${mark ? "i" : "span"}>${shown}<//>`);
      }
      drawn.push(html`<sub>${hexes(character.bytes.slice(character.from, character.to))}</sub>`);
      continue;
    }
    const { shown, mark } = visible(character.letter);
    if (mark) drawn.push(html`<i>${shown}</i>`, character.letter === "\n" ? "\n" : "");
    else if (typeof drawn.at(-1) === "string") drawn[drawn.length - 1] += shown;
    else drawn.push(shown);
  }
  return drawn.length ? drawn : html`<i>${piece.text || "∅"}</i>`;
}

const options = (name, at) => name && { id: `${name}-${at}`, role: "option", "aria-selected": "false" };

/** The pieces from `first` on. A line may break before a piece that begins with a space. */
function drawnPieces(pieces, found, first, name) {
  return pieces.map((piece, n) => html`${isWhite(piece.bytes[0]) && html`<wbr />`}<span
    class="tk c${(first + n) % COLORS + 1}" data-at=${first + n} title=${name ? null : `id ${piece.id}`}
    ...${options(name, first + n)}>${inside(piece, found[n])}</span>`);
}

const signatureOf = (pieces) => pieces.map((piece) => piece.id).join();

/** Pieces to look at only. */
export function PlainSplit({ pieces }) {
  return useMemo(() => html`<span class="tk-text" dir="auto">${
    drawnPieces(pieces, characters(pieces), 0, null)}</span>`, [signatureOf(pieces)]);
}

/** Where the block that begins at `first` ends: in a gap between words, if there is one soon. */
function blockEnd(pieces, first, limit) {
  const most = Math.min(limit, first + BLOCK * 1.5, pieces.length);
  let end = first + BLOCK;
  while (end < most && !isWhite(pieces[end].bytes[0])) end += 1;
  return Math.min(end, most);
}

/** The pieces as blocks. A block that is as it was is not drawn again, so long texts stay quick. */
function useBlocks(pieces, limit, name) {
  const before = useRef(new Map());
  return useMemo(() => {
    const blocks = new Map();
    for (let first = 0, end; first < Math.min(limit, pieces.length); first = end) {
      end = blockEnd(pieces, first, limit);
      // A character that this block has only a part of may begin or end in the pieces beside it.
      const signature = signatureOf(pieces.slice(Math.max(0, first - 3), end + 3));
      const known = before.current.get(first);
      blocks.set(first, known?.signature === signature ? known : {
        signature,
        drawn: html`<div role="none" key=${first}>${drawnPieces(
          pieces.slice(first, end), charactersWithin(pieces, first, end), first, name)}</div>`,
      });
    }
    before.current = blocks;
    return [...blocks.values()].map((block) => block.drawn);
  }, [pieces, limit]);
}

/** The pieces of a text to point at, walk through and pick. `onPick(at)`: its merges are wanted. */
export function Split({ pieces, picked, stale, onPick }) {
  const [limit, setLimit] = useState(AT_FIRST);
  const [pointed, setPointed] = useState(null);
  const [active, setActive] = useState(null);
  const list = useRef(null);
  const drawn = useBlocks(pieces, limit, "tk");
  const last = Math.min(limit, pieces.length) - 1;
  const now = active !== null && active <= last ? active : null;
  useEffect(() => {
    setPointed(null);
    if (document.activeElement !== list.current) setActive(null); // it was a place in another text
    if (pieces.length <= AT_FIRST) setLimit(AT_FIRST);
  }, [pieces]);
  useMark(list, now, "active", drawn);
  useMark(list, picked, "picked", drawn);

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
  const told = pointed ?? now;
  return html`<div class="tokens-split">
    <div class="tk-text tk-list ${stale ? "stale" : ""}" dir="auto" role="listbox" tabindex="0" ref=${list}
         aria-label="Tokens of the text" aria-orientation="horizontal"
         aria-activedescendant=${now === null ? null : `tk-${now}`}
         onPointerOver=${(event) => setPointed(placeOf(event))} onPointerLeave=${() => setPointed(null)}
         onFocus=${() => now === null && setActive(0)}
         onClick=${(event) => pick(placeOf(event))} onKeyDown=${onKeyDown}>${drawn}</div>
    ${pieces.length > limit && html`<p class="small row">
      <span class="quiet">The first ${count(limit)} tokens are drawn.</span>
      <button type="button" class="button tiny" onClick=${() => setLimit(pieces.length + AT_FIRST)}>
        Show all ${count(pieces.length)}</button></p>`}
    <${PieceTold} pieces=${pieces} at=${told !== null && told < pieces.length ? told : null} />
  </div>`;
}

/** Marks stay out of the drawing, so that moving about does not draw thousands of pieces anew. */
function useMark(list, at, name, drawn) {
  useLayoutEffect(() => {
    const piece = at === null ? null : list.current.querySelector(`[data-at="${at}"]`);
    if (!piece) return undefined;
    piece.classList.add(name);
    if (name === "active") piece.setAttribute("aria-selected", "true");
    return () => {
      piece.classList.remove(name);
      if (name === "active") piece.setAttribute("aria-selected", "false");
    };
  }, [at, drawn]);
}
