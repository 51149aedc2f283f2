// The canvas after a denoising pass: its places as text or as a Sudoku board, and the panel of one place.

import {
  diffusion, isWriting, placesAfter, resumeFromHere, setDiffusion, setText, setTokens, shownCanvasPass,
} from "./runs.js";
import { html, isBlank, percent, Piece, plural, useState, visibleText } from "../lib.js";

const CHANGE_TEXTS = { set: "set now", edited: "replaced now", cleared: "remasked now", hand: "set by you" };

/** A place with the user's edit. */
function withEdit(place) {
  if (!diffusion.edits.has(place.number)) return place;
  const now = diffusion.edits.get(place.number);
  return { ...place, token: now?.token ?? null, text: now?.text ?? place.text, change: "hand", isByHand: true };
}

function placeClass(place) {
  const names = ["place"];
  if (place.token === null) names.push(place.isOpen || place.probability != null ? "guess" : "blank");
  if (place.change) names.push(`did-${place.change}`);
  if (diffusion.place === place.number) names.push("looked-at");
  return names.join(" ");
}

/** A place as text, for tooltips and screen readers. */
function placeLabel(place) {
  const what = place.token === null ? (place.probability == null ? "masked" : `masked, predicted ${visibleText(place.text)}`) : visibleText(place.text);
  const sure = place.probability == null ? "" : `, ${percent(place.probability)}`;
  return `Place ${place.number + 1}: ${what}${sure}${place.change ? `, ${CHANGE_TEXTS[place.change]}` : ""}`;
}

// -- Sudoku: the prompt is its cells row by row, a dot for an empty one ---------------------------------

/** Side length of the Sudoku in the prompt; 0 if it is none. */
export function boardSize(prompt) {
  if (/^[.1-9]{81}$/.test(prompt)) return 9;
  return /^[.1-4]{16}$/.test(prompt) ? 4 : 0;
}

/** Cells with the same digit as another in their row, column or box. */
function clashes(size, digits) {
  const box = Math.sqrt(size);
  const clashing = new Set();
  const groups = new Map();
  digits.forEach((digit, at) => {
    if (!digit) return;
    const [row, column] = [Math.floor(at / size), at % size];
    const keys = [`r${row}`, `c${column}`, `b${Math.floor(row / box)}.${Math.floor(column / box)}`];
    for (const key of keys.map((group) => `${group}=${digit}`)) groups.set(key, [...(groups.get(key) ?? []), at]);
  });
  for (const group of groups.values()) if (group.length > 1) group.forEach((at) => clashing.add(at));
  return clashing;
}

export function Board({ size, puzzle, cells, pick = null, stop = 0 }) {
  const all = [...puzzle].map((clue, number) => {
    const cell = cells[number] ?? { number: pick ? number : -1, token: null, text: "" };
    const isReplaced = clue !== "." && cell.token !== null && cell.text !== clue; // a model may write another digit over a given one
    return { ...cell, given: clue !== "." && !isReplaced, clue, isReplaced };
  });
  const digits = all.map(({ token, text }) => (token !== null && /^[1-9]$/.test(text) ? text : null));
  const wrong = clashes(size, digits);
  const full = digits.every(Boolean);
  const replaced = all.filter(({ isReplaced }) => isReplaced).length;
  const isSolved = full && !wrong.size && [...puzzle].every((clue, at) => clue === "." || clue === digits[at]);
  return html`<div class=${`board board-${size}`} role="group" aria-label=${`Sudoku, ${size} by ${size}`}>
    ${all.map((cell, number) => {
      const look = `${placeClass(cell)} ${cell.given ? "given" : ""} ${wrong.has(number) || cell.isReplaced ? "wrong" : ""} ${cell.isReplaced ? "replaced" : ""}`;
      const label = cell.isReplaced ? `Given ${cell.clue}, replaced by ${visibleText(cell.text)}` : null;
      const text = cell.token === null && cell.probability == null ? (puzzle[number] === "." ? "" : puzzle[number]) : cell.text;
      if (!pick) return html`<span key=${number} class=${look} role=${label && "img"} aria-label=${label} title=${label}>${text}</span>`;
      return html`<button key=${number} type="button" class=${look} data-place=${number} tabindex=${number === stop ? 0 : -1}
        aria-label=${label ?? placeLabel(cell)} title=${label ?? placeLabel(cell)} onClick=${() => pick(number)}>${text}</button>`;
    })}
  </div>
  <p class="small" role="status">${isSolved ? "Solved." : full ? `Full, but ${wrong.size ? "wrong" : "not a solution of this puzzle"}.` : `${digits.filter(Boolean).length} of ${size * size} cells filled.`}${
    replaced ? ` ${plural(replaced, "given digit")} replaced.` : ""}</p>`;
}

