// The model's thoughts in the text: folded under a line that says what they took, and opened by a click.

import { count } from "../lib.js";
import { state } from "../state.js";

let number = 0; // of the next fold, for its name

/** Where a token's line belongs: into the text, or into the fold of the thought that is written. */
export function homeOf(body, token) {
  if (!token.thought) return body;
  const last = body.lastChild;
  return (last?.classList.contains("thought") ? last : newFold(body)).lastChild;
}

function newFold(body) {
  const fold = document.createElement("div");
  fold.className = "thought";
  const head = document.createElement("button");
  head.type = "button";
  head.className = "thought-head";
  const inside = document.createElement("div");
  number += 1;
  inside.id = `thought-${number}`;
  inside.className = "thought-body";
  head.setAttribute("aria-controls", inside.id);
  head.addEventListener("click", (event) => {
    event.stopPropagation(); // it is no token
    setOpen(fold, inside.hidden);
  });
  fold.append(head, inside);
  Object.assign(fold, { tokens: 0, seconds: 0 });
  setOpen(fold, false);
  body.append(fold);
  return fold;
}

function setOpen(fold, isOpen) {
  fold.lastChild.hidden = !isOpen;
  fold.firstChild.setAttribute("aria-expanded", String(isOpen));
}

/** One more token of a thought, or (-1) one less. */
export function countThought(span, token, change = 1) {
  const fold = span.closest(".thought");
  if (!fold) return;
  fold.tokens += change;
  fold.seconds += change * (token.seconds ?? 0);
}

/** Say what each thought took; the last one may still be going on. */
export function tellThoughts(body) {
  for (const fold of body.querySelectorAll(":scope > .thought")) {
    const isGoingOn = state.writing !== null && fold === body.lastChild;
    const took = `${count(fold.tokens)} ${fold.tokens === 1 ? "token" : "tokens"}, ${fold.seconds.toFixed(1)} s`;
    const told = `${isGoingOn ? "Thinking" : "Thought"} · ${took}`;
    if (fold.firstChild.textContent !== told) fold.firstChild.textContent = told;
  }
}

/** A token that is looked at is in sight. */
export function unfold(span) {
  const fold = span?.closest(".thought");
  if (fold?.lastChild.hidden) setOpen(fold, true);
}

/** Remove lines and folds that have become empty. */
export function tidy(body) {
  for (let last = body.lastChild; last; last = body.lastChild) {
    if (last.classList.contains("thought")) {
      const lines = last.lastChild;
      while (lines.lastChild && !lines.lastChild.hasChildNodes()) lines.lastChild.remove();
      if (lines.hasChildNodes()) return;
    } else if (last.hasChildNodes()) return;
    last.remove();
  }
}
