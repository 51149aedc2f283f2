// What all views use: Preact, number formats, tokens as text, colors, requests, browser services.

import { connect } from "./actions.js";
import { ApiError } from "./api.js";
import { on, state } from "./state.js";
import { useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { createElement, render } from "./vendor/preact.js";

export const html = htm.bind(createElement);
export { render, useEffect, useLayoutEffect, useMemo, useRef, useState };

/** Render this component again when one of the topics changes. */
export function useChanges(...topics) {
  const [, again] = useReducer((count) => count + 1, 0);
  useLayoutEffect(() => {
    const leave = topics.map((topic) => on(topic, again));
    return () => leave.forEach((stop) => stop());
  }, []);
}

const THROTTLE_MS = 200;

/** As `useChanges`, at most five times a second: for figures that follow a text that streams. */
export function useThrottledChanges(...topics) {
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
      timer ||= setTimeout(draw, Math.max(0, last + THROTTLE_MS - performance.now()));
    };
    const leave = topics.map((topic) => on(topic, wake));
    return () => {
      leave.forEach((stop) => stop());
      clearTimeout(timer);
    };
  }, []);
}

/** `[ref, width]`: the width of an element in pixels, updated when it changes. */
export function useWidth(initial = 400) {
  const box = useRef(null);
  const [width, setWidth] = useState(initial);
  useLayoutEffect(() => {
    const look = () => setWidth((before) => Math.floor(box.current.clientWidth) || before);
    const watch = new ResizeObserver(look);
    watch.observe(box.current);
    look();
    return () => watch.disconnect();
  }, []);
  return [box, width];
}

// -- number formats ---------------------------------------------------------------------------

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
const NUMBER = new Intl.NumberFormat("en-US");
export const count = (n) => (n == null ? "–" : NUMBER.format(n));

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

export const plural = (n, singular, many = `${singular}s`) => `${count(n)} ${n === 1 ? singular : many}`;

export function ordinal(n) {
  const tail = n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th";
  return `${count(n)}${tail}`;
}

export const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

// -- tokens as text ---------------------------------------------------------------------------

const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/;

// Bytes that are no valid character, as the server writes them (⟨F0 9F⟩), or one character.
const BYTES_OR_LETTER = /⟨[0-9A-F]{2}(?: [0-9A-F]{2})*⟩|[^]/gu;

/** Split into runs of visible text and marks for invisible characters: `{text, mark}`. */
export function markInvisible(text) {
  const runs = [];
  const pushRun = (text, mark) => {
    const last = runs[runs.length - 1];
    if (!mark && last && !last.mark) last.text += text;
    else runs.push({ text, mark });
  };
  for (const letter of text.match(BYTES_OR_LETTER) ?? []) {
    if (letter.length > 2) pushRun(letter, true);
    else if (letter === " ") pushRun("␣", true);
    else if (letter === "\n") pushRun("⏎", true);
    else if (letter === "\t") pushRun("⇥", true);
    else if (letter === "\u00a0") pushRun("⍽", true);
    else if (INVISIBLE.test(letter)) {
      pushRun(`U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`, true);
    } else pushRun(letter, false);
  }
  return runs;
}

/** A token as plain text with its invisible characters marked. */
export const visibleText = (text) => markInvisible(text).map((run) => run.text).join("");

/** Whether it has no visible character: only blanks, controls, format characters. */
export const isBlank = (text) => !/[^\p{C}\p{Z}\s]/u.test(text);

/** Whether a token starts with the space before a word. At a line break that space is not tinted; an indent is. */
export const isWord = (text, before) => /^ \S/.test(text) && /[^\n]$/.test(before ?? "");

/** A token as a chip with visible spaces and line breaks. */
export function Piece({ text, ...attributes }) {
  const runs = markInvisible(text ?? "");
  return html`<span class="piece" dir="auto" ...${attributes}>${
    runs.length ? runs.map(({ text, mark }) => (mark ? html`<i>${text}</i>` : text)) : html`<i>∅</i>`
  }</span>`;
}

/** Hides children with the class `folds` on a narrow screen, with a button that shows them. */
export function Fold({ as = "div", name, children, ...attributes }) {
  const [isOpen, setOpen] = useState(false);
  return html`<${as} ...${attributes} class=${`${attributes.class} fold ${isOpen ? "unfolded" : ""}`}>${children}
    <button type="button" class="button plain unfolds" aria-expanded=${isOpen} aria-label=${name} title=${name}
      onClick=${() => setOpen(!isOpen)}>⋯</button><//>`;
}

/** Chat template or plain continuation of the prompt. */
export function ModeSegments({ mode, pick, canChat = true }) {
  return html`<div class="segments" role="group" aria-label="Mode">
    <button type="button" aria-pressed=${mode === "chat"} disabled=${!canChat} onClick=${() => pick("chat")}
      title="Format the prompt with the model's chat template">Chat</button>
    <button type="button" aria-pressed=${mode !== "chat"} onClick=${() => pick("plain")}
      title="Continue the prompt as it is, without a chat template">Plain</button>
  </div>`;
}

/** A row of tabs, `{id: title}`; arrow keys move between them. */
export function Tabs({ tabs, now, pick, prefix, ...attributes }) {
  const ids = Object.keys(tabs);
  const onKey = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = ids[(ids.indexOf(now) + move + ids.length) % ids.length];
    pick(next);
    document.getElementById(`${prefix}-${next}`).focus();
  };
  const { class: look, controls, label } = attributes;
  return html`<div class=${`segments ${look ?? ""}`} role="tablist" aria-label=${label} onKeyDown=${onKey}>
    ${ids.map((id) => html`<button key=${id} role="tab" id=${`${prefix}-${id}`} aria-controls=${controls}
      aria-selected=${now === id} tabindex=${now === id ? 0 : -1} onClick=${() => pick(id)}>${tabs[id]}</button>`)}
  </div>`;
}

