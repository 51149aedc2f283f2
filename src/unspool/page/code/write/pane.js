// The text, token by token. Plain DOM, not components: thousands of tokens stay in place, and a frame touches only
// new ones.

import { selectToken } from "../actions.js";
import { clamp, count, isNarrow, isWord, nats, ordinal, percent, visibleText } from "../lib.js";
import { changed, currentBranch, isTemplate, on, promptLength, state, stepAt, textLength, tokenAt } from "../state.js";
import { mountDocument, startEditing } from "./document.js";
import { applyMarks, extendSpan, selectChangeAt, watchSelection } from "./edits.js";

export const TINTS = {
  probability: "probability", entropy: "entropy", rank: "rank", doubt: "doubt", none: "no color",
};

const LOG_STEPS = 9 / Math.log(1000); // from certain to one in a thousand
const ENTROPY_STEPS = 9 / 6; // a step of two thirds of a nat

const TINT_LEVELS = {
  // -- tints: 0 (certain) to 9
  probability: (step) => -(step.logprob ?? -50) * LOG_STEPS,
  entropy: (step) => (step.entropy ?? 0) * ENTROPY_STEPS,
  rank: (step) => (step.rank ? 1 + Math.log2(step.rank) : 0),
  doubt: (step) => (step.doubt ?? 0) * LOG_STEPS, // loaded on demand: loadDoubt
  none: () => 0,
};

/** The CSS class that tints a step; none for certain tokens. */
export function tintClass(step, by) {
  if (!step || step.logprob === undefined) return "";
  if (step.logprob === null && step.rank === null) return "unscored"; // it follows an edit
  const tint = Math.round(clamp(TINT_LEVELS[by](step), 0, 9));
  return tint ? `tint-${tint}` : "";
}

/** The ends of each scale. */
export const TINT_SCALES = {
  probability: ["likely", "1 in 1,000"], entropy: ["sure", "6 nats"], rank: ["1st", "256th"],
  doubt: ["fits", "doubtful"],
};

/** A step as a short text for screen readers. */
function describeStep(step) {
  const p = step.logprob === null ? 0 : Math.exp(step.logprob);
  return `probability ${percent(p)}, ${ordinal(step.rank + 1)}, entropy ${nats(step.entropy)} nats`;
}

// -- reasoning output: folded under a title with its number of tokens and time ---------------------

let foldCount = 0; // for unique ids

