// The view "Tokens": any text as the model reads it.

import { api } from "../api.js";
import { count, html, useChanges, useLayoutEffect, useMemo, useRef, useState } from "../lib.js";
import { branchNow, changed, modelNow, state, textOf } from "../state.js";
import { Fault, useAnswer } from "../asking.js";
import { bytesOf } from "./characters.js";
import { ContextBar } from "./contextbar.js";
import { Merges } from "./merges.js";
import { Split } from "./split.js";
import { Vocabularies } from "./vocabularies.js";
import { longestWord } from "./words.js";

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

const memory = { text: EXAMPLES[0][1] }; // stays while other views are looked at

export function TokensView() {
  useChanges("models", "model", "server", "current");
  const [typed, setTyped] = useState(memory.text);
  const text = useMemo(() => typed.toWellFormed(), [typed]); // half an emoji cannot be sent
  const { answer, fault, fresh, again } = useAnswer(
    state.model && ((signal) => api.post(
      "/tokenize", { content: text, parse_special: false, with_pieces: true, model: state.model }, { signal })),
    WAIT, [text, state.model, state.server.ready]);
  const found = answer ?? NOTHING;
  const letters = useMemo(() => [...text].length, [text]);
  const { at, asked, pick } = usePick(found.pieces);
  const change = (next) => {
    memory.text = next;
    setTyped(next);
  };
  const total = found.max_model_len ?? modelNow()?.unspool.context;
  return html`<section class="tokens-view" aria-labelledby="tokens-title">
    <header>
      <h2 id="tokens-title">Tokens</h2>
      <p class="quiet">A model reads and writes tokens: pieces of text from a fixed list, each with a number.
        Common words are one piece, rare ones several.</p>
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
          <${ContextBar} used=${found.count} total=${total} />
          <p class="quiet small">The context window: all that the model can look back on. Prompt and answer
            share this room.</p>
        </div>
      </div>
      <div class="tokens-found" aria-busy=${!fresh}>
        <${Counts} text=${text} letters=${letters} tokens=${fault ? null : found.count} />
        <${Fault} fault=${fault} again=${again} />
        <${Split} pieces=${found.pieces} picked=${at} stale=${!fresh} onPick=${pick} />
      </div>
    </div>
    <${Merges} pieces=${found.pieces} text=${text} at=${at} asked=${asked} model=${state.model} />
    <${Vocabularies} text=${text} letters=${letters} own=${found} model=${state.model}
      size=${modelNow()?.unspool.vocabulary} />
  </section>`;
}

/** The piece whose word is shown merging: the picked one while it is there, else the longest word's. */
function usePick(pieces) {
  const [picked, setPicked] = useState({ at: null, id: null, asked: 0 });
  const longest = useMemo(() => longestWord(pieces), [pieces]);
  const stands = picked.at !== null && pieces[picked.at]?.id === picked.id;
  return {
    at: stands ? picked.at : longest,
    asked: picked.asked,
    pick: (at) => setPicked((before) => ({ at, id: pieces[at].id, asked: before.asked + 1 })),
  };
}

function usePrompt(text) {
  state.draft = text;
  state.view = "write";
  changed("draft", "view");
}

function Examples({ onChoose }) {
  const branch = branchNow();
  const written = branch ? textOf(branch) : "";
  return html`<div class="row tokens-examples" role="group" aria-label="Examples">
    ${EXAMPLES.map(([name, text]) => html`<button type="button" class="chip" key=${name}
      onClick=${() => onChoose(text)}>${name}</button>`)}
    ${written && html`<button type="button" class="chip" onClick=${() => onChoose(written)}>What was written</button>`}
  </div>`;
}

/** A text area that grows with its text. A long text fills it anyway and need not be measured. */
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
  const told = [
    ["characters", count(letters)], ["bytes", count(bytes)], ["tokens", count(tokens)],
    ["characters per token", tokens ? (letters / tokens).toFixed(2) : "–"],
  ];
  return html`<dl class="tokens-counts">${told.map(([name, value]) => html`
    <div key=${name}><dt>${name}</dt><dd data-count=${name}>${value}</dd></div>`)}</dl>`;
}
