// The text, token by token. Written by hand, not by components: thousands of tokens stay in place while
// new ones come, and a frame touches only what is new.

import { isNarrow, isWord, spelled } from "../lib.js";
import { branchNow, changed, on, promptLength, state, stepAt, textLength, tokenAt } from "../state.js";
import { select } from "../actions.js";
import { applyMarks, extendPart, markedChange, watchSelection } from "./marks.js";
import { countThought, homeOf, tellThoughts, tidy, unfold } from "./thoughts.js";
import { said, tintOf } from "./tint.js";

const NEAR_END = 80; // px: who is as close as this to the end follows the text
const SPECIAL = /^<\|.*\|>$|^<\/?s>$|^<[a-z_]+>$/;

let box = null; // what scrolls
let body = null; // holds the lines
let layer = null; // the picture over the text
let spoken = null; // says the selected token to those who hear the page
let drawn = { id: null, tokens: [], spans: [], line: null };
let lit = null;
let marked = null; // the selected token
let follows = true; // the end of the text stays in sight while it grows
let begun = null; // the writing that took the focus

/** Make the pane inside an element; gives the function that takes it away. */
export function mountPane(element) {
  box = element;
  body = document.createElement("div");
  body.className = "tokens";
  layer = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  layer.id = "text-overlay";
  layer.setAttribute("aria-hidden", "true");
  spoken = document.createElement("p");
  spoken.className = "visually-hidden";
  spoken.setAttribute("role", "status");
  box.append(body, layer, spoken);
  drawn = { id: null, tokens: [], spans: [], line: null };
  body.addEventListener("pointerover", hover);
  body.addEventListener("pointerleave", () => setHovered(null));
  body.addEventListener("click", (event) => tapped(positionOf(event.target)));
  box.addEventListener("keydown", onKey);
  follows = false;
  box.addEventListener("scroll", scrolled, { passive: true });
  // After layout, where sizes can be read without another one. The box shrinks when the reply comes below it.
  const resized = new ResizeObserver(keepInSight);
  resized.observe(body);
  resized.observe(box);
  const leave = [
    on("steps", draw), on("current", draw), on("tint", retint), on("selection", mark), on("writing", began),
    on("part", remark), on("revision", remark), watchSelection(body),
    () => resized.disconnect(),
  ];
  draw();
  return () => {
    leave.forEach((stop) => stop());
    box = body = layer = null;
  };
}

// -- what stays in sight ----------------------------------------------------------------------

let isOurs = false; // the scrolling that comes next
let height = 0; // of the box, when it was last looked at

function scrolled() {
  // A box that became smaller was not scrolled by anybody.
  if (!isOurs && box.clientHeight === height) follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  isOurs = false;
}

/** The end of a text that is written, or the token that is looked at, whatever else takes room. */
function keepInSight() {
  const isSmaller = box.clientHeight < height;
  height = box.clientHeight;
  if (isSmaller && marked) reveal(state.selected);
  else if (follows) {
    isOurs = box.scrollTop + height < box.scrollHeight - 1;
    box.scrollTop = box.scrollHeight;
  }
  changed("layout");
}

/** Writing begins, goes on or ends. When it begins, the keys are the text's: what was asked is asked. */
function began() {
  mark();
  const isNew = state.writing && state.writing !== begun;
  begun = state.writing;
  if (!isNew) return;
  follows = true;
  const field = document.activeElement?.closest(".composer, .reply");
  if (field) requestAnimationFrame(() => box?.focus({ preventScroll: true }));
}

// -- drawing ----------------------------------------------------------------------------------

function draw() {
  if (!body) return;
  const branch = branchNow();
  if (drawn.id !== (branch?.id ?? null)) turnTo(branch);
  if (branch?.prompt) {
    const own = promptLength(branch);
    const tokenOf = (at) => (at < own ? branch.prompt.tokens[at] : branch.steps[at - own]);
    const length = textLength(branch);
    let same = 0;
    while (same < drawn.tokens.length && same < length && drawn.tokens[same] === tokenOf(same)) same += 1;
    if (same < drawn.tokens.length) cut(same);
    for (let at = same; at < length; at += 1) append(branch, at, tokenOf(at), at < own);
  }
  mark();
}

/** Another branch: what it has in common with the one before stays where it is. */
function turnTo(branch) {
  drawn.id = branch?.id ?? null;
  if (drawn.tokens[0] !== branch?.prompt?.tokens[0]) {
    cut(0);
    box.scrollTop = 0;
  }
  follows = state.writing !== null;
  light(null);
}

function cut(length) {
  drawn.spans.splice(length).forEach((span, place) => {
    countThought(span, drawn.tokens[length + place], -1);
    span.remove();
  });
  drawn.tokens.length = length;
  tidy(body);
  const last = drawn.spans[length - 1];
  drawn.line = last && !last.textContent.endsWith("\n") ? last.parentNode : null;
}

function append(branch, at, token, isPrompt) {
  const home = homeOf(body, token);
  if (drawn.line?.parentNode !== home) {
    drawn.line = document.createElement("div");
    drawn.line.className = "line";
    home.append(drawn.line);
  }
  const span = document.createElement("span");
  span.dataset.at = at;
  dress(span, branch, at, token, isPrompt);
  if (span.textContent.includes("⟨") && token.text?.startsWith("\ufffd")) spellOut(at);
  if (isWord(span.textContent, drawn.line.lastChild?.textContent)) span.classList.add("word");
  drawn.line.append(span);
  countThought(span, token);
  drawn.tokens.push(token);
  drawn.spans.push(span);
  // A line of its own for each paragraph: the browser lays out only the last one again.
  if (span.textContent.endsWith("\n")) drawn.line = null;
}

