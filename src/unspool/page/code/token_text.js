// A text token by token, as views of several texts show it, with its statistics and the candidates of a token.

import { attempt, jump, openView } from "./actions.js";
import { keepBranch } from "./library/sessions.js";
import {
  clamp, html, isBlank, isWord, percent, Piece, useChanges, useEffect, useLayoutEffect, useRef, useState,
  visibleText,
} from "./lib.js";
import { promptLength, state } from "./state.js";
import { tintClass } from "./write/pane.js";

// -- statistics: null if there is nothing to measure --------------------------------------------

/** Share of 4-grams that occurred before. */
export function repeatedFourGrams(steps) {
  const previous = new Set();
  let again = 0;
  const runs = steps.length - 3;
  for (let at = 0; at < runs; at += 1) {
    const run = [0, 1, 2, 3].map((next) => steps[at + next].token).join(" ");
    if (previous.has(run)) again += 1;
    previous.add(run);
  }
  return runs > 0 ? again / runs : null;
}

const mean = (steps, value) => (
  steps.length ? steps.reduce((sum, step) => sum + value(step), 0) / steps.length : null);

export const meanSurprisal = (steps) => mean(steps, (step) => -step.logprob);
export const meanEntropy = (steps) => mean(steps, (step) => step.entropy);

const WINDOW = 20; // words

/** Share of words that occur among the 20 words before them. */
export function repeatedWords(text) {
  const words = text.toLowerCase().match(/[\p{L}\p{N}'’]+/gu) ?? [];
  if (words.length < 2) return null;
  const again = words.filter((word, at) => words.slice(Math.max(0, at - WINDOW), at).includes(word));
  return again.length / words.length;
}

// -- the text: one tab stop; arrow keys move from token to token --------------------------------

/**
 * `parts`: index of the first token that differs from the reference text (null: no reference; -1: none differs);
 * `fork` is the tooltip there. `pick(at, element)` is called when a token is clicked.
 */
export function TokenText({ steps, parts = null, fork = "The same as the first column up to here", label, writing = false, pick }) {
  useChanges("tint");
  const [stop, setStop] = useState(0); // the token that is the tab stop
  const cache = useRef([]); // rendered tokens are reused: only new ones cost time
  const numSame = parts === null ? 0 : parts < 0 ? steps.length : parts;
  const here = Math.min(stop, steps.length - 1);

  const element = (step, at) => {
    const look = `${tintClass(step, state.tint)} ${isWord(step.text, steps[at - 1]?.text) ? "word" : ""} ${at < numSame ? "cmp-same" : ""} ${at === parts ? "cmp-parts" : ""}`;
    const before = cache.current[at];
    if (before?.step === step && before.look === look && before.stop === (at === here)) return before.node;
    const node = html`<span key=${at} class=${`t ${look}`} role="button" data-at=${at}
      tabindex=${at === here ? 0 : -1} aria-haspopup="dialog"
      aria-label=${step.text && isBlank(step.text) ? visibleText(step.text) : null}>${tokenLabel(step)}</span>`;
    cache.current[at] = { step, look, stop: at === here, node };
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

/** The text of a token; the end, a partial character and a line break get a visible mark. */
function tokenLabel(step) {
  if (step.text === "") return step.finish_reason === "stop" ? html`<i class="cmp-end">end</i>` : "·";
  if (step.text.includes("\ufffd")) return step.piece; // bytes of an incomplete character
  if (step.text.trim() === "" && step.text.includes("\n")) return `${visibleText("\n")}${step.text}`;
  return step.text;
}

// -- candidates of one token, in a popover ------------------------------------------------------

const MAX_CANDIDATES = 8;

/** Open a branch in the Write view, with the token `at` selected. */
export async function openInWrite(id, at = null) {
  await attempt(() => keepBranch(id));
  const branch = state.branches.get(id);
  await jump(id, at === null ? null : promptLength(branch) + at);
  openView("write");
}

/** `picked`: `{id, at, element}`. */
export function CandidatesPopover({ picked, close }) {
  const box = useRef(null);
  const [place, setPlace] = useState(null);
  const step = state.branches.get(picked.id)?.steps[picked.at];

  useLayoutEffect(() => {
    if (!box.current) return;
    const token = picked.element.getClientRects()[0] ?? picked.element.getBoundingClientRect();
    const inside = box.current.offsetParent.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = box.current;
    const below = token.bottom + 6;
    const fits = below + height < innerHeight || token.top - height < 8;
    setPlace({
      left: `${clamp(token.left - inside.left - 12, 0, Math.max(0, inside.width - width))}px`,
      top: `${(fits ? below : token.top - height - 6) - inside.top}px`,
    });
    box.current.focus({ preventScroll: true });
  }, [picked]);

  useEffect(() => {
    const outside = (event) => {
      if (!box.current?.contains(event.target) && !event.target.closest?.("[data-at]")) close(false);
    };
    document.addEventListener("pointerdown", outside);
    return () => document.removeEventListener("pointerdown", outside);
  }, []);

  if (!step) return null;
  const candidates = step.candidates.slice(0, MAX_CANDIDATES);
  if (!candidates.some((candidate) => candidate.token === step.token)) {
    candidates.splice(MAX_CANDIDATES - 1, 1, step); // show the sampled token last
  }
  const most = Math.max(...candidates.map(modelProbability));
  return html`<div ref=${box} class="cmp-popover panel" role="dialog" tabindex="-1"
      aria-label=${`Candidates for token ${picked.at + 1}`}
      style=${place ?? { opacity: 0 }}
      onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), close(true))}>
    <p class="small">Token ${picked.at + 1}: <${Piece} text=${step.piece} />
      ${step.draw ? `, sampled with probability ${percent(step.probability)}` : ""}</p>
    <table class="cmp-weighed">
      <thead class="visually-hidden"><tr>
        <th>token</th><th>bar</th><th>model</th><th>after sampling stages</th></tr></thead>
      <tbody>${candidates.map((candidate) => html`
        <tr class=${candidate.token === step.token ? "taken" : ""}>
          <th scope="row"><${Piece} text=${candidate.piece ?? candidate.text} /></th>
          <td aria-hidden="true"><div class="track">
            <span style=${{ width: `${(modelProbability(candidate) / most) * 100}%` }} /></div></td>
          <td class="cmp-number">${percent(modelProbability(candidate))}</td>
          <td class="cmp-number quiet">${percent(candidate.probability)}</td>
        </tr>`)}</tbody>
    </table>
    <p class="quiet small">First number: the model’s probability. Second: after the sampling stages.</p>
    <div class="row">
      <button class="button" onClick=${() => openInWrite(picked.id, picked.at)}>Open in Write</button>
      <button class="button" onClick=${() => close(true)}>Close</button>
    </div>
  </div>`;
}

const modelProbability = (candidate) => Math.exp(candidate.logprob);
