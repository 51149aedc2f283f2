// The Context panel: memory, author's note and lorebook, and what of them enters the prompt, where and how many tokens each.

import { setFault } from "../actions.js";
import { api } from "../api.js";
import { count, html, plural, RequestError, saveFile, useChanges, useEffect, useRequest, useState } from "../lib.js";
import { BadFile } from "../share/bad_file.js";
import { readLorebook, writeLorebook } from "../share/lorebook.js";
import { readText } from "../share/file.js";
import { changed, currentBranch, promptLength, state, textLength, tokenAt } from "../state.js";
import { partsBody, setPart, spliceEntries } from "./parts.js";
import { CommittedInput } from "./side.js";

const WAIT_MS = 300;
const KINDS = { memory: "Memory", lore: "Lorebook", author_note: "Author's note" };

export function ContextPanel() {
  useChanges("parts", "current", "writing");
  const { memory, author_note: note } = state.parts;
  const setNote = (fields) => {
    const changedNote = { ...note, ...fields };
    setPart("author_note", changedNote.text || changedNote.depth != null ? { text: "", ...changedNote } : null);
  };
  const isChat = (currentBranch()?.prompt ? Boolean(currentBranch().prompt.messages) : state.mode === "chat");
  const unit = isChat ? "messages" : "lines";
  return html`<section class="stack" aria-labelledby="context-title">
    <h2 id="context-title">Context</h2>
    <p class="quiet small">The model reads these parts with every token that it generates. They are not in the text.</p>
    <${PromptTable} />
    <div class="setting stack"><label for="memory">Memory</label>
      <${CommittedInput} as="textarea" id="memory" rows="4" value=${memory} aria-describedby="memory-help" commit=${(text) => setPart("memory", text || null)} />
      <p class="quiet small" id="memory-help">At the start of the prompt${isChat ? ", after the system message" : ""}.</p></div>
    <div class="setting stack"><label for="author-note">Author's note</label>
      <${CommittedInput} as="textarea" id="author-note" rows="3" value=${note?.text} commit=${(text) => setNote({ text })} />
      <div class="row spread"><label for="note-depth">Depth (${unit} above the end)</label>
        <${CommittedInput} id="note-depth" class="field number" type="number" min="0" step="1" placeholder=${isChat ? 4 : 3}
          value=${note?.depth} commit=${(text) => setNote({ depth: wholeNumber(text) })} /></div></div>
    <${Lorebook} unit=${unit} />
  </section>`;
}

const wholeNumber = (text) => (text === "" || !(Number(text) >= 0) ? null : Math.floor(Number(text)));

// -- what enters the prompt -------------------------------------------------------------------------

function PromptTable() {
  const branch = currentBranch();
  const isAskable = branch?.prompt && !branch.recorded && !state.writing && state.server.ready;
  const ask = isAskable ? (signal) => api.post(`/v1/tree/${branch.id}/context`, partsBody(), { signal }) : null;
  const { answer, fault, again } = useRequest(ask, WAIT_MS, [branch?.id ?? null, branch?.steps.length ?? 0, state.parts]);
  const current = answer?.branch === branch?.id ? answer : null;
  useEffect(() => {
    state.placement = current && { branch: current.branch, parts: current.parts };
    changed("placement");
  }, [current]);
  if (!branch) return html`<p class="quiet small">They enter the prompt of the text that you write next.</p>`;
  if (fault) return html`<${RequestError} fault=${fault} again=${again} />`;
  if (!current) return null;
  const { tokens, text_tokens: textTokens, context, parts, left_out: leftOut } = current;
  const widthOf = (n) => `${Math.max(0.5, (100 * n) / Math.max(context, tokens)).toFixed(2)}%`;
  return html`<div class="stack" id="prompt-parts">
    <div class="context-parts" role="img" aria-label=${`${count(tokens)} of ${count(context)} tokens`}>
      ${parts.map((part, n) => html`<i key=${n} class=${`part-${part.kind}`} style=${{ width: widthOf(part.tokens) }}></i>`)}
      <i class="part-text" style=${{ width: widthOf(textTokens) }}></i></div>
    <table class="small context-table"><thead><tr><th>Part</th><th>Where</th><th class="num">Tokens</th></tr></thead><tbody>
      ${parts.map((part, n) => html`<tr key=${n}><td><i class=${`swatch part-${part.kind}`} aria-hidden="true"></i>
        ${part.kind === "lore" ? part.name : KINDS[part.kind]}${part.keys.length > 0 && html`<span class="quiet"> (${part.keys.join(", ")})</span>`}</td>
        <td>${placeName(branch, part.at)}</td><td class="num">${count(part.tokens)}</td></tr>`)}
      <tr><td><i class="swatch part-text" aria-hidden="true"></i> Text</td><td></td><td class="num">${count(textTokens)}</td></tr>
      <tr><th>Total</th><td>of ${count(context)}</td><td class="num">${count(tokens)}</td></tr></tbody></table>
    ${leftOut.length > 0 && html`<p class="small">Over the token budget: ${leftOut.map((n) => titleOf(state.parts.lorebook?.entries?.[n])).join(", ")}.</p>`}
    ${tokens > context && html`<p class="fault" role="alert">Text and parts are longer than the context: shorten one of them to continue.</p>`}
  </div>`;
}

/** The place before a position, as words. */
function placeName(branch, at) {
  if (at >= textLength(branch)) return "at the end";
  let words = "";
  for (let next = at; next < textLength(branch) && words.trim().length < 16; next += 1) words += tokenAt(branch, next).text;
  return at === 0 || (at < 2 && promptLength(branch) > at) ? "at the start" : `before “${words.trim().slice(0, 20)}”`;
}

