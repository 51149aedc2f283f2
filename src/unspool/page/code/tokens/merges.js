// The merges of one word, played one by one: letters above, and under each two the piece they became.

import { api } from "../api.js";
import { count, html, plural, reducedMotion, useEffect, useMemo, useRef, useState } from "../lib.js";
import { useAnswer, Fault } from "../asking.js";
import { readable, visible } from "./characters.js";
import { mergeTree, wordAt, wordOf } from "./words.js";

const PACE = 650; // milliseconds between two merges

/** `at`: a piece of the word; `asked`: grows each time a person picks a word, which is then played. */
export function Merges({ pieces, text, at, asked, model }) {
  const wanted = useMemo(() => (at === null ? null : wordAt(pieces, at, text)), [pieces, at, text]);
  const question = wanted && { content: wanted.text, parse_special: false, merges: true, with_pieces: true, model };
  const { answer, fault, fresh, again } = useAnswer(
    question && (async (signal) => ({
      ...await api.post("/tokenize", question, { signal }), offset: wanted.offset, cut: wanted.cut,
    })), 0, [question, wanted?.offset]);
  const word = useMemo(() => answer && wordOf(answer, answer.offset), [answer]);
  return html`<section class="panel tokens-merges" aria-label="Merges">
    <h3>How a word becomes tokens</h3>
    <p class="quiet small">The vocabulary was learned by joining the two neighbours that stand side by side
      most often, again and again. Those merges, in the order of the training (counted from 0), make any
      text into tokens: common words end as one piece, rare ones as several.</p>
    ${fault ? html`<${NoMerges} fault=${fault} again=${again} />`
      : word ? html`<${Player} word=${word} cut=${answer.cut} asked=${fresh ? asked : null} />`
        : html`<p class="quiet small">${!wanted ? "Type a word to see its merges."
          : fresh ? "This piece is not made by merging." : "Asking for the merges …"}</p>`}
  </section>`;
}

/** A vocabulary that is not made by merging says so; that is no failure. */
const NoMerges = ({ fault, again }) => fault.status === 400
  ? html`<p class="small" role="status">There are no merges to show. ${fault.message}.</p>`
  : html`<${Fault} fault=${fault} again=${again} />`;

function Player({ word, cut, asked }) {
  const tree = useMemo(() => mergeTree(word), [word]);
  const last = word.merges.length;
  const [at, setAt] = useState(last);
  const [playing, setPlaying] = useState(false);
  const heard = useRef(asked);
  const step = Math.min(at, last);

  useEffect(() => { // a picked word is played at once, others stand there complete
    if (asked === null) return;
    const picked = heard.current !== null && asked !== heard.current;
    const play = picked && last > 0 && !reducedMotion();
    heard.current = asked;
    setAt(play ? 0 : last);
    setPlaying(play);
  }, [word, asked]);
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
      ${cut && html`<span class="quiet small">A long word: a part of it is shown.</span>`}
    </div>
    <p class="merge-said" aria-live=${playing ? "off" : "polite"}>${said(tree, step, last)}</p>
    <${Picture} tree=${tree} step=${step} name=${name} onKeyDown=${onKeyDown} />
  </div>`;
}

const Move = ({ name, path, off, act }) => html`
  <button type="button" class="button" aria-label=${name} title=${name} disabled=${off} onClick=${act}>
    <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true"><path d=${path} fill="currentColor" /></svg>
  </button>`;

/** What happened in this step, in words. */
function said(tree, step, last) {
  if (step === 0) return `At the start there are ${plural(tree.columns, "piece")}: each a byte or a letter.`;
  const box = tree.boxes.find((one) => one.step === step);
  const end = step === last ? ` Nothing is left to join: ${plural(tree.tokens.length, "token")}.` : "";
  return html`Step ${step} of ${last}: <span class="piece">${readable(box.left.bytes)}</span> + <span
    class="piece">${readable(box.right.bytes)}</span> become <span class="piece">${readable(box.bytes)}</span>,
    merge ${count(box.rank)} of the training.${end}`;
}

const Unmerged = ({ word, tree, name }) => html`<div data-word=${name} data-step="0">
  <p class="merge-said">${tree.columns === 1
    ? html`<span class="piece">${name}</span> is one piece from the start, id ${word.ids[0]}. There is nothing
      to join: the text is cut into words, digits and signs before any merge.`
    : html`No two neighbours in <span class="piece">${name}</span> were ever joined in the training: it stays ${
      plural(tree.columns, "token")}.`}</p></div>`;

/** Letters in the first row; a box hangs under the pieces it joins; ids stand in the last row. */
function Picture({ tree, step, name, onKeyDown }) {
  const view = useRef(null);
  useEffect(() => { // in a word wider than the screen, follow the merge
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
        style=${place(box, -1, 0)}>${letter === null ? "" : visible(letter).shown}</span>`)}
      ${tree.boxes.map((box) => html`<${Box} key=${box.step || `s${box.from}`} box=${box} step=${step} />`)}
      ${tree.tokens.map((box, n) => html`<span key=${`t${n}`} class="merge-id mono ${done ? "" : "later"}"
        data-id=${box.id} style=${place(box, tree.depth, tree.depth + 1)}>${done ? box.id : ""}</span>`)}
    </div>
  </div>`;
}

/** The first row is for the letters of bytes; without them it has no height. */
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
