// The BPE merges of one word, played step by step: characters on top, and below each pair the piece it became.

import { api } from "../api.js";
import {
  count, html, plural, reducedMotion, RequestError, useEffect, useMemo, useRef, useRequest, useState,
} from "../lib.js";
import { bytesOf, characters, isWhite, readable, textOfBytes, visible } from "./pieces.js";

const LONGEST = 64; // bytes of a word

/** `[first, end]` of the run of pieces without whitespace around `at`. */
function runAround(pieces, at) {
  const opens = (n) => isWhite(pieces[n].bytes[0]);
  const closes = (n) => isWhite(pieces[n].bytes.at(-1));
  let [first, end] = [at, at + 1];
  while (first > 0 && !opens(first) && !closes(first - 1)) first -= 1;
  while (end < pieces.length && !opens(end) && !closes(end - 1)) end += 1;
  return [first, end];
}

/** Whether the tokenizer adds a space before every text; then it must not be sent again. */
function addsSpace(pieces, text) {
  return pieces[0]?.bytes[0] === 0x20 && !text.startsWith(" ");
}

/** The word at `at`, for a request: `{text, offset, cut}`; `offset` in bytes. */
function wordAt(pieces, at, text) {
  const [first, end] = runAround(pieces, at);
  let bytes = pieces.slice(first, end).flatMap((piece) => piece.bytes);
  let offset = pieces.slice(first, at).reduce((sum, piece) => sum + piece.bytes.length, 0);
  if (addsSpace(pieces, text) && bytes[0] === 0x20 && bytes.length > 1) bytes = bytes.slice(1);
  const cut = bytes.length > LONGEST;
  if (cut) {
    let from = Math.max(0, Math.min(offset - LONGEST / 2, bytes.length - LONGEST));
    while (from > 0 && (bytes[from] & 0xc0) === 0x80) from -= 1; // to the start of a character
    let to = from + LONGEST;
    while ((bytes[to] & 0xc0) === 0x80) to -= 1;
    bytes = bytes.slice(from, to);
    offset -= from;
  }
  return { text: textOfBytes(bytes), offset, cut };
}

const lettersIn = (text) => text.match(/\p{L}/gu)?.length ?? 0;

/** Index of a piece of the longest word; letters count most. */
export function longestWord(pieces) {
  let best = null;
  let most = 0;
  for (let at = 0; at < pieces.length;) {
    const [, end] = runAround(pieces, at);
    const run = pieces.slice(at, end);
    const word = run.map((piece) => piece.text).join("");
    const size = lettersIn(word) * 1000 + Math.min(999, word.trim().length);
    if (size > most) {
      const letters = run.map((piece) => lettersIn(piece.text)); // not punctuation around the word
      best = at + letters.reduce((top, number, n) => (number > letters[top] ? n : top), 0);
      most = size;
    }
    at = end;
  }
  return best;
}

/** The word of the answer that contains the byte at `offset`. */
function wordOf(answer, offset) {
  const bytes = new Map(answer.pieces.map((piece) => [piece.id, piece.bytes]));
  let before = 0;
  for (const word of answer.words) {
    const wordBytes = word.ids.flatMap((id) => bytes.get(id) ?? []);
    if (offset < before + wordBytes.length) return { ...word, bytes: wordBytes };
    before += wordBytes.length;
  }
  return null;
}

/** Number of bytes of each initial piece; null if unknown. */
function startSizes(word) {
  if (word.start.length === word.bytes.length) return word.start.map(() => 1);
  const sizes = word.start.map((text) => (text === "\ufffd" ? 1 : bytesOf(text).length));
  return sizes.reduce((sum, size) => sum + size, 0) === word.bytes.length ? sizes : null;
}

/**
 * The merge tree: a column for each initial piece, and a box for each merge below the pair it joins. `{columns, depth,
 * letters, tokens, boxes: [{from, to, level, until, step, rank, bytes}]}`; `step`: the merge (0: initial), `until`: the
 * level at which the box is merged.
 */
function mergeTree(word) {
  const sizes = startSizes(word);
  let read = 0;
  let row = word.start.map((text, n) => {
    const bytes = sizes ? word.bytes.slice(read, (read += sizes[n])) : [...bytesOf(text)];
    return { from: n, to: n + 1, level: 0, step: 0, rank: null, bytes };
  });
  const boxes = [...row];
  word.merges.forEach(({ position, rank }, n) => {
    const [first, second] = row.slice(position, position + 2);
    const level = 1 + Math.max(first.level, second.level);
    first.until = second.until = level;
    const box = {
      from: first.from, to: second.to, level, step: n + 1, rank, left: first, right: second,
      bytes: [...first.bytes, ...second.bytes],
    };
    boxes.push(box);
    row = row.toSpliced(position, 2, box);
  });
  const depth = Math.max(0, ...boxes.map((box) => box.level)) + 1;
  row.forEach((box, n) => Object.assign(box, { until: depth, id: word.ids[n] ?? null }));
  return { columns: word.start.length, depth, boxes, tokens: row, letters: lettersAbove(word) };
}