// -- the lorebook -----------------------------------------------------------------------------------

const titleOf = (entry) => entry?.name || entry?.keys?.join(", ") || entry?.text?.slice(0, 30) || "New entry";

function Lorebook({ unit }) {
  const book = state.parts.lorebook ?? {};
  const entries = book.entries ?? [];
  const [words, setWords] = useState("");
  const setField = (name, value) => {
    const changedBook = { ...book, [name]: value };
    if (value === null) delete changedBook[name];
    setPart("lorebook", Object.keys(changedBook).length ? changedBook : null);
  };
  const read = async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (!file) return;
    try {
      const { entries: added, notes } = readLorebook(await readText(file));
      await spliceEntries(entries.length, 0, added);
      setWords([`${plural(added.length, "entry", "entries")} added.`, ...notes].join(" "));
    } catch (error) {
      if (error instanceof BadFile) setWords(error.message);
      else setFault(error);
    }
  };
  const save = () => saveFile("lorebook.json", new Blob([writeLorebook(entries)], { type: "application/json" }));
  return html`<div class="stack lorebook"><h3>Lorebook</h3>
    <p class="quiet small">An entry enters the prompt when one of its keys occurs in the last ${unit}.</p>
    ${entries.map((entry, at) => html`<${Entry} key=${at} entry=${entry} at=${at} unit=${unit} />`)}
    <div class="row"><button type="button" class="button tiny" id="add-entry" onClick=${() => spliceEntries(entries.length, 0, [{ text: "", keys: [] }])}>Add entry</button>
      <label class="button tiny file-button">Import<input type="file" class="visually-hidden" id="import-lorebook" accept=".json,application/json" onChange=${read} /></label>
      ${entries.length > 0 && html`<button type="button" class="button tiny" id="export-lorebook" onClick=${save}>Export</button>`}</div>
    ${words && html`<p class="small" role="status">${words}</p>`}
    ${entries.length > 0 && html`<div class="row spread"><label for="scan-depth">Scan depth (last ${unit})</label>
        <${CommittedInput} id="scan-depth" class="field number" type="number" min="0" step="1" placeholder="4" value=${book.scan_depth} commit=${(text) => setField("scan_depth", wholeNumber(text))} /></div>
      <div class="row spread"><label for="token-budget">Token budget</label>
        <${CommittedInput} id="token-budget" class="field number" type="number" min="0" step="1" placeholder="¼ context" value=${book.token_budget} commit=${(text) => setField("token_budget", wholeNumber(text))} /></div>`}
  </div>`;
}

const LOGIC = { any: "any of them", all: "all of them", not_any: "none of them", not_all: "not all of them" };
const keysOf = (text) => text.split(",").map((key) => key.trim()).filter(Boolean);
const MAX_KEYS = 100;

function Entry({ entry, at, unit }) {
  const id = (name) => `entry-${at}-${name}`;
  const set = (fields) => {
    const changedEntry = { ...entry, ...fields };
    for (const [name, value] of Object.entries(changedEntry)) if (value === null) delete changedEntry[name];
    spliceEntries(at, 1, [changedEntry]);
  };
  const field = (name, title, props = {}) => html`<div class="row spread"><label for=${id(name)}>${title}</label>
    <${CommittedInput} id=${id(name)} value=${entry[name]} commit=${(text) => set({ [name]: text || null })} ...${props} /></div>`;
  const keys = (name) => ({ value: entry[name]?.join(", "), commit: (text) => set({ [name]: keysOf(text).slice(0, MAX_KEYS) }) });
  const number = (name) => ({ class: "field number", type: "number", step: "1", commit: (text) => set({ [name]: text === "" ? null : Math.round(Number(text)) }) });
  const flag = (name, title, usual) => html`<label class="row"><input type="checkbox" checked=${entry[name] ?? usual}
    onChange=${(event) => set({ [name]: event.target.checked === usual ? null : event.target.checked })} /> ${title}</label>`;
  return html`<details class="entry" open=${!entry.text}><summary>${titleOf(entry)}${entry.enabled === false && html`<span class="quiet"> (off)</span>`}
      ${entry.always && html`<span class="quiet"> (always)</span>`}</summary>
    <div class="stack more">
      ${field("name", "Name", { maxlength: 200 })}
      ${field("keys", "Keys", { placeholder: "cat, kitten, /cats?/", ...keys("keys") })}
      <label for=${id("text")}>Text</label>
      <${CommittedInput} as="textarea" id=${id("text")} rows="3" value=${entry.text} commit=${(text) => set({ text })} />
      ${field("secondary_keys", "Secondary keys", keys("secondary_keys"))}
      ${entry.secondary_keys?.length > 0 && html`<div class="row spread"><label for=${id("logic")}>Must occur</label>
        <select class="field" id=${id("logic")} value=${entry.logic ?? "any"} onChange=${(event) => set({ logic: event.target.value })}>
          ${Object.entries(LOGIC).map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select></div>`}
      ${field("order", "Order", { placeholder: 100, ...number("order") })}
      ${field("depth", `Depth (${unit} above the end)`, { placeholder: "start", min: 0, ...number("depth") })}
      ${flag("enabled", "Enabled", true)} ${flag("always", "Always in the prompt", false)} ${flag("whole_words", "Whole words", true)}
      <div><button type="button" class="button tiny" onClick=${() => spliceEntries(at, 1, [])}>Delete this entry</button></div>
    </div></details>`;
}
