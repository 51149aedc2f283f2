// Rewriting a selected span, and proposed edits of a whole text. Every edit makes a new branch; the old text stays.

import { attempt, clearFault, pauseWriting, pushUndo, setCurrent, setFault, shorten } from "../actions.js";
import { api, ApiError } from "../api.js";
import {
  clamp, html, nats, percent, plural, useChanges, useEffect, useLayoutEffect, useRef, useState,
} from "../lib.js";
import { adopt, changed, currentBranch, modelOf, state } from "../state.js";
import { editRange, textBetween } from "./document.js";
import { clearSpan } from "./edits.js";
import { placeOf } from "./history.js";
import { tokenBox } from "./pane.js";

/**
 * Apply edits `[{first, last, text}]` in a new branch and return it; null if that failed. `after(fork)` runs after the
 * edit and after a redo, `before()` after an undo.
 */
async function replaceSpans(branch, changes, { label, after = () => {}, before = () => {} }) {
  await pauseWriting();
  let fork = null;
  await attempt(async () => {
    const spans = changes.map(({ first, last, text }) => ({ first, last, text }));
    fork = adopt(await api.post(`/v1/tree/${branch.id}/replace`, { changes: spans }));
    fork.runs = [...branch.runs];
    fork.remaining = null;
    setCurrent(fork.id);
    after(fork);
    pushUndo({
      label,
      before: placeOf(branch),
      after: { id: fork.id, length: null },
      onUndo: () => { before(); changed("revision"); },
      onRedo: () => { after(fork); changed("revision"); },
    });
  });
  changed("revision");
  return fork;
}

const clearRevision = () => {
  state.revision = null;
  changed("revision");
};

// -- rewrite a span: candidates ranked by what comes before and after -------------------------------

const CANDIDATES = 8;
const NUM_REWRITES = 3; // by an instruction

export function RewritePopup() {
  useChanges("span", "current", "layout");
  const { span } = state;
  if (!span || span.branch !== state.current) return null;
  return html`<${SpanPopup} key=${`${span.branch} ${span.first} ${span.last}`} span=${span} />`;
}

function SpanPopup({ span }) {
  const box = useRef();
  const [result, setResult] = useState(null); // null: not requested; "loading"; or the response
  const branch = state.branches.get(span.branch);
  const place = usePopupPosition(box, branch, span, result);
  const ask = async () => {
    setResult("loading");
    const goes = await attempt(async () => {
      const { first, last } = span;
      const filled = await api.post(`/v1/tree/${branch.id}/fill`, { first, last, whole_text: true, candidates: CANDIDATES });
      setResult(filled);
    });
    if (!goes) setResult(null);
  };
  const askByInstruction = async (event) => {
    event.preventDefault();
    const instruction = event.target.elements.instruction.value.trim();
    if (!instruction) return;
    setResult("loading");
    const goes = await attempt(async () => setResult(await rewriteByInstruction(branch, span, instruction)));
    if (!goes) setResult(null);
  };
  useEffect(() => { if (span.isRequested && result === null) ask(); }, [span.isRequested]);
  useEffect(() => { if (result?.candidates) box.current?.querySelector("li button:not(:disabled)")?.focus(); }, [result]);
  const leave = () => {
    clearSpan();
    document.getElementById("text").focus({ preventScroll: true });
  };
  const onKey = (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    event.stopPropagation(); // no shortcuts of the page
    if (event.key === "Escape") leave();
    else if (move) {
      const all = [...box.current.querySelectorAll("li button:not(:disabled)")];
      all[(all.indexOf(document.activeElement) + move + all.length) % all.length]?.focus();
      event.preventDefault();
    }
  };
  const applyCandidate = async ({ first, last, text }) => {
    await pauseWriting();
    await editRange(branch, first, last, text, { label: `rewrite “${shorten(result.old)}”` });
    document.getElementById("text")?.focus({ preventScroll: true });
  };
  return html`<div ref=${box} class="rewrite panel" role="group" aria-label="Selected span" style=${place} onKeyDown=${onKey}>
    ${result === null && html`<div class="row"><button class="button main" id="rewrite" onClick=${ask}>Rewrite span</button>
      ${(modelOf(branch)?.unspool?.chat ?? true) && html`<form class="row" onSubmit=${askByInstruction}>
        <input class="field small" name="instruction" aria-label="Instruction for the span" placeholder="or by an instruction: shorter" />
        <button class="button">Ask</button></form>`}</div>`}
    ${result === "loading" && html`<p class="quiet small" role="status">Drafting and ranking candidates …</p>`}
    ${result?.candidates && html`<${CandidateList} result=${result} pick=${applyCandidate} leave=${leave} />`}
  </div>`;
}

