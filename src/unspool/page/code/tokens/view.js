// The Tokenizer view: any text as the model's tokens, its merges, and the same text in other vocabularies.

import { newText } from "../actions.js";
import { api } from "../api.js";
import {
  count, html, plural, RequestError, useChanges, useEffect, useLayoutEffect, useMemo, useRef, useRequest, useState,
} from "../lib.js";
import { changed, currentBranch, currentModel, state, textOf } from "../state.js";
import { isTab } from "../tab/client.js";
import { longestWord, Merges } from "./merges.js";
import { bytesOf, PlainSplit, Split } from "./pieces.js";
import { ContextBar } from "../write/footer.js";

const MAX_SPLIT_CHARS = 600; // whose tokens are shown
const USED_BY = { gpt2: "GPT-2, GPT-3", cl100k: "GPT-3.5, GPT-4", o200k: "GPT-4o and later" };
const RANKS = { gpt2: "r50k_base", cl100k: "cl100k_base", o200k: "o200k_base" };

function Vocabularies({ text, letters, result, model, size }) {
  const { answer, fault, again } = useRequest(
    (signal) => api.get("/vocabularies", { signal }), 0, [state.server.ready]);
  const [counts, setCounts] = useState({});
  const tell = (name, tokens) => setCounts((before) =>
    before[name] === tokens ? before : { ...before, [name]: tokens });
  const vocabularies = answer?.data ?? [];
  const here = vocabularies.filter((vocabulary) => vocabulary.available);
  const away = vocabularies.filter((vocabulary) => !vocabulary.available);
  const most = Math.max(1, result.count, ...here.map((vocabulary) => counts[vocabulary.name] ?? 0));
  return html`<section class="panel tokens-vocabularies" aria-label="Other vocabularies">
    <h3>The same text in other vocabularies</h3>
    <p class="quiet small">Every model family has its own vocabulary. A larger one needs fewer tokens for the
      same text, so more fits into the context, but its embedding matrix is larger.</p>
    <${RequestError} fault=${fault} again=${again} />
    <ul>
      <${Row} name=${model} note="this model" size=${size} tokens=${result.count} letters=${letters} most=${most}
        pieces=${result.pieces.slice(0, MAX_SPLIT_CHARS / 2)} isTruncated=${result.pieces.length > MAX_SPLIT_CHARS / 2} />
      ${here.map((vocabulary) => html`<${OtherRow} key=${vocabulary.name} ...${vocabulary} text=${text} letters=${letters} most=${most}
        tell=${tell} />`)}
      ${!answer && !fault && html`<li class="quiet small">Loading …</li>`}
    </ul>
    ${away.length > 0 && html`<details class="small"><summary>${plural(away.length, "other")} not on this machine</summary>
      <ul>${away.map((vocabulary) => html`<${Missing} key=${vocabulary.name} ...${vocabulary} />`)}</ul>
      <button type="button" class="button tiny" onClick=${again}>Check again</button></details>`}
  </section>`;
}

/** The start of a long text, up to a space: its tokens are those of the whole text. */
function beginning(text) {
  if (text.length <= MAX_SPLIT_CHARS) return text;
  const space = text.lastIndexOf(" ", MAX_SPLIT_CHARS);
  return text.slice(0, space > 0 ? space : MAX_SPLIT_CHARS);
}

function OtherRow({ name, size, text, letters, most, tell }) {
  const { answer, fault, again, fresh } = useRequest(async (signal) => {
    const ask = (content, pieces) => api.post(
      "/tokenize",
      { content, vocabulary: name, parse_special: false, with_pieces: pieces, model: state.model }, { signal });
    const head = beginning(text);
    const first = await ask(head, true);
    const full = head === text ? first : await ask(text, false);
    return { tokens: full.count, pieces: first.pieces, more: head !== text };
  }, 250, [name, text, state.server.ready]);
  useEffect(() => answer && tell(name, answer.tokens), [answer]);
  return html`<${Row} name=${name} note=${USED_BY[name]} size=${size} tokens=${answer?.tokens} letters=${letters}
    most=${most} pieces=${answer?.pieces ?? []} isTruncated=${answer?.more} stale=${!fresh}>
    <${RequestError} fault=${fault} again=${again} /><//>`;
}

function Row({ name, note, size, tokens, letters, most, pieces, isTruncated, stale, children }) {
  return html`<li data-vocabulary=${name} class=${stale ? "stale" : ""}>
    <p class="vocabulary-name"><b>${name}</b> <span class="quiet small">${note}${
      size ? `, ${count(size)} tokens` : ""}</span></p>
    <p class="vocabulary-count"><b>${count(tokens)}</b> <span class="quiet small">tokens${
      tokens ? `, ${(letters / tokens).toFixed(1)} characters each` : ""}</span>
      <i style=${{ width: `${((tokens ?? 0) / most) * 100}%` }}></i></p>
    <p class="vocabulary-split"><${PlainSplit} pieces=${pieces} />${isTruncated ? " …" : ""}</p>
    ${children}
  </li>`;
}

/** Why a vocabulary is missing, and how to add it. */
function Missing({ name, why }) {
  const reason = why.includes("TIKTOKEN_CACHE_DIR")
    ? html`Its ranks are not on this machine. Put <code>${RANKS[name]}.tiktoken</code> into a folder and set${" "}
      <code>TIKTOKEN_CACHE_DIR</code> to it for the server.`
    : why;
  return html`<li data-vocabulary=${name} class="missing">
    <p class="vocabulary-name"><b>${name}</b> <span class="quiet small">${USED_BY[name]}</span></p>
    <p class="quiet small">${reason}</p>
  </li>`;
}