/** The characters above the columns, if columns are bytes and some characters have several. */
function lettersAbove(word) {
  const [letters] = characters([word]);
  const apart = word.start.length === word.bytes.length && letters.some(({ bytes }) => bytes.length > 1);
  let from = 0;
  return apart ? letters.map(({ letter, bytes }) => ({ letter, from, to: (from += bytes.length) })) : [];
}

// -- the section --------------------------------------------------------------------------------

const PACE = 650; // milliseconds between two merges

/** `at`: a piece of the word; `playCount` grows with each selected word, which is then played. */
export function Merges({ pieces, text, at, playCount, model }) {
  const selectedWord = useMemo(() => (at === null ? null : wordAt(pieces, at, text)), [pieces, at, text]);
  const question = selectedWord && { content: selectedWord.text, parse_special: false, merges: true, with_pieces: true, model };
  const { answer, fault, fresh, again } = useRequest(
    question && (async (signal) => ({
      ...await api.post("/tokenize", question, { signal }), offset: selectedWord.offset, cut: selectedWord.cut,
    })), 0, [question, selectedWord?.offset]);
  const word = useMemo(() => answer && wordOf(answer, answer.offset), [answer]);
  return html`<section class="panel tokens-merges" aria-label="Merges">
    <h3>BPE merges of a word</h3>
    <p class="quiet small">The tokenizer learned its vocabulary by merging the most frequent pair of neighbours,
      again and again. It applies those merges in the same order (ranks from 0): common words become one token, rare ones
      several.</p>
    ${fault ? html`<${NoMerges} fault=${fault} again=${again} />`
      : word ? html`<${Player} word=${word} cut=${answer.cut} playCount=${fresh ? playCount : null} />`
        : html`<p class="quiet small">${!selectedWord ? "Type a word to see its merges."
          : fresh ? "This token is not made by merges." : "Loading …"}</p>`}
  </section>`;
}

/** A tokenizer without merges answers 400; that is not an error. */
const NoMerges = ({ fault, again }) => fault.status === 400
  ? html`<p class="small" role="status">There are no merges to show. ${fault.message}.</p>`
  : html`<${RequestError} fault=${fault} again=${again} />`;

function Player({ word, cut, playCount }) {
  const tree = useMemo(() => mergeTree(word), [word]);
  const last = word.merges.length;
  const [at, setAt] = useState(last);
  const [playing, setPlaying] = useState(false);
  const lastPlayCount = useRef(playCount);
  const step = Math.min(at, last);

  useEffect(() => { // a selected word is played, others are shown complete
    if (playCount === null) return;
    const picked = lastPlayCount.current !== null && playCount !== lastPlayCount.current;
    const play = picked && last > 0 && !reducedMotion();
    lastPlayCount.current = playCount;
    setAt(play ? 0 : last);
    setPlaying(play);
  }, [word, playCount]);
  useEffect(() => {
    if (!playing) return undefined;
    if (step >= last) {
      setPlaying(false);
      return undefined;
    }
    const timer = setTimeout(() => setAt(step + 1), PACE);
    return () => clearTimeout(timer);
  }, [playing, step, last]);

  const go = (to) => {
    setPlaying(false);
    setAt(Math.min(last, Math.max(0, to)));
  };
  const toggle = () => {
    if (!playing && step >= last) setAt(0);
    setPlaying(!playing);
  };
  const keys = {
    ArrowRight: () => go(step + 1), ArrowLeft: () => go(step - 1),
    Home: () => go(0), End: () => go(last), " ": toggle,
  };
  const onKeyDown = (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  };
  const name = readable(word.bytes);
  if (last === 0) return html`<${Unmerged} word=${word} tree=${tree} name=${name} />`;
  return html`<div data-word=${name} data-step=${step}>
    <div class="row" role="group" aria-label="Play the merges">
      <${Move} name="First" path="M3 3h2v10H3zM13 3v10L6 8z" off=${step === 0} act=${() => go(0)} />
      <${Move} name="Back" path="M11 3v10L4 8z" off=${step === 0} act=${() => go(step - 1)} />
      <button type="button" class="button main" onClick=${toggle}>${playing ? "Pause" : "Play"}</button>
      <${Move} name="Forward" path="M5 3v10l7-5z" off=${step === last} act=${() => go(step + 1)} />
      <${Move} name="Last" path="M11 3h2v10h-2zM3 3v10l7-5z" off=${step === last} act=${() => go(last)} />
      <input type="range" min="0" max=${last} value=${step} aria-label="Merge"
        aria-valuetext="${step} of ${last}" onInput=${(event) => go(Number(event.target.value))} />
      ${cut && html`<span class="quiet small">A long word: only a part is shown.</span>`}
    </div>
    <p class="merge-said" aria-live=${playing ? "off" : "polite"}>${stepText(tree, step, last)}</p>
    <${Picture} tree=${tree} step=${step} name=${name} onKeyDown=${onKeyDown} />
  </div>`;
}