/** Ask the model itself for new words; its answers, as candidates. */
async function rewriteByInstruction(branch, { first, last }, instruction) {
  const old = textBetween(branch, first, last);
  const content = `Rewrite this text. ${instruction}\nReply with the new text only.\n\n${old.trim()}`;
  const { choices } = await api.post("/v1/chat/completions", {
    model: branch.model, messages: [{ role: "user", content }], n: NUM_REWRITES, max_tokens: 2 * (last - first) + 32,
  });
  const [lead, tail] = [/^\s*/.exec(old)[0], /\s*$/.exec(old.trimStart())[0]];
  const texts = new Set(choices.map(({ message }) => message.content.trim()).filter(Boolean));
  const candidates = [...texts].map((words) => ({ new: words, first, last, text: lead + words + tail, score: null, probability: null, now: false }));
  if (!candidates.length) throw new ApiError(400, "The model gave no text; try another instruction.");
  return { by: "instruction", old: old.trim(), candidates };
}

function CandidateList({ result, pick, leave }) {
  const most = Math.max(...result.candidates.map(({ probability }) => probability), 1e-9);
  return html`<div class="row spread"><h2>${result.old.replaceAll("_", "") ? `Instead of “${shorten(result.old)}”` : "Words for the gap"}</h2>
      <button class="button plain tiny" aria-label="Close" onClick=${leave}>×</button></div>
    <ul class="rewrite-list">${result.candidates.map((candidate) => html`<li key=${candidate.new}>
      <button disabled=${candidate.now} onClick=${() => pick(candidate)} title=${candidate.now ? "Current text" : "Replace the span with this"}>
        <span class="rewrite-words" dir="auto">${candidate.new}${candidate.now && html` <small class="quiet">current</small>`}</span>
        <span class="track" aria-hidden="true"><span style=${{ width: `${(candidate.probability / most) * 100}%` }} /></span>
        <span class="rewrite-number">${percent(candidate.probability)}</span>
        <span class="rewrite-number quiet" title="Log-probability of the text with it, in nats">${nats(candidate.score)}</span>
      </button></li>`)}</ul>
    <p class="quiet small">${METHODS[result.by] ?? ""}</p>`;
}

const METHODS = {
  instruction: "The answers of the model to your instruction.",
  ranking: "Drafted left to right, ranked by the likelihood of the text that follows.",
  fim: "Infilled by the model with its FIM tokens, from both sides.",
  masked: "Infilled with mask tokens, from both sides.",
};

/** Position below the span, inside the text. */
function usePopupPosition(box, branch, span, result) {
  const [place, setPlace] = useState({ opacity: 0 });
  useLayoutEffect(() => {
    const [begin, end] = [tokenBox(span.first), tokenBox(span.last - 1)];
    if (!begin || !end || !box.current) return;
    const room = box.current.parentElement.parentElement.clientWidth - box.current.offsetWidth - 8;
    const x = begin.y === end.y ? begin.x : 8;
    const next = { left: `${clamp(x, 8, Math.max(8, room))}px`, top: `${end.y + end.height + 4}px` };
    if (next.left !== place.left || next.top !== place.top) setPlace(next);
  });
  useLayoutEffect(() => { if (result?.candidates) box.current?.scrollIntoView({ block: "nearest" }); }, [result, place.top]);
  return place;
}

// -- proposed edits for doubtful words, as tracked changes ------------------------------------------

const MAX_WORDS = 16; // words examined

