// What every part of the page uses: components, formats, small browser services.

import { Fragment, createElement, render } from "./vendor/preact.js";
import {
  useCallback, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { on } from "./state.js";

export const html = htm.bind(createElement);
export { Fragment, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };

/** Draw this component again when one of the topics changes. */
export function useChanges(...topics) {
  const [, again] = useReducer((count) => count + 1, 0);
  useLayoutEffect(() => {
    const leave = topics.map((topic) => on(topic, again));
    return () => leave.forEach((stop) => stop());
  }, []);
}

const CALM = 200; // milliseconds

/** As `useChanges`, at most five times a second: for words that follow a text as it is written. */
export function useCalmChanges(...topics) {
  const [, again] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    let timer = 0;
    let last = -Infinity;
    const draw = () => {
      timer = 0;
      last = performance.now();
      again();
    };
    const wake = () => {
      timer ||= setTimeout(draw, Math.max(0, last + CALM - performance.now()));
    };
    const leave = topics.map((topic) => on(topic, wake));
    return () => {
      leave.forEach((stop) => stop());
      clearTimeout(timer);
    };
  }, []);
}

/** `[ref, width]`: the width of an element in pixels, followed as it changes. */
export function useWidth(usual = 400) {
  const box = useRef(null);
  const [width, setWidth] = useState(usual);
  useLayoutEffect(() => {
    const look = () => setWidth((before) => Math.floor(box.current.clientWidth) || before);
    const watch = new ResizeObserver(look);
    watch.observe(box.current);
    look();
    return () => watch.disconnect();
  }, []);
  return [box, width];
}

// -- numbers for people -----------------------------------------------------------------------

export function percent(p) {
  if (p == null || Number.isNaN(p)) return "–";
  const value = p * 100;
  if (value === 0) return "0 %";
  if (value < 0.01) return "<0.01 %";
  if (value < 1) return `${value.toFixed(2)} %`;
  if (value < 10) return `${value.toFixed(1)} %`;
  return `${value > 99.95 && value < 100 ? ">99.9" : Math.round(value)} %`;
}

export const nats = (x) => (x == null ? "–" : x.toFixed(2));
const WHOLE = new Intl.NumberFormat("en-US");
export const count = (n) => (n == null ? "–" : WHOLE.format(n));

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function ordinal(n) {
  const tail = n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th";
  return `${count(n)}${tail}`;
}

export const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// -- a token for people -----------------------------------------------------------------------

const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/;

// How the server shows bytes that are no character (⟨F0 9F⟩), or else one character.
const BYTES_OR_LETTER = /⟨[0-9A-F]{2}(?: [0-9A-F]{2})*⟩|[^]/gu;

/** Cut into runs of ordinary text and marks for what the eye would not see. */
export function marked(text) {
  const runs = [];
  const put = (shown, mark) => {
    const last = runs[runs.length - 1];
    if (!mark && last && !last.mark) last.shown += shown;
    else runs.push({ shown, mark });
  };
  for (const letter of text.match(BYTES_OR_LETTER) ?? []) {
    if (letter.length > 2) put(letter, true);
    else if (letter === " ") put("␣", true);
    else if (letter === "\n") put("⏎", true);
    else if (letter === "\t") put("⇥", true);
    else if (letter === "\u00a0") put("⍽", true);
    else if (INVISIBLE.test(letter)) {
      put(`U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`, true);
    } else put(letter, false);
  }
  return runs;
}

/** A token as words in a sentence or a label can carry it. */
export const spelled = (text) => marked(text).map((run) => run.shown).join("");

/** Whether nothing of it would be seen: blanks, controls, characters without a shape. */
export const isBlank = (text) => !/[^\p{C}\p{Z}\s]/u.test(text);

/**
 * The space before a word goes with the line before it, and is not drawn at its end: no colored sliver.
 * At the start of a line it is an indent, and stays.
 */
export const isWord = (text, before) => /^ \S/.test(text) && /[^\n]$/.test(before ?? "");

/** A token as a chip in which spaces and line breaks can be seen. */
export function Piece({ text, ...rest }) {
  const runs = marked(text ?? "");
  return html`<span class="piece" dir="auto" ...${rest}>${
    runs.length ? runs.map(({ shown, mark }) => (mark ? html`<i>${shown}</i>` : shown)) : html`<i>∅</i>`
  }</span>`;
}

/** Children of which those with the class `folds` are put away on a narrow screen, and a button that shows them. */
export function Fold({ as = "div", name, children, ...rest }) {
  const [isOpen, setOpen] = useState(false);
  return html`<${as} ...${rest} class=${`${rest.class} fold ${isOpen ? "unfolded" : ""}`}>${children}
    <button type="button" class="button plain unfolds" aria-expanded=${isOpen} aria-label=${name} title=${name}
      onClick=${() => setOpen(!isOpen)}>⋯</button><//>`;
}

/** A row of tabs, `{id: title}`; arrow keys go from one to the next. */
export function Tabs({ tabs, now, pick, prefix, ...rest }) {
  const ids = Object.keys(tabs);
  const onKey = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = ids[(ids.indexOf(now) + move + ids.length) % ids.length];
    pick(next);
    document.getElementById(`${prefix}-${next}`).focus();
  };
  const { class: look, controls, label } = rest;
  return html`<div class=${`segments ${look ?? ""}`} role="tablist" aria-label=${label} onKeyDown=${onKey}>
    ${ids.map((id) => html`<button key=${id} role="tab" id=${`${prefix}-${id}`} aria-controls=${controls}
      aria-selected=${now === id} tabindex=${now === id ? 0 : -1} onClick=${() => pick(id)}>${tabs[id]}</button>`)}
  </div>`;
}

// -- small services ---------------------------------------------------------------------------

/** Copy; false where the browser does not let us. */
export async function clipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** Hand a file to the person. */
export function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Where the panel is a sheet at the bottom; as in write.css. */
export const isNarrow = () => matchMedia("(max-width: 60rem)").matches;

export const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** What the browser keeps for this page; nothing is lost where it keeps nothing. */
export const kept = {
  get(name, otherwise = null) {
    try {
      return JSON.parse(localStorage.getItem(`unspool.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`unspool.${name}`, JSON.stringify(value));
    } catch {
      /* a private window, or a full store: then it is not kept */
    }
  },
};
