// A link that holds a text: its prompt, seed and settings, and how many tokens each run wrote. The page that opens it
// generates the text again, token for token, so the link stays short and every step can be inspected.

import { applyEvent, attempt, CANDIDATES, createInSession, pushUndo, setCurrent } from "../actions.js";
import { api } from "../api.js";
import { adopt, changed, currentBranch, state } from "../state.js";
import { changesBetween, loadBranch, nonDefault, piecesOf } from "./session.js";

const MARK = "#text=";
const MAX_BYTES = 200_000; // decompressed
const VERSION = 1;

const piped = (data, transform) => new Response(new Blob([data]).stream().pipeThrough(transform)).arrayBuffer();

/** A number that differs, in practice, if one of the tokens does. */
const checksum = (steps) => steps.reduce((sum, { token }) => (Math.imul(sum, 31) + token) | 0, 7);

/** The link of a text; throws if it cannot be generated again. */
export async function linkOf(id) {
  await loadBranch(id);
  const branch = state.branches.get(id);
  if (branch.settings.interventions?.length) throw new Error("A text with changes inside the model has no link. Save a session file.");
  const { messages, text } = branch.prompt;
  const parts = piecesOf(branch).map((piece) => (piece.kind === "chosen"
    ? { tokens: branch.steps.slice(piece.from, piece.to).map(({ token }) => token) }
    : { count: piece.reached - piece.from, keep: piece.to - piece.from, settings: nonDefault(piece.run.settings), seed: piece.run.seed }));
  const content = { v: VERSION, model: branch.model, ...(messages ? { messages } : { prompt: text }), seed: branch.seed, parts, sum: checksum(branch.steps) };
  const packed = await piped(JSON.stringify(content), new CompressionStream("deflate-raw"));
  const base = new URL(location.pathname, location.href).href;
  const letters = btoa(String.fromCharCode(...new Uint8Array(packed)));
  return base + MARK + letters.replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function read(hash) {
  try {
    const bytes = Uint8Array.from(atob(hash.slice(MARK.length).replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
    const text = new TextDecoder().decode(await piped(bytes, new DecompressionStream("deflate-raw")));
    const content = text.length <= MAX_BYTES ? JSON.parse(text) : null;
    if (content?.v === VERSION && Array.isArray(content.parts)) return content;
  } catch {
    /* it was cut or changed on its way */
  }
  throw new Error("This link is damaged: it was cut or changed on its way.");
}

export const isLink = (hash) => hash.startsWith(MARK);

/** Generate the text of a link, in a new session. */
export const openLink = (hash) => attempt(async () => {
  const { messages, prompt, seed, parts, model, sum } = await read(hash);
  state.session = null;
  const first = parts.find(({ settings }) => settings) ?? { settings: {} };
  const begin = messages ? { messages } : { prompt };
  const branch = adopt(await createInSession({ model: state.model, top: CANDIDATES, seed, ...first.settings, ...begin }));
  branch.runs = [];
  setCurrent(branch.id);
  pushUndo({ label: "open a link", before: { id: null, length: null }, after: { id: branch.id, length: null } });
  let before = first.settings;
  for (const part of parts) {
    if (part.tokens) adopt(await api.post(`/v1/tree/${branch.id}/append`, { tokens: part.tokens }));
    else before = await generate(branch, part, before);
  }
  if (checksum(branch.steps) === sum) return;
  throw new Error(model === state.model ? "This is another text than that of the link: it was written by another version of the model."
    : `This is another text than that of the link: ${model} wrote that one.`);
});

async function generate(branch, { count, keep, settings, seed }, before) {
  const length = branch.steps.length;
  const control = new AbortController();
  let over;
  state.writing = { branch: branch.id, began: performance.now(), first: null, control, over: new Promise((done) => { over = done; }) };
  branch.runs.push({ from: length, settings });
  changed("writing");
  try {
    const body = { ...changesBetween(before, settings), seed, stream: true, max_tokens: count, top: CANDIDATES };
    for await (const { event, data } of api.resume(branch.id, body, { signal: control.signal })) applyEvent(event, data);
  } finally {
    state.writing = null;
    branch.writing = false;
    over();
    changed("writing", "branches", "steps");
  }
  if (currentBranch() === branch && branch.steps.length > length + keep) {
    adopt(await api.post(`/v1/tree/${branch.id}/rewind`, { to: length + keep }));
  }
  return settings;
}