/** Request proposed edits; they arrive one by one. */
export async function revise() {
  const branch = currentBranch();
  if (!branch || state.writing) return;
  state.revision?.control?.abort();
  clearFault();
  const revision = {
    branch: branch.id, proposals: [], current: null, looked: 0, looking: true, control: new AbortController(),
  };
  state.revision = revision;
  changed("revision");
  try {
    const body = { places: MAX_WORDS, stream: true };
    const options = { signal: revision.control.signal };
    for await (const { event, data } of api.stream(`/v1/tree/${branch.id}/revise`, body, options)) {
      revision.looked = data.looked;
      if (event === "proposal") {
        revision.proposals.push(data);
        revision.proposals.sort((a, b) => a.first - b.first);
      }
      changed("revision");
    }
  } catch (error) {
    if (error.name !== "AbortError") setFault(error);
  }
  revision.looking = false;
  changed("revision");
}

/** Stop the request; proposals that arrived stay. */
const stopRevision = () => state.revision?.control.abort();

function closeRevision() {
  stopRevision();
  clearRevision();
  document.getElementById("text")?.focus({ preventScroll: true });
}

/** Apply some of the edits; the others stay open, with their positions moved. */
async function acceptChanges(accepted) {
  const was = state.revision;
  const branch = state.branches.get(was.branch);
  stopRevision();
  const remaining = was.proposals.filter((change) => !accepted.includes(change));
  const after = (fork) => {
    const longer = fork.steps.length - branch.steps.length;
    const moved = remaining.map((change) => (
      change.first < accepted[0].last ? change : { ...change, first: change.first + longer, last: change.last + longer }));
    state.revision = remaining.length ? { ...was, branch: fork.id, proposals: moved, current: null, looking: false } : null;
  };
  const label = accepted.length === 1 ? `change “${accepted[0].old}” to “${accepted[0].new}”` : plural(accepted.length, "change");
  await replaceSpans(branch, accepted, { label, after, before: () => { state.revision = { ...was, looking: false }; } });
}

function rejectChanges(rejected) {
  const { revision } = state;
  revision.proposals = revision.proposals.filter((change) => !rejected.includes(change));
  if (!revision.proposals.length && !revision.looking) closeRevision();
  else changed("revision");
}

export function RevisionPanel() {
  useChanges("revision", "writing");
  const list = useRef();
  const { revision } = state;
  useEffect(() => {
    list.current?.querySelector(".current-change")?.scrollIntoView({ block: "nearest" });
  }, [revision?.current]);
  if (!revision) return null;
  const { proposals, looking, looked } = revision;
  const busy = state.writing !== null;
  const status = looking ? `Checking doubtful words … ${looked} of up to ${MAX_WORDS}`
    : proposals.length ? `${plural(proposals.length, "proposed edit")}; ${plural(looked, "word")} checked`
      : `No better words found; ${plural(looked, "doubtful word")} checked.`;
  return html`<section class="revision panel" aria-label="Revision">
    <div class="row"><h2>Revision</h2> <span class="grow quiet small" role="status">${status}</span>
      ${looking ? html`<button class="button tiny" onClick=${stopRevision}>Stop</button>`
        : proposals.length > 1 && html`<button class="button tiny" disabled=${busy} onClick=${() => acceptChanges(proposals)}>Accept all</button>
          <button class="button tiny" onClick=${() => rejectChanges(proposals)}>Reject all</button>`}
      <button class="button plain tiny" aria-label="Close the revision" onClick=${closeRevision}>×</button></div>
    <ul class="revision-list" ref=${list}>${proposals.map((change) => html`<${Change} key=${`${change.first} ${change.old}`} change=${change} busy=${busy} />`)}</ul>
  </section>`;
}

function Change({ change, busy }) {
  const words = `“${change.old}” to “${change.new}”`;
  const look = () => {
    state.revision.current = change;
    changed("revision");
  };
  return html`<li class=${change === state.revision.current ? "current-change" : ""} onPointerEnter=${look} onFocusIn=${look}>
    <span class="grow"><del>${change.old}</del> <ins>${change.new}</ins></span>
    <span class="quiet small" title="Probability among the candidates for this place">${percent(change.probability)}</span>
    <button class="button tiny" disabled=${busy} aria-label=${`Accept ${words}`} onClick=${() => acceptChanges([change])}>Accept</button>
    <button class="button tiny" aria-label=${`Reject ${words}`} onClick=${() => rejectChanges([change])}>Reject</button></li>`;
}
