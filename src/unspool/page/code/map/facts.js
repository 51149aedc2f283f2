// What the map says of a branch, in words.

import { isBlank, plural, spelled } from "../lib.js";

const LABEL = 80; // characters: more never fits beside a line

const oneLine = (text) => (isBlank(text) ? "" : text.replace(/\s+/g, " ").trim());
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** The number of steps, also of a branch whose steps have not been fetched. */
export const lengthOf = (branch) =>
  branch.told ? branch.steps.length : Math.max(branch.length ?? 0, branch.steps.length);

/** The words that are a branch's own, from where it left its parent; `most` characters of them. */
export function ownWords(branch, most = LABEL) {
  const words = oneLine(begun(branch, most, "text")) || oneLine(branch.preview ?? "");
  // Only blanks, or marks that end or begin a turn: they are no text, but all there is to show.
  return cut(words || spelled(begun(branch, most, "piece") || branch.preview || ""), most);
}

function begun(branch, most, part) {
  let words = "";
  for (let at = branch.forked_at ?? 0; at < branch.steps.length && words.length <= most; at += 1) {
    words += branch.steps[at][part];
  }
  return words;
}

/** What a branch is called: its name, or how its own words begin. */
export const labelOf = (branch) => oneLine(branch.name ?? "") || ownWords(branch) || "nothing yet";

/** A label that is quoted in a sentence or on a button; the map has it at hand. */
export const quoted = (branch, most = 32) => `“${cut(branch.label ?? labelOf(branch), most)}”`;

/** What a branch begins with: the person's last words, or the whole prompt. */
export function promptWords(branch) {
  const said = branch.prompt?.messages?.findLast((message) => message.role === "user");
  const words = typeof said?.content === "string" ? said.content : branch.prompt?.text;
  if (words === undefined) return `a prompt of ${plural(branch.prompt_tokens ?? 0, "token")}`;
  return oneLine(words) || "an empty prompt";
}

/** Where a branch comes from, in words; `item` is its place in the map, `from` the branch it left. */
export function originWords(item, from) {
  if (!from) return item.branch.parent == null ? "begins at the prompt" : "shares only the prompt";
  return `shares ${plural(item.start, "token")} with ${quoted(from)}`;
}

/** The branches whose name or words hold these letters, and those that they come from. */
export function matching(branches, letters, fromOf) {
  const wanted = oneLine(letters).toLowerCase();
  const hits = new Set();
  const shown = new Set();
  for (const branch of branches) {
    const words = `${branch.name ?? ""} ${ownWords(branch, Infinity)}`.toLowerCase();
    if (!words.includes(wanted)) continue;
    hits.add(branch.id);
    for (let at = branch; at && !shown.has(at.id); at = fromOf(at)) shown.add(at.id);
  }
  return { hits, shown };
}