// -- the view -----------------------------------------------------------------------------------

const EXAMPLES = [
  ["Sentence", "Why do leaves change color in fall? 🍁"],
  ["Code", "def double(numbers):\n\t# twice each\n    return [2 * n for n in numbers]\n"],
  ["Numbers", "12345 + 67890"],
  ["Other languages", "Grüße! Привет! 你好，世界! مرحبا"],
  ["Emoji", "A family 👩‍👩‍👧 and a flag 🇯🇵"],
  ["Rare word", "antidisestablishmentarianism"],
];
const WAIT = 90; // milliseconds after the last key
const LONG = 2000; // characters
const NOTHING = { tokens: [], pieces: [], count: 0 };

const saved = { text: EXAMPLES[0][1] }; // remembered while other views are open

export function TokensView() {
  useChanges("models", "model", "server", "current");
  const [typed, setTyped] = useState(saved.text);
  const text = useMemo(() => typed.toWellFormed(), [typed]); // lone surrogates cannot be sent
  const { answer, fault, fresh, again } = useRequest(
    state.model && ((signal) => api.post(
      "/tokenize", { content: text, parse_special: false, with_pieces: true, model: state.model }, { signal })),
    WAIT, [text, state.model, state.server.ready]);
  const result = answer ?? NOTHING;
  const letters = useMemo(() => [...text].length, [text]);
  const { at, playCount, pick } = usePick(result.pieces);
  const change = (next) => {
    saved.text = next;
    setTyped(next);
  };
  const total = result.max_model_len ?? currentModel()?.unspool.context;
  return html`<section class="tokens-view" aria-labelledby="tokens-title">
    <header>
      <h2 id="tokens-title">Tokenizer</h2>
      <p class="quiet">A model reads and writes tokens: pieces of text from a fixed vocabulary, each with an id.
        Common words are one token, rare ones several.</p>
    </header>
    <div class="tokens-desk">
      <div class="tokens-typed">
        <${Examples} onChoose=${change} />
        <${Text} text=${typed} onChange=${change} />
        <div class="row">
          <button type="button" class="button main" disabled=${!text} onClick=${() => usePrompt(text)}>
            Use as prompt</button>
          <button type="button" class="button" disabled=${!text} onClick=${() => change("")}>Clear</button>
        </div>
        <div>
          <${ContextBar} used=${result.count} total=${total} />
          <p class="quiet small">The context window: the most tokens the model can attend to, prompt and answer
            together.</p>
        </div>
      </div>
      <div class="tokens-found" aria-busy=${!fresh}>
        <${Counts} text=${text} letters=${letters} tokens=${fault ? null : result.count} />
        <${RequestError} fault=${fault} again=${again} />
        <${Split} pieces=${result.pieces} picked=${at} stale=${!fresh} onPick=${pick} />
      </div>
    </div>
    <${Merges} pieces=${result.pieces} text=${text} at=${at} playCount=${playCount} model=${state.model} />
    ${!isTab && html`<${Vocabularies} text=${text} letters=${letters} result=${result} model=${state.model}
      size=${currentModel()?.unspool.vocabulary} />`}
  </section>`;
}

/** The piece whose merges are shown: the selected one while it exists, else one of the longest word. */
function usePick(pieces) {
  const [picked, setPicked] = useState({ at: null, id: null, playCount: 0 });
  const longest = useMemo(() => longestWord(pieces), [pieces]);
  const stands = picked.at !== null && pieces[picked.at]?.id === picked.id;
  return {
    at: stands ? picked.at : longest,
    playCount: picked.playCount,
    pick: (at) => setPicked((before) => ({ at, id: pieces[at].id, playCount: before.playCount + 1 })),
  };
}

function usePrompt(text) {
  state.draft = text;
  newText();
  changed("draft");
}

function Examples({ onChoose }) {
  const branch = currentBranch();
  const written = branch ? textOf(branch) : "";
  return html`<div class="row tokens-examples" role="group" aria-label="Examples">
    ${EXAMPLES.map(([name, text]) => html`<button type="button" class="chip" key=${name}
      onClick=${() => onChoose(text)}>${name}</button>`)}
    ${written && html`<button type="button" class="chip" onClick=${() => onChoose(written)}>Current text</button>`}
  </div>`;
}

/** A text area that grows with its text; for a long text it has a fixed height. */
function Text({ text, onChange }) {
  const area = useRef(null);
  const isLong = text.length > LONG;
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    if (!isLong) area.current.style.height = `${area.current.scrollHeight + 2}px`;
  }, [isLong || text]);
  return html`<label class="visually-hidden" for="tokens-text">Text</label>
    <textarea id="tokens-text" class="mono" dir="auto"
      rows=${isLong ? 16 : 4} spellcheck="false" autocomplete="off" ref=${area}
      placeholder="Type anything" value=${text} onInput=${(event) => onChange(event.target.value)}></textarea>`;
}

function Counts({ text, letters, tokens }) {
  const bytes = useMemo(() => bytesOf(text).length, [text]);
  const counts = [
    ["characters", count(letters)], ["bytes", count(bytes)], ["tokens", count(tokens)],
    ["characters per token", tokens ? (letters / tokens).toFixed(2) : "–"],
  ];
  return html`<dl class="tokens-counts">${counts.map(([name, value]) => html`
    <div key=${name}><dt>${name}</dt><dd data-count=${name}>${value}</dd></div>`)}</dl>`;
}
