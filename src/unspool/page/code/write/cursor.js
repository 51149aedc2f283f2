// Generating at the cursor: continue there, and continuations as ghost text to step through and accept.

import { attempt, CANDIDATES, pauseWriting, pushUndo, resumeWriting, setCurrent } from "../actions.js";
import { api, ApiError } from "../api.js";
import { requestSettings } from "../settings.js";
import { adopt, changed, currentBranch, promptLength, state, textLength } from "../state.js";
import { caretPosition, commit, placeAt, textBetween, typeText } from "./document.js";
import { placeOf } from "./history.js";
import { partsBody } from "./parts.js";

const NUM_GHOSTS = 3;
const GHOST_TOKENS = 32;

let ghosts = null; // {branch, position, head, texts, ids, now, accepted, element, control, isDone}

/**
 * The message of a chat that a position is in, as `{role, number, first, last}`; null in an answer and in a plain text.
 * `number` is its place in the prompt.
 */
function messageAt(branch, position) {
  const shift = promptLength(branch);
  const { messages, spans } = branch.prompt;
  if (!messages) return null;
  const all = position < shift
    ? messages.map(({ role }, number) => ({ role, number, range: spans[number]?.content }))
    : (branch.turns ?? []).map(({ role, content }) => ({ role, number: null, range: content?.map((at) => shift + at) }));
  for (const { role, number, range } of all) {
    if (range && range[0] <= position && position <= range[1]) return { role, number, first: range[0], last: range[1] };
  }
  const turn = (branch.turns ?? []).find(({ start, end }) => shift + start < position && position < shift + end);
  if (position < shift || turn) throw new ApiError(400, "The caret is in the chat template. Put it in a message or an answer.");
  return null;
}

const edit = (id, body) => api.post(`/v1/tree/${id}/edit`, { score: false, ...body });

/** The text up to a position as a separate branch; what follows stays in the branch it is from. */
async function cutAt(branch, { position, head }) {
  const at = position - promptLength(branch);
  if (!head && at >= 0) return api.post(`/v1/tree/${branch.id}/fork`, { at });
  return edit(branch.id, { first: position, last: head ? position + 1 : position, text: head, after: "drop" });
}

/** A branch to continue at a position. A message of the user ends there, and the model answers it. */
async function cutForAnswer(branch, { position, head }) {
  const message = messageAt(branch, position);
  if (!message) return cutAt(branch, { position, head });
  if (message.role === "system") throw new ApiError(400, "The model does not answer a system message. Put the caret in another message or an answer.");
  if (message.role !== "assistant") return edit(branch.id, { first: position, last: message.last, text: head, after: "drop" });
  // An answer in the prompt becomes the start of what is generated.
  const { model, session, prompt } = branch;
  const created = adopt(await api.post("/v1/tree", { model, session, messages: prompt.messages.slice(0, message.number) }));
  const text = textBetween(branch, message.first, position) + head;
  return text ? api.post(`/v1/tree/${created.id}/append`, { text }) : created;
}

/** A branch to continue at a position, also inside a message, for suggestions. */
async function cutForWords(branch, { position, head }) {
  const isInPrompt = messageAt(branch, position) && position < promptLength(branch);
  if (!isInPrompt) return cutAt(branch, { position, head });
  const ids = branch.prompt.tokens.slice(0, position + (head ? 1 : 0)).map(({ id }) => id);
  const created = await api.post("/v1/tree", { model: branch.model, prompt: ids });
  return head ? edit(created.id, { first: position, last: position + 1, text: head, fork: false }) : created;
}

/** The caret, or else the place after the selected token, or the end. */
function cursor(branch) {
  const caret = caretPosition();
  if (caret) return caret;
  return { position: state.selected === null ? textLength(branch) : state.selected + 1, head: "" };
}

/** Drop what follows the cursor in a new branch, and generate from there. */
export async function continueHere() {
  if (!currentBranch() || currentBranch().recorded) return;
  await pauseWriting();
  endGhosts();
  if (!(await commit())) return;
  const branch = currentBranch();
  const place = cursor(branch);
  if (place.position >= textLength(branch)) {
    await resumeWriting();
    return;
  }
  const goes = await attempt(async () => {
    const fork = adopt(await cutForAnswer(branch, place));
    setCurrent(fork.id);
    pushUndo({ label: "continue here", before: placeOf(branch), after: { id: fork.id, length: null } });
  });
  if (goes) await resumeWriting({ isPart: true });
}