/** What the tokens before began was never completed: they show their bytes. */
function spellOut(before) {
  for (let at = before - 1; drawn.spans[at]?.classList.contains("part"); at -= 1) {
    drawn.spans[at].textContent = drawn.tokens[at].piece;
  }
}

function dress(span, branch, at, token, isPrompt) {
  const names = ["t"];
  const piece = token.piece ?? token.text;
  let text = token.text.includes("\ufffd") ? piece : token.text; // no question marks: its own bytes
  if (SPECIAL.test(piece)) {
    names.push("special");
    text = piece;
  } else if (text === "") {
    names.push("part"); // a part of a character, or held back: it still is a token to point at
    text = "·";
  }
  if (/^[\r\n]+$/.test(text)) names.push("break"); // drawn with a mark, else nobody could point at it
  const index = at - promptLength(branch);
  if (isPrompt) names.push("prompt");
  if (isPrompt ? token.added : branch.added?.has(index)) names.push("added");
  if (!isPrompt) {
    names.push(tintOf(token, state.tint));
    if (token.chosen && !branch.kept?.has(index)) names.push("chosen");
    if (token.draft) names.push(token.draft);
    if (branch.retracted.some((cutOut) => cutOut.at === index && cutOut.verb === "retract")) {
      names.push("repaired");
      span.title = "A guard took words back here";
    }
  }
  span.className = names.filter(Boolean).join(" ");
  span.textContent = text;
}

function retint() {
  const branch = branchNow();
  if (!branch) return;
  const own = promptLength(branch);
  drawn.spans.forEach((span, at) => {
    const isWordInLine = span.classList.contains("word");
    dress(span, branch, at, drawn.tokens[at], at < own);
    span.classList.toggle("word", isWordInLine);
  });
  mark();
  if (lit) light(lit.weights, lit.upTo);
}



function mark() {
  if (!body) return;
  marked?.classList.remove("selected");
  marked = drawn.spans[state.selected] ?? null;
  marked?.classList.add("selected");
  unfold(marked);
  tellThoughts(body);
  remark();
  body.classList.toggle("writing", state.writing?.branch === drawn.id && drawn.id !== null);
}

const remark = () => body && applyMarks(drawn.spans, branchNow());

// -- pointing ---------------------------------------------------------------------------------

function positionOf(target) {
  const at = target.closest?.(".t")?.dataset.at;
  return at === undefined ? null : Number(at);
}

function tapped(position) {
  if (markedChange(position)) return;
  select(position);
  // On a narrow screen a sheet comes up from below: whoever cannot see that is taken there.
  if (position !== null && isNarrow()) {
    requestAnimationFrame(() => document.getElementById("side-panel")?.focus({ preventScroll: true }));
  }
}

function hover(event) {
  setHovered(positionOf(event.target));
}

function setHovered(position) {
  if (state.hovered === position) return;
  state.hovered = position;
  changed("hover");
}

const MOVES = { ArrowLeft: -1, ArrowRight: 1 };

function onKey(event) {
  const branch = branchNow();
  if (!branch || event.target !== box || event.ctrlKey || event.metaKey || event.altKey) return;
  const last = textLength(branch) - 1;
  const now = state.selected ?? (event.key === "ArrowLeft" ? last + 1 : promptLength(branch) - 1);
  let next = null;
  if (event.key in MOVES) next = now + MOVES[event.key];
  else if (event.key === "ArrowUp" || event.key === "ArrowDown") next = neighbour(now, event.key === "ArrowUp");
  else if (event.key === "Home") next = 0;
  else if (event.key === "End") next = last;
  if (next === null || next < 0 || next > last) return;
  event.preventDefault();
  if (event.shiftKey && event.key in MOVES) extendPart(branch, now, next);
  select(next);
  reveal(next);
  const step = stepAt(branch, next);
  const text = spelled(tokenAt(branch, next).text);
  const kind = step?.thought ? ", of a thought" : "";
  spoken.textContent = step ? `${text}, ${said(step)}${kind}` : `${text}, of the prompt`;
}

/** The token in the next line above or below. */
function neighbour(position, above) {
  const from = placeOf(position);
  if (!from) return null;
  const middle = from.x + from.width / 2;
  let best = null;
  let nearest = Infinity;
  for (let at = position; at >= 0 && at < drawn.spans.length; at += above ? -1 : 1) {
    const place = placeOf(at);
    if (!place) continue; // folded away
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
  drawn.spans[position]?.scrollIntoView({ block: "nearest" });
}

// -- for those who draw over the text ---------------------------------------------------------

/** Where a token stands, in the overlay's coordinates: where most of it is, if it spans two lines. */
export function placeOf(position) {
  const span = drawn.spans[position];
  if (!span || !layer) return null;
  const [most] = [...span.getClientRects()].sort((one, other) => other.width - one.width);
  const outer = layer.getBoundingClientRect();
  if (!most) return null;
  return { x: most.x - outer.x, y: most.y - outer.y, width: most.width, height: most.height };
}

export const overlay = () => layer;
export const isLit = () => lit !== null;

/** Light tokens by their weights (0 to 1); those behind `upTo` are masked. Null: as usual. */
export function light(weights, upTo = Infinity) {
  if ((lit === null) !== (weights === null)) changed("light");
  lit = weights ? { weights, upTo } : null;
  body?.classList.toggle("lighted", weights !== null);
  drawn.spans.forEach((span, at) => {
    const weight = weights?.[at] ?? 0;
    span.classList.toggle("masked", weights !== null && at > upTo);
    span.classList.toggle("lit", weight > 0 && at <= upTo);
    if (weight > 0 && at <= upTo) span.style.setProperty("--lit", Math.min(1, weight).toFixed(3));
    else span.style.removeProperty("--lit");
  });
}