// -- small services ---------------------------------------------------------------------------

/** Copy to the clipboard; false if the browser does not allow it. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** Download a file. */
export function saveFile(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Whether the side panel is a sheet at the bottom; same width as in write.css. */
export const isNarrow = () => matchMedia("(max-width: 60rem)").matches;

export const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Values in the local storage of the browser; ignored where it has none. */
export const storage = {
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
      /* a private window or a full storage: not saved */
    }
  },
};

// -- components that are loaded when first shown ------------------------------------------------

const loaded = new Map(); // file -> module

export function Lazy({ file, name, quiet = false, ...props }) {
  const [part, setPart] = useState(() => loaded.get(file)?.[name] ?? null);
  const [fails, setFails] = useState(false);
  useEffect(() => {
    if (part) return;
    import(file).then(
      (module) => {
        loaded.set(file, module);
        setPart(() => module[name]);
      },
      (error) => {
        console.error(error);
        setFails(true);
      },
    );
  }, []);
  if (part) return html`<${part} ...${props} />`;
  if (fails && !quiet) return html`<p class="bad">This part of the page could not be loaded. Is the server still running?</p>`;
  return null;
}

// -- colors of the theme, resolved for canvases: they cannot read `light-dark()` ----------------

const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const themeListeners = new Set();
let cachedColors = new Map();

function resetColors() {
  cachedColors = new Map();
  for (const listener of themeListeners) listener();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resetColors);
new MutationObserver(resetColors).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });

/** Call `listener` when the theme changes. Returns the function that unsubscribes. */
export function onThemeChange(listener) {
  themeListeners.add(listener);
  return () => themeListeners.delete(listener);
}

/** A number that changes with the theme: a key for memoized drawings. */
export function useTheme() {
  const [turns, setTurns] = useState(0);
  useEffect(() => onThemeChange(() => setTurns((turns) => turns + 1)), []);
  return turns;
}

/** A CSS color as `[red, green, blue, alpha]`, each 0 to 255. */
export function rgbaOf(color) {
  probe.clearRect(0, 0, 1, 1);
  probe.fillStyle = color;
  probe.fillRect(0, 0, 1, 1);
  return probe.getImageData(0, 0, 1, 1).data;
}

/** The current color of a variable of base.css. */
export function colorOf(name) {
  if (!cachedColors.has(name)) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    cachedColors.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return cachedColors.get(name);
}

// -- requests that follow typing: debounced, and outdated answers are dropped -------------------

const RETRY_MS = 1000;

/**
 * Call `ask` `wait` milliseconds after `keys` last changed. Returns `{answer, fault, fresh, again}`: the last answer
 * stays until the next one arrives (then `fresh` is true again); `again()` repeats the request. `ask` null: no request.
 */
export function useRequest(ask, wait, keys) {
  const [response, setResponse] = useState({ answer: null, fault: null, question: null });
  const [turn, setTurn] = useState(0);
  const question = JSON.stringify([...keys, turn]);
  useEffect(() => {
    if (!ask) return undefined;
    const overtaken = new AbortController();
    let leave = null;
    const retryWhenBack = async () => {
      const again = () => setTimeout(() => overtaken.signal.aborted || setTurn((n) => n + 1), RETRY_MS);
      if (await connect()) again();
      else leave = on("server", () => state.server.ready && again());
    };
    const timer = setTimeout(async () => {
      try {
        const answer = await ask(overtaken.signal);
        if (!overtaken.signal.aborted) setResponse({ answer, fault: null, question });
      } catch (error) {
        if (overtaken.signal.aborted) return;
        if (!(error instanceof ApiError)) throw error;
        setResponse((before) => ({ ...before, fault: error, question }));
        if (error.status === 401) connect(); // asks for a key
        if (error.isOffline) retryWhenBack();
      }
    }, wait);
    return () => {
      clearTimeout(timer);
      leave?.();
      overtaken.abort();
    };
  }, [question, ask === null]);
  return {
    answer: response.answer,
    fault: response.question === question ? response.fault : null,
    fresh: response.question === question && !response.fault,
    again: () => setTurn((n) => n + 1),
  };
}

/** The error of a request, with a button that repeats it. */
export const RequestError = ({ fault, again }) => fault && html`
  <p class="fault" role="alert">
    ${fault.message} <button type="button" class="button tiny" onClick=${again}>Try again</button>
  </p>`;

// -- session files dropped on the page ----------------------------------------------------------

let readFile = null; // reads a dropped file; set while the share dialog is open
let pendingFile = null;

/** Call `read` for dropped files, also for one dropped before. Returns the function that stops that. */
export function readDroppedFiles(read) {
  readFile = read;
  if (pendingFile) read(pendingFile);
  pendingFile = null;
  return () => { readFile = null; };
}

/** Accept files dropped anywhere on the page; `opened` opens the dialog that reads them. */
export function listenForDrops(opened) {
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  const over = (event) => {
    if (isFile(event)) event.preventDefault(); // else the browser would navigate to the file
  };
  const dropped = (event) => {
    if (!isFile(event) || event.defaultPrevented) return;
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (!file) return;
    if (readFile) readFile(file);
    else pendingFile = file;
    opened();
  };
  addEventListener("dragover", over);
  addEventListener("drop", dropped);
  return () => {
    removeEventListener("dragover", over);
    removeEventListener("drop", dropped);
  };
}