// -- one place: its candidates, and editing by hand -----------------------------------------------------

export function PlacePanel() {
  const { place: number, edits, canvasRun } = diffusion;
  const open = number === null ? null : withEdit(placesAfter(shownCanvasPass())[number]);
  const isBehind = shownCanvasPass() < canvasRun.passes.length;
  const canGo = !isWriting() && (edits.size > 0 || isBehind || canvasRun.done?.finish_reason === "interrupted");
  return html`<div class="stack twins-hand">
    ${open && html`<${Candidates} place=${open} key=${number} />`}
    ${(canGo || edits.size > 0) && html`<div class="row">
      <button class="button main" id="twins-go-on" disabled=${!canGo} onClick=${resumeFromHere}>Resume from here</button>
      ${edits.size > 0 && html`<span class="small">${plural(edits.size, "place")} edited</span>
        <button class="button tiny" onClick=${() => setDiffusion({ edits: new Map() })}>Undo edits</button>`}</div>`}
    ${!open && !edits.size && html`<p class="quiet small">Select a place to see its candidate tokens, and to set or clear it.</p>`}
  </div>`;
}

function Candidates({ place }) {
  const { number, token, candidates = [] } = place;
  const [words, setWords] = useState("");
  const [fault, setFault] = useState(null);
  const most = Math.max(...candidates.map(({ probability }) => probability ?? 0), 1e-9);
  const submit = async (event) => {
    event.preventDefault();
    if (!words) return;
    try {
      await setText(number, words);
      setWords("");
      setFault(null);
    } catch (error) {
      setFault(error.message);
    }
  };
  return html`<div class="panel stack twins-place" role="group" aria-label=${`Place ${number + 1}`}>
    <div class="row spread"><h4>Place ${number + 1}</h4>
      <button class="button tiny" id="twins-clear" disabled=${token === null} onClick=${() => setTokens(number, [null])}>Clear</button></div>
    ${candidates.length === 0 && html`<p class="quiet small">No candidates yet.</p>`}
    <ul class="twins-candidates">${candidates.map((candidate) => html`<li key=${candidate.token}>
      <button aria-pressed=${candidate.token === token} onClick=${() => setTokens(number, [{ token: candidate.token, text: candidate.text }])}>
        <${Piece} text=${candidate.text} /><span class="track" aria-hidden="true"><span style=${{ width: `${((candidate.probability ?? 0) / most) * 100}%` }} /></span>
        <span class="twins-chance">${percent(candidate.probability)}</span></button></li>`)}</ul>
    <form class="row" onSubmit=${submit}><label class="grow"><span class="visually-hidden">Your own text, from this place on</span>
      <input class="field" dir="auto" placeholder="Your own text, from here on" value=${words} onInput=${(event) => setWords(event.target.value)} /></label>
      <button class="button" disabled=${!words}>Set</button></form>
    ${fault && html`<p class="fault" role="alert">${fault}</p>`}
  </div>`;
}

// -- the canvas: one tab stop; arrow keys move from place to place ---------------------------------------

export function Canvas() {
  const [stop, setStop] = useState(0);
  const places = placesAfter(shownCanvasPass()).map(withEdit);
  const prompt = diffusion.canvasRun.start.prompt.map(({ text }) => text).join("");
  const size = boardSize(prompt);
  const pick = (number) => {
    setStop(number);
    setDiffusion({ place: diffusion.place === number ? null : number });
  };
  const keys = (event) => {
    const now = event.target.closest("[data-place]");
    const across = size || 1;
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
    if (!now || !move) return;
    const next = event.currentTarget.querySelector(`[data-place="${Number(now.dataset.place) + move}"]`);
    event.preventDefault();
    if (!next) return;
    setStop(Number(next.dataset.place));
    next.focus();
  };
  if (size) return html`<div class="stack" onKeyDown=${keys}><${Board} size=${size} puzzle=${prompt} cells=${places} pick=${pick} stop=${stop} /></div>`;
  return html`<div class="canvas" role="group" aria-label="Canvas; arrow keys move from place to place" onKeyDown=${keys}>
    ${places.map((place) => html`<${Place} key=${place.number} place=${place} pick=${pick} isStop=${place.number === stop} />`)}</div>`;
}

function Place({ place, pick, isStop }) {
  const isMasked = place.token === null;
  const text = isMasked && place.probability == null ? "▒" : isBlank(place.text) ? visibleText(place.text) || "∅" : place.text;
  return html`<button type="button" class=${placeClass(place)} data-place=${place.number} tabindex=${isStop ? 0 : -1} aria-label=${placeLabel(place)}
    title=${placeLabel(place)} aria-pressed=${diffusion.place === place.number} onClick=${() => pick(place.number)}
    style=${{ "--sure": place.probability ?? (isMasked ? 0 : 1) }}>${text}</button>`;
}