const Move = ({ name, path, off, act }) => html`
  <button type="button" class="button" aria-label=${name} title=${name} disabled=${off} onClick=${act}>
    <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true"><path d=${path} fill="currentColor" /></svg>
  </button>`;

/** The merge of this step as a sentence. */
function stepText(tree, step, last) {
  if (step === 0) return `Start: ${plural(tree.columns, "piece")}, each a byte or a character.`;
  const box = tree.boxes.find((candidate) => candidate.step === step);
  const end = step === last ? ` Done: ${plural(tree.tokens.length, "token")}.` : "";
  return html`Step ${step} of ${last}: <span class="piece">${readable(box.left.bytes)}</span> + <span
    class="piece">${readable(box.right.bytes)}</span> → <span class="piece">${readable(box.bytes)}</span>,
    merge rank ${count(box.rank)}.${end}`;
}

const Unmerged = ({ word, tree, name }) => html`<div data-word=${name} data-step="0">
  <p class="merge-said">${tree.columns === 1
    ? html`<span class="piece">${name}</span> is one piece from the start, id ${word.ids[0]}: nothing
      to merge. The text is split into words, digits and punctuation before merging.`
    : html`No merge applies to <span class="piece">${name}</span>: it stays ${
      plural(tree.columns, "token")}.`}</p></div>`;

/** Characters in the first row, a box below the pieces it merges, ids in the last row. */
function Picture({ tree, step, name, onKeyDown }) {
  const view = useRef(null);
  useEffect(() => { // in a wide word, scroll to the merge
    const [box, room] = [view.current.querySelector(".new"), view.current];
    if (!box || room.scrollWidth <= room.clientWidth) return;
    room.scrollLeft = box.offsetLeft + box.offsetWidth / 2 - room.clientWidth / 2;
  }, [step, tree]);
  const done = step === tree.boxes.at(-1).step;
  const label = `The merges of ${name}: ${tree.columns} pieces at the start, ${tree.tokens.length} at the end. `
    + "Arrow keys step, space plays.";
  return html`<div class="merge-room" tabindex="0" role="group" aria-label=${label} ref=${view}
      onKeyDown=${onKeyDown}>
    <div class="merge-picture" style=${{
      gridTemplateColumns: `repeat(${tree.columns}, minmax(1.75rem, 1fr))`, maxWidth: `${tree.columns * 4.5}rem`,
    }}>
      ${tree.letters.map(({ letter, ...box }) => html`<span key=${`l${box.from}`} class="merge-letter"
        style=${place(box, -1, 0)}>${letter === null ? "" : visible(letter).text}</span>`)}
      ${tree.boxes.map((box) => html`<${Box} key=${box.step || `s${box.from}`} box=${box} step=${step} />`)}
      ${tree.tokens.map((box, n) => html`<span key=${`t${n}`} class="merge-id mono ${done ? "" : "later"}"
        data-id=${box.id} style=${place(box, tree.depth, tree.depth + 1)}>${done ? box.id : ""}</span>`)}
    </div>
  </div>`;
}

/** Grid position; the first row is for characters above bytes, and else has no height. */
const place = (box, from, to) => ({
  gridColumn: `${box.from + 1} / ${box.to + 1}`, gridRow: `${from + 2} / ${to + 2}`,
});

function Box({ box, step }) {
  if (box.step > step) return null;
  const kind = `${box.step && box.step === step ? "new" : ""} ${box.rank === null ? "smallest" : ""}`;
  return html`<span class="merge-box ${kind} l${box.level % 6}" style=${place(box, box.level, box.until)}>
    <span class="mono">${readable(box.bytes)}</span>
    ${box.rank !== null && html`<small>${count(box.rank)}</small>`}
  </span>`;
}