/** Write a turn of the model again: `first` is its first step. */
export async function regenerate(first) {
  await pauseWriting();
  if (!(await commit())) return;
  const branch = currentBranch();
  const goes = await attempt(async () => {
    const fork = adopt(await api.post(`/v1/tree/${branch.id}/fork`, { at: first }));
    fork.remaining = null;
    setCurrent(fork.id);
    pushUndo({ label: "regenerate", before: placeOf(branch), after: { id: fork.id, length: null } });
    // The same seed would write the same words: another sample of it. Later tokens keep it.
    const sample = 1 + Math.max(...[...state.branches.values()].map(({ settings }) => settings?.sample ?? 0));
    adopt(await api.post(`/v1/tree/${fork.id}/resume`, { ...requestSettings(), ...partsBody(), max_tokens: 1, sample, top: CANDIDATES }));
  });
  if (goes) await resumeWriting({ isPart: true });
}

// -- ghosts -------------------------------------------------------------------------------------------

export const hasGhosts = () => ghosts !== null;

/** Write continuations at the cursor, side by side, and show the first. */
export async function suggest() {
  if (!currentBranch() || currentBranch().recorded) return;
  await pauseWriting();
  endGhosts();
  if (!(await commit())) return;
  const branch = currentBranch();
  const place = cursor(branch);
  const control = new AbortController();
  ghosts = { branch: branch.id, ...place, texts: [], ids: [], now: 0, accepted: "", element: null, control, isDone: false };
  const mine = ghosts;
  showGhost();
  let base = null;
  await attempt(async () => {
    base = await cutForWords(branch, place);
    const body = { ...requestSettings(), ...partsBody(), n: NUM_GHOSTS, stream: true, max_tokens: GHOST_TOKENS, top: CANDIDATES };
    for await (const { data } of api.resume(base.id, body, { signal: control.signal })) {
      let number = mine.ids.indexOf(data.branch);
      if (number < 0) number = mine.ids.push(data.branch) - 1;
      if (data.text !== undefined) mine.texts[number] = (mine.texts[number] ?? "") + data.text;
      if (ghosts === mine) showGhost();
    }
  });
  mine.isDone = true;
  for (const id of [base?.id, ...mine.ids]) if (id) api.delete(`/v1/tree/${id}`).catch(() => {});
  if (ghosts === mine) {
    if (mine.texts.some(Boolean)) showGhost();
    else endGhosts();
  }
}

const remaining = () => (ghosts.texts[ghosts.now] ?? "").slice(ghosts.accepted.length);

function showGhost() {
  const { texts, now, accepted, isDone } = ghosts;
  if (!ghosts.element) {
    const element = document.createElement("span");
    element.className = "ghost";
    element.contentEditable = "false";
    element.append(document.createElement("b"), document.createElement("i"), document.createElement("small"));
    ghosts.element = element;
    placeAt(ghosts.position + (ghosts.head ? 1 : 0), element);
  }
  const [acceptedPart, ghost, counter] = ghosts.element.children;
  acceptedPart.textContent = accepted;
  ghost.textContent = remaining();
  counter.textContent = texts.length ? `${now + 1}/${Math.max(texts.length, isDone ? 0 : NUM_GHOSTS)}` : "…";
  changed("ghosts");
}

/** Take the ghosts away; accepted words stay, as a draft. Returns whether there are any. */
export function endGhosts() {
  if (!ghosts) return false;
  const { element, accepted, position, head, control } = ghosts;
  control.abort();
  element?.remove();
  ghosts = null;
  changed("ghosts");
  if (accepted) typeText(position, head, accepted);
  return Boolean(accepted);
}

export function stepGhost(move) {
  const { length } = ghosts.texts;
  if (!length) return;
  for (let tries = 0; tries < length; tries += 1) { // those that start with the accepted words
    ghosts.now = (ghosts.now + move + length) % length;
    if (ghosts.texts[ghosts.now]?.startsWith(ghosts.accepted)) break;
  }
  showGhost();
}

const PARTS = { word: /^\s*\S+/, line: /^\n*[^\n]*/, all: /^[^]*/ };

/** Accept the next word, the line, or all of the ghost. */
export function acceptGhost(part) {
  const [words = ""] = PARTS[part].exec(remaining()) ?? [];
  ghosts.accepted += words;
  if (words && remaining()) showGhost();
  else endGhosts();
}

/** The keys of a ghost; false for other keys. */
export function onGhostKey(event) {
  const isCommand = event.ctrlKey || event.metaKey;
  if (event.key === "Tab") acceptGhost("all");
  else if (event.key === "Enter" && !isCommand) acceptGhost("line");
  else if (event.key === "ArrowRight") acceptGhost("word");
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") stepGhost(event.key === "ArrowDown" ? 1 : -1);
  else if (event.key === "Escape") endGhosts();
  else return false;
  event.preventDefault();
  event.stopPropagation();
  return true;
}
