// Edits of any span of a text in the browser tab, as server/tree/edit_text.py: tokens of the chat template never change.

import { badRequest, chosenStep, findTurns, promptBytes, redecode } from "./branches.js";
import { spliceTokens, TextStream } from "./text.js";

/** The text after an edit: `{prompt (null: unchanged), steps, since}`; steps from `since` on have no score. */
export function editText(tree, branch, { first: from, last: to, text, after = "keep" }) {
  const { prompt } = branch;
  const length = prompt.ids.length + branch.steps.length;
  const [first, last] = [[from, "first"], [to, "last"]].map(([at, name]) => {
    if (!Number.isSafeInteger(at) || at < -length || at > length) throw badRequest(`${name} must be within the ${length} tokens of the text, got ${at}`, name);
    return at >= 0 ? at : length + at;
  });
  if (first > last) throw badRequest(`last must be at least first (${first}), got ${last}`, "last");
  if (typeof text !== "string") throw badRequest(`text must be a string, got ${JSON.stringify(text)}`, "text");
  const drops = after === "drop";
  const count = prompt.ids.length;
  let words = text;
  let newPrompt = null;
  if (first < count) {
    newPrompt = editPrompt(tree, prompt, first, Math.min(last, count), text, drops);
    words = "";
  }
  const start = Math.max(0, first - count);
  let end = Math.max(0, last - count);
  let { steps } = branch;
  if (drops) {
    const turns = prompt.messages !== null ? findTurns(steps) : [];
    const turn = newPrompt ? null : turns.find(({ content: [low, high] }) => low <= start && end <= high);
    steps = steps.slice(0, newPrompt ? 0 : turn?.end ?? end);
    end = Math.min(end, steps.length);
  }
  const changes = words || end > start ? changeSteps(tree, prompt, steps, start, end, words) : [];
  const since = newPrompt ? 0 : Math.min(steps.length, ...changes.map(({ first: at }) => at));
  return { prompt: newPrompt, steps: editedSteps(tree, (newPrompt ?? prompt).ids.length, steps, changes, since), since };
}

/** Replace ranges of the steps; what follows is kept, without scores. */
function editedSteps({ engine }, count, steps, changes, since) {
  const edited = [];
  let at = 0;
  for (const { first, last, tokens } of [...changes, { first: steps.length, last: steps.length, tokens: [] }]) {
    edited.push(...steps.slice(at, first), ...tokens.map((token) => chosenStep(engine, token, 0, 0, null)));
    at = last;
  }
  const all = edited.map((step, index) => (index < since ? { ...step, finish_reason: null } : {
    ...step, index, position: count + index, logprob: null, finish_reason: null, rank: null, entropy: null, probability: null,
    draw: null, candidates: [], stages: [], draft: null, retracts: 0,
  }));
  return redecode(engine, all).steps;
}

function splice({ engine, encode }, tokens, first, last, text, isCanonical) {
  const isControl = (at) => engine.isSpecial(tokens[at]);
  let [low, high] = [first, last];
  while (low && !isControl(low - 1)) low -= 1;
  while (high < tokens.length && !isControl(high)) high += 1;
  const change = spliceTokens(tokens.slice(low, first), text, tokens.slice(last, high), {
    encode: (words) => [...encode.call({ engine }, words)], bytes: (id) => promptBytes(engine, id), isCanonical,
  });
  return { first: low + change.numLeft, tokens: change.tokens, last: high - change.numRight };
}

// -- the prompt ---------------------------------------------------------------------------------------

function editPrompt(tree, prompt, first, last, text, drops) {
  if (prompt.messages !== null) {
    const { messages, changed } = editMessages(tree, prompt, first, last, text);
    return tree.chatPrompt(drops ? messages.slice(0, changed + 1) : messages);
  }
  const ids = [...prompt.ids];
  const low = Math.max(first, prompt.added.length); // a start token stays
  const high = drops ? ids.length : Math.max(last, low);
  const canonical = [...tree.engine.tokenize(prompt.text, { special: false, bos: true })];
  const change = splice(tree, ids, low, high, text, String(canonical) === String(ids));
  ids.splice(change.first, change.last - change.first, ...change.tokens);
  if (!ids.length) throw badRequest("the prompt must not be empty", "text");
  return { ...prompt, ids, text: tree.engine.detokenize(ids.slice(prompt.added.length)) };
}

/** The messages with new words for a span, and the index of the first that changed. */
function editMessages({ engine }, prompt, first, last, text) {
  const stream = new TextStream();
  const pieces = prompt.ids.map((id) => stream.push(promptBytes(engine, id)));
  const joined = (from, to) => pieces.slice(from, Math.max(from, to)).join("");
  const messages = [...prompt.messages];
  let changed = -1;
  messages.forEach(({ content }, number) => {
    const span = prompt.spans[number];
    const [begin, end] = span.content ?? [span.start, span.end];
    const isInside = first === last ? first <= end && last >= begin : first < end && last > begin;
    if (typeof content !== "string" || !isInside || (span.content === null && content.trim())) return;
    let inserted = changed >= 0 ? "" : text;
    const set = (words) => {
      messages[number] = { ...messages[number], content: words };
      if (changed < 0) changed = number;
    };
    if (span.content === null) {
      set(inserted);
      return;
    }
    const before = joined(begin, end);
    const core = before.includes(content) ? content : content.trim();
    const place = before.indexOf(core);
    if (place < 0) return;
    const start = joined(begin, Math.max(first, begin)).length;
    const stop = joined(begin, Math.max(begin, Math.min(last, end))).length;
    // Tokens at the edges may have white space of the template too.
    const [lead, trail] = [before.slice(start, Math.max(start, place)), before.slice(place + core.length, Math.max(stop, place + core.length))];
    if (lead && inserted.startsWith(lead)) inserted = inserted.slice(lead.length);
    if (trail && inserted.endsWith(trail)) inserted = inserted.slice(0, -trail.length);
    const words = core.slice(0, Math.max(0, start - place)) + inserted + core.slice(Math.max(0, stop - place));
    const at = content.indexOf(core);
    set(content.slice(0, at) + words + content.slice(at + core.length));
  });
  if (changed < 0) throw refusedTemplate(`, got ${first} to ${last}`);
  return { messages, changed };
}

const refusedTemplate = (detail = "") => badRequest(
  `the span must contain words of a message: tokens of the chat template cannot be edited${detail}`, "first");

// -- the steps ----------------------------------------------------------------------------------------

/** The changes of tokens that give the steps from `start` to before `end` this text. */
function changeSteps(tree, prompt, steps, start, end, text) {
  const tokens = steps.map(({ token }) => token);
  const changes = [];
  const turns = prompt.messages !== null ? findTurns(steps) : [];
  const runs = [];
  let at = 0;
  for (const turn of turns) {
    runs.push([at, turn.start, false], [...turn.content, true]);
    at = turn.end;
  }
  runs.push([at, tokens.length, false]);
  let words = text;
  for (const [low, high, isMessage] of runs) {
    if (low > end || high < start || (start < end && Math.max(low, start) >= Math.min(high, end))) continue;
    const change = splice(tree, tokens.slice(low, high), Math.max(low, start) - low, Math.min(high, end) - low, words, isMessage);
    changes.push({ first: low + change.first, last: low + change.last, tokens: change.tokens });
    words = "";
    if (start === end) break;
  }
  if (!changes.length) throw refusedTemplate();
  return changes;
}
