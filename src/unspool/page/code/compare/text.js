// A text token by token, tinted as in the Write view. One stop of the tab key; arrows go on inside.

import { html, isBlank, isWord, spelled, useChanges, useRef, useState } from "../lib.js";
import { state } from "../state.js";
import { tintOf } from "../write/tint.js";

/**
 * `parts`: the first token that is not as in the first column (null: nothing to say; -1: none yet); `fork` says so.
 * `pick(at, element)` is called when a person wants to know more of a token.
 */
export function TokenText({ steps, parts = null, fork = "The same as the first column up to here", label, writing = false, pick }) {
  useChanges("tint");
  const [stop, setStop] = useState(0); // which token the tab key comes to
  const drawn = useRef([]); // what is drawn stays the same object: only new tokens cost time
  const same = parts === null ? 0 : parts < 0 ? steps.length : parts;
  const here = Math.min(stop, steps.length - 1);

  const element = (step, at) => {
    const look = `${tintOf(step, state.tint)} ${isWord(step.text, steps[at - 1]?.text) ? "word" : ""} ${at < same ? "cmp-same" : ""} ${at === parts ? "cmp-parts" : ""}`;
    const before = drawn.current[at];
    if (before?.step === step && before.look === look && before.stop === (at === here)) return before.node;
    const node = html`<span key=${at} class=${`t ${look}`} role="button" data-at=${at}
      tabindex=${at === here ? 0 : -1} aria-haspopup="dialog"
      aria-label=${step.text && isBlank(step.text) ? spelled(step.text) : null}>${wordsOf(step)}</span>`;
    drawn.current[at] = { step, look, stop: at === here, node };
    return node;
  };
  const nodes = steps.map(element);
  if (parts > 0) {
    nodes.splice(parts, 0, html`<span key="parts" class="cmp-fork" aria-hidden="true" title=${fork}></span>`);
  }

  const at = (event) => event.target.closest?.("[data-at]");
  const keys = (event) => {
    const token = at(event);
    if (!token) return;
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" || event.key === " ") pick(Number(token.dataset.at), token);
    else if (move) {
      const next = token.parentElement.querySelector(`[data-at="${Number(token.dataset.at) + move}"]`);
      if (!next) return;
      setStop(Number(next.dataset.at));
      next.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const click = (event) => {
    const token = at(event);
    if (!token) return;
    setStop(Number(token.dataset.at));
    pick(Number(token.dataset.at), token);
  };
  return html`<div class="cmp-text" role="group" aria-label=${label} aria-busy=${writing}
    onClick=${click} onKeyDown=${keys}>${nodes}${writing && html`<span class="cmp-caret" />`}</div>`;
}

/** The end, a part of a character and a line break would not be seen without a mark. */
function wordsOf(step) {
  if (step.text === "") return step.finish_reason === "stop" ? html`<i class="cmp-end">end</i>` : "·";
  if (step.text.includes("\ufffd")) return step.piece; // a character that was never completed: its bytes
  if (step.text.trim() === "" && step.text.includes("\n")) return `${spelled("\n")}${step.text}`;
  return step.text;
}