/** The element for a token's line: the text, or the last reasoning fold. */
function lineParent(body, token) {
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
  foldCount += 1;
  inside.id = `thought-${foldCount}`;
  inside.className = "thought-body";
  head.setAttribute("aria-controls", inside.id);
  head.addEventListener("click", (event) => {
    event.stopPropagation(); // not a token
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

/** Add a token to the totals of its fold, or (-1) remove it. */
function countReasoning(span, token, change = 1) {
  const fold = span.closest(".thought");
  if (!fold) return;
  fold.tokens += change;
  fold.seconds += change * (token.seconds ?? 0);
}

/** Update the titles of the folds; the last one may still be growing. */
function updateReasoningTitles(body) {
  for (const fold of body.querySelectorAll(":scope > .thought")) {
    const isGrowing = state.writing !== null && fold === body.lastChild;
    const took = `${count(fold.tokens)} ${fold.tokens === 1 ? "token" : "tokens"}, ${fold.seconds.toFixed(1)} s`;
    const title = `${isGrowing ? "Reasoning …" : "Reasoning"} · ${took}`;
    if (fold.firstChild.textContent !== title) fold.firstChild.textContent = title;
  }
}

/** Open the fold of a selected token. */
function unfold(span) {
  const fold = span?.closest(".thought");
  if (fold?.lastChild.hidden) setOpen(fold, true);
}

/** Remove lines and folds that have become empty. */
function removeEmptyLines(body) {
  for (let last = body.lastChild; last; last = body.lastChild) {
    if (last.classList.contains("thought")) {
      const lines = last.lastChild;
      while (lines.lastChild && !lines.lastChild.hasChildNodes()) lines.lastChild.remove();
      if (lines.hasChildNodes()) return;
    } else if (last.hasChildNodes()) return;
    last.remove();
  }
}

// -- the text -----------------------------------------------------------------------------------

const NEAR_END = 80; // px: within this distance of the end, the view follows the text
const SPECIAL = /^<\|.*\|>$|^<\/?s>$|^<[a-z_]+>$/;

let box = null; // the scroll container
let body = null; // contains the lines
let layer = null; // the SVG over the text
let announcement = null; // the selected token, for screen readers
let rendered = { id: null, tokens: [], spans: [], line: null };
let highlight = null;
let selectedSpan = null;
let follows = true; // whether the view follows the end of a growing text
let lastWriting = null; // the generation that took the focus

/** Create the pane inside an element. Returns the function that unmounts it. */
export function mountPane(element) {
  box = element;
  body = document.createElement("div");
  body.className = "tokens";
  body.setAttribute("role", "textbox");
  body.setAttribute("aria-multiline", "true");
  body.setAttribute("aria-label", "The text: type to change it");
  body.dir = "auto";
  layer = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  layer.id = "text-overlay";
  layer.setAttribute("aria-hidden", "true");
  announcement = document.createElement("p");
  announcement.className = "visually-hidden";
  announcement.setAttribute("role", "status");
  box.append(body, layer, announcement);
  rendered = { id: null, tokens: [], spans: [], line: null };
  // Not "pointerover": that also fires when the layout moves a token under a pointer that rests.
  body.addEventListener("pointermove", hover);
  body.addEventListener("pointerleave", leaveText);
  body.addEventListener("click", (event) => onTokenClick(positionOf(event.target)));
  box.addEventListener("keydown", onKey);
  follows = false;
  box.addEventListener("scroll", scrolled, { passive: true });
  // Observers run after layout, so reading sizes is free. The box shrinks when the reply form appears below it.
  const resized = new ResizeObserver(keepVisible);
  resized.observe(body);
  resized.observe(box);
  const leave = [
    on("steps", draw), on("current", draw), on("current", forgetAim), on("tint", retint), on("selection", markSelected), on("writing", onWritingChange),
    on("span", updateMarks), on("revision", updateMarks), on("placement", updateMarks), watchSelection(body),
    mountDocument({ box, body, redraw, restyle, get spans() { return rendered.spans; }, get tokens() { return rendered.tokens; } }),
    () => resized.disconnect(),
  ];
  draw();
  return () => {
    leave.forEach((stop) => stop());
    box = body = layer = null;
  };
}

// -- scrolling --------------------------------------------------------------------------------

let isOwnScroll = false; // the next scroll event is caused by this code
let lastHeight = 0; // of the box

function scrolled() {
  // A scroll event of a box that shrank is not the user's.
  if (!isOwnScroll && box.clientHeight === lastHeight) follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  isOwnScroll = false;
}

/** Keep the end of a growing text, or the selected token, visible when sizes change. */
function keepVisible() {
  const isSmaller = box.clientHeight < lastHeight;
  lastHeight = box.clientHeight;
  if (isSmaller && selectedSpan) reveal(state.selected);
  else if (follows) {
    isOwnScroll = box.scrollTop + lastHeight < box.scrollHeight - 1;
    box.scrollTop = box.scrollHeight;
  }
  changed("layout");
}

/** Generation started, continued or ended. When it starts, focus the text, so that shortcuts work. */
function onWritingChange() {
  markSelected();
  const isNew = state.writing && state.writing !== lastWriting;
  lastWriting = state.writing;
  if (!isNew) return;
  follows = true;
  const field = document.activeElement?.closest(".composer, .reply");
  if (field) requestAnimationFrame(() => box?.focus({ preventScroll: true }));
}

// -- drawing ----------------------------------------------------------------------------------

function draw() {
  if (!body) return;
  const branch = currentBranch();
  if (rendered.id !== (branch?.id ?? null)) switchBranch(branch);
  if (branch?.prompt) {
    const promptTokens = promptLength(branch);
    const tokenOf = (at) => (at < promptTokens ? branch.prompt.tokens[at] : branch.steps[at - promptTokens]);
    const length = textLength(branch);
    let unchanged = 0;
    while (unchanged < rendered.tokens.length && unchanged < length && rendered.tokens[unchanged] === tokenOf(unchanged)) unchanged += 1;
    if (unchanged < rendered.tokens.length) cut(unchanged);
    for (let at = unchanged; at < length; at += 1) append(branch, at, tokenOf(at), at < promptTokens);
  }
  markSelected();
}

/** Draw again what changed, and the tokens from a position on. */
function redraw(from = Infinity) {
  if (from < rendered.tokens.length) cut(from);
  draw();
}

/** Color tokens anew, after they were scored. */
function restyle(from, length) {
  const branch = currentBranch();
  const promptTokens = promptLength(branch);
  for (let at = from; at < Math.min(from + length, rendered.spans.length); at += 1) restyleToken(branch, at, promptTokens);
  markSelected();
}

function restyleToken(branch, at, promptTokens) {
  const span = rendered.spans[at];
  const names = ["word", "part"].filter((name) => span.classList.contains(name));
  styleToken(span, branch, at, rendered.tokens[at], at < promptTokens);
  span.classList.add(...names);
}

/** Show another branch; tokens shared with the previous one stay in place. */
function switchBranch(branch) {
  rendered.id = branch?.id ?? null;
  if (rendered.tokens[0] !== branch?.prompt?.tokens[0]) {
    cut(0);
    box.scrollTop = 0;
  }
  follows = state.writing !== null;
  highlightTokens(null);
}

function cut(length) {
  rendered.spans.splice(length).forEach((span, place) => {
    countReasoning(span, rendered.tokens[length + place], -1);
    span.remove();
  });
  rendered.tokens.length = length;
  removeEmptyLines(body);
  const last = rendered.spans[length - 1];
  rendered.line = last && !last.textContent.endsWith("\n") ? last.parentNode : null;
}

function append(branch, at, token, isPrompt) {
  const home = lineParent(body, token);
  if (rendered.line?.parentNode !== home) {
    rendered.line = document.createElement("div");
    rendered.line.className = "line";
    home.append(rendered.line);
  }
  const span = document.createElement("span");
  span.dataset.at = at;
  styleToken(span, branch, at, token, isPrompt);
  if (span.textContent.includes("⟨") && token.text?.startsWith("\ufffd")) showBytes(at);
  joinCluster(span, at);
  if (JOINED_SCRIPT.test(span.textContent)) hideParts(at);
  if (isWord(span.textContent, rendered.line.lastChild?.textContent)) span.classList.add("word");
  rendered.line.append(span);
  countReasoning(span, token);
  rendered.tokens.push(token);
  rendered.spans.push(span);
  // One element per paragraph: the browser lays out only the last one again.
  if (span.textContent.endsWith("\n")) rendered.line = null;
}

/** Show the bytes of the tokens before, whose character was never completed. */
function showBytes(before) {
  for (let at = before - 1; rendered.spans[at]?.classList.contains("part"); at -= 1) {
    rendered.spans[at].textContent = rendered.tokens[at].piece;
  }
}

const EXTENDS = /^[\p{M}\p{Emoji_Modifier}\u200d\ufe0f\u{1f1e6}-\u{1f1ff}]/u;
const clusters = new Intl.Segmenter(undefined, { granularity: "grapheme" });

const JOINED_SCRIPT = /^[\p{scx=Arabic}\p{scx=Syriac}\p{scx=Mongolian}\p{scx=Nko}]/u; // with their punctuation

/** Between joined letters, the first token of a letter has no mark: it would cut the word in two. */
function hideParts(before) {
  for (let at = before - 1; rendered.spans[at]?.classList.contains("part"); at -= 1) rendered.spans[at].textContent = "\u200d";
}

/** Draw a character that several tokens make (a family of emoji, a flag, an accent) in one piece, in its last token. */
function joinCluster(span, at) {
  let before = at - 1;
  while (rendered.spans[before]?.classList.contains("part")) before -= 1;
  const other = rendered.spans[before];
  if (!other || span.classList.contains("part") || other.parentNode !== rendered.line) return;
  const [start, end] = [other.textContent, span.textContent];
  if (!EXTENDS.test(end) && !start.endsWith("\u200d")) return;
  const tail = [...clusters.segment(start)].at(-1)?.segment ?? "";
  const [joined] = clusters.segment(tail + end);
  if (joined.segment.length <= tail.length) return;
  span.textContent = tail + end;
  other.textContent = start.slice(0, start.length - tail.length) || "·";
  if (start === tail) other.classList.add("part");
}

function styleToken(span, branch, at, token, isPrompt) {
  const names = ["t"];
  const piece = token.piece ?? token.text;
  let text = token.text.includes("\ufffd") ? piece : token.text; // bytes instead of replacement characters
  if (SPECIAL.test(piece)) {
    names.push("special");
    text = piece;
  } else if (text === "") {
    names.push("part"); // part of a character, or withheld: still a token to point at
    text = "·";
  }
  if (/^[\r\n]+$/.test(text)) names.push("break"); // drawn with a mark to point at
  const index = at - promptLength(branch);
  if (isPrompt) names.push("prompt");
  if (isTemplate(branch, at)) names.push("added");
  if (!isPrompt) {
    names.push(tintClass(token, state.tint));
    if (token.chosen && !branch.unchanged?.has(index)) names.push("chosen");
    if (token.draft) names.push(token.draft);
    if (branch.retracted.some((cutOut) => cutOut.at === index && cutOut.verb === "retract")) {
      names.push("repaired");
      span.title = "The loop guard rewound tokens here";
    }
  }
  span.className = names.filter(Boolean).join(" ");
  // Not again: the caret may be in it, or a character that several tokens make.
  if (!span.firstChild) span.textContent = text;
}

function retint() {
  const branch = currentBranch();
  if (!branch) return;
  const promptTokens = promptLength(branch);
  rendered.spans.forEach((_, at) => restyleToken(branch, at, promptTokens));
  markSelected();
  if (highlight) highlightTokens(highlight.weights, highlight.upTo);
}

function markSelected() {
  if (!body) return;
  selectedSpan?.classList.remove("selected");
  selectedSpan = rendered.spans[state.selected] ?? null;
  selectedSpan?.classList.add("selected");
  unfold(selectedSpan);
  updateReasoningTitles(body);
  updateMarks();
  body.classList.toggle("writing", state.writing?.branch === rendered.id && rendered.id !== null);
}

const updateMarks = () => body && applyMarks(rendered.spans, currentBranch());

// -- pointing ---------------------------------------------------------------------------------

function positionOf(target) {
  const at = target.closest?.(".t")?.dataset.at;
  return at === undefined ? null : Number(at);
}

function onTokenClick(position) {
  if (selectChangeAt(position)) return;
  selectToken(position);
  // On a narrow screen a sheet opens at the bottom: focus it, for screen readers.
  if (position !== null && isNarrow() && !body.isContentEditable) {
    requestAnimationFrame(() => document.getElementById("side-panel")?.focus({ preventScroll: true }));
  }
}

const REST_MS = 60; // on a token until the panel shows it: on the way to the panel others are crossed
const LEAVE_MS = 400; // after leaving the text until the panel forgets the token: time to get there

let aimed = null; // the token under the pointer
let hoverTimer = 0;

function hover(event) {
  const position = positionOf(event.target);
  if (event.pointerType === "touch" || position === aimed) return;
  if (position === null) return leaveText();
  aimed = position;
  clearTimeout(hoverTimer);
  hoverTimer = setTimeout(() => setHovered(position), REST_MS);
}

/** Forget the token that was pointed at, unless the pointer is in the panel that shows it by then. */
function leaveText() {
  aimed = null;
  clearTimeout(hoverTimer);
  hoverTimer = setTimeout(() => {
    const panel = document.querySelector(".side:hover");
    if (panel) panel.addEventListener("pointerleave", leaveText, { once: true });
    else setHovered(null);
  }, LEAVE_MS);
}

/** Another text is shown. */
function forgetAim() {
  clearTimeout(hoverTimer);
  aimed = null;
}

function setHovered(position) {
  if (state.hovered === position) return;
  state.hovered = position;
  changed("hover");
}

const MOVES = { ArrowLeft: -1, ArrowRight: 1 };

function onKey(event) {
  const branch = currentBranch();
  if (!branch || event.target !== box || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter") {
    event.preventDefault();
    startEditing();
    return;
  }
  const last = textLength(branch) - 1;
  const now = state.selected ?? (event.key === "ArrowLeft" ? last + 1 : promptLength(branch) - 1);
  let next = null;
  if (event.key in MOVES) next = now + MOVES[event.key];
  else if (event.key === "ArrowUp" || event.key === "ArrowDown") next = tokenInNextLine(now, event.key === "ArrowUp");
  else if (event.key === "Home") next = 0;
  else if (event.key === "End") next = last;
  if (next === null || next < 0 || next > last) return;
  event.preventDefault();
  if (event.shiftKey && event.key in MOVES) extendSpan(branch, now, next);
  selectToken(next);
  reveal(next);
  const step = stepAt(branch, next);
  const text = visibleText(tokenAt(branch, next).text);
  const kind = step?.thought ? ", reasoning" : "";
  announcement.textContent = step ? `${text}, ${describeStep(step)}${kind}` : `${text}, prompt`;
}

/** The token in the next line above or below. */
function tokenInNextLine(position, above) {
  const from = tokenBox(position);
  if (!from) return null;
  const middle = from.x + from.width / 2;
  let best = null;
  let nearest = Infinity;
  for (let at = position; at >= 0 && at < rendered.spans.length; at += above ? -1 : 1) {
    const place = tokenBox(at);
    if (!place) continue; // in a closed fold
    const down = above ? from.y - place.y : place.y - from.y;
    if (down < from.height / 2) continue;
    if (down > from.height * 3 && best !== null) break;
    const away = Math.abs(place.x + place.width / 2 - middle) + down * 4;
    if (away < nearest) [best, nearest] = [at, away];
    else if (best !== null && down > from.height * 2) break;
  }
  return best;
}

function reveal(position) {
  rendered.spans[position]?.scrollIntoView({ block: "nearest" });
}

// -- for overlays -----------------------------------------------------------------------------

/** Box of a token in the overlay's coordinates; of its larger part if it spans two lines. */
export function tokenBox(position) {
  const span = rendered.spans[position];
  if (!span || !layer) return null;
  const [most] = [...span.getClientRects()].sort((a, b) => b.width - a.width);
  const outer = layer.getBoundingClientRect();
  if (!most) return null;
  return { x: most.x - outer.x, y: most.y - outer.y, width: most.width, height: most.height };
}

export const overlay = () => layer;
export const isHighlighted = () => highlight !== null;

/** Shade tokens by weights (0 to 1) and dim those after `upTo`. Null: back to normal. */
export function highlightTokens(weights, upTo = Infinity) {
  if ((highlight === null) !== (weights === null)) changed("light");
  highlight = weights ? { weights, upTo } : null;
  body?.classList.toggle("lighted", weights !== null);
  rendered.spans.forEach((span, at) => {
    const weight = weights?.[at] ?? 0;
    span.classList.toggle("masked", weights !== null && at > upTo);
    span.classList.toggle("lit", weight > 0 && at <= upTo);
    if (weight > 0 && at <= upTo) span.style.setProperty("--lit", Math.min(1, weight).toFixed(3));
    else span.style.removeProperty("--lit");
  });
}
