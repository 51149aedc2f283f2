// A Sudoku as a board: the prompt is its cells row by row, a dot for an empty one, and the places are the same cells.

import { html } from "../lib.js";
import { lookOf, saidOf } from "./looks.js";

/** How many cells a side has, if the prompt is a Sudoku; 0: it is not. */
export function boardSize(prompt) {
  if (/^[.1-9]{81}$/.test(prompt)) return 9;
  return /^[.1-4]{16}$/.test(prompt) ? 4 : 0;
}

/** Cells that break a rule: the same digit twice in a row, a column or a box. */
function clashes(size, digits) {
  const box = Math.sqrt(size);
  const found = new Set();
  const groups = new Map();
  digits.forEach((digit, at) => {
    if (!digit) return;
    const [row, column] = [Math.floor(at / size), at % size];
    const keys = [`r${row}`, `c${column}`, `b${Math.floor(row / box)}.${Math.floor(column / box)}`];
    for (const key of keys.map((each) => `${each}=${digit}`)) groups.set(key, [...(groups.get(key) ?? []), at]);
  });
  for (const group of groups.values()) if (group.length > 1) group.forEach((at) => found.add(at));
  return found;
}

export function Board({ size, puzzle, cells, pick = null, stop = 0 }) {
  const all = [...puzzle].map((given, number) => ({ given: given !== ".", ...(cells[number] ?? { number: pick ? number : -1, token: null, text: "" }) }));
  const digits = all.map(({ token, text }) => (token !== null && /^[1-9]$/.test(text) ? text : null));
  const wrong = clashes(size, digits);
  const full = digits.every(Boolean);
  const right = full && !wrong.size && [...puzzle].every((given, at) => given === "." || given === digits[at]);
  return html`<div class=${`board board-${size}`} role="group" aria-label=${`Sudoku, ${size} by ${size}`}>
    ${all.map((cell, number) => {
      const look = `${lookOf(cell)} ${cell.given ? "given" : ""} ${wrong.has(number) ? "wrong" : ""}`;
      const shown = cell.token === null && cell.probability == null ? (puzzle[number] === "." ? "" : puzzle[number]) : cell.text;
      if (!pick) return html`<span key=${number} class=${look}>${shown}</span>`;
      return html`<button key=${number} type="button" class=${look} data-place=${number} tabindex=${number === stop ? 0 : -1}
        aria-label=${saidOf(cell)} title=${saidOf(cell)} onClick=${() => pick(number)}>${shown}</button>`;
    })}
  </div>
  <p class="small" role="status">${right ? "Solved." : full ? `Full, and ${wrong.size ? "wrong" : "not this puzzle's"}.` : `${digits.filter(Boolean).length} of ${size * size} cells filled.`}</p>`;
}
