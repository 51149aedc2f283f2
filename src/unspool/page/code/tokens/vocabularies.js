// The same text in other vocabularies: how many tokens each needs, and where it cuts.

import { api } from "../api.js";
import { count, html, plural, useEffect, useState } from "../lib.js";
import { state } from "../state.js";
import { Fault, useAnswer } from "../asking.js";
import { PlainSplit } from "./split.js";

const DRAWN = 600; // characters whose split is drawn
const USED_BY = { gpt2: "GPT-2, GPT-3", cl100k: "GPT-3.5, GPT-4", o200k: "GPT-4o and later" };
const RANKS = { gpt2: "r50k_base", cl100k: "cl100k_base", o200k: "o200k_base" };

export function Vocabularies({ text, letters, own, model, size }) {
  const { answer, fault, again } = useAnswer(
    (signal) => api.get("/vocabularies", { signal }), 0, [state.server.ready]);
  const [counts, setCounts] = useState({});
  const tell = (name, tokens) => setCounts((before) =>
    before[name] === tokens ? before : { ...before, [name]: tokens });
  const found = answer?.data ?? [];
  const here = found.filter((one) => one.available);
  const away = found.filter((one) => !one.available);
  const most = Math.max(1, own.count, ...here.map((one) => counts[one.name] ?? 0));
  return html`<section class="panel tokens-vocabularies" aria-label="Other vocabularies">
    <h3>The same text in other vocabularies</h3>
    <p class="quiet small">Every model family has its own list of pieces. A larger list needs fewer tokens for
      the same text, so more fits into the context; each token then costs a larger table.</p>
    <${Fault} fault=${fault} again=${again} />
    <ul>
      <${Row} name=${model} note="this model" size=${size} tokens=${own.count} letters=${letters} most=${most}
        pieces=${own.pieces.slice(0, DRAWN / 2)} more=${own.pieces.length > DRAWN / 2} />
      ${here.map((one) => html`<${OtherRow} key=${one.name} ...${one} text=${text} letters=${letters} most=${most}
        tell=${tell} />`)}
      ${!answer && !fault && html`<li class="quiet small">Looking which others are here …</li>`}
    </ul>
    ${away.length > 0 && html`<details class="small"><summary>${plural(away.length, "other")} not on this machine</summary>
      <ul>${away.map((one) => html`<${Missing} key=${one.name} ...${one} />`)}</ul>
      <button type="button" class="button tiny" onClick=${again}>Look again</button></details>`}
  </section>`;
}

/** The first characters of a long text, up to a space: their split is that of the whole text. */
function beginning(text) {
  if (text.length <= DRAWN) return text;
  const space = text.lastIndexOf(" ", DRAWN);
  return text.slice(0, space > 0 ? space : DRAWN);
}

function OtherRow({ name, size, text, letters, most, tell }) {
  const { answer, fault, again, fresh } = useAnswer(async (signal) => {
    const ask = (content, pieces) => api.post(
      "/tokenize",
      { content, vocabulary: name, parse_special: false, with_pieces: pieces, model: state.model }, { signal });
    const head = beginning(text);
    const first = await ask(head, true);
    const whole = head === text ? first : await ask(text, false);
    return { tokens: whole.count, pieces: first.pieces, more: head !== text };
  }, 250, [name, text, state.server.ready]);
  useEffect(() => answer && tell(name, answer.tokens), [answer]);
  return html`<${Row} name=${name} note=${USED_BY[name]} size=${size} tokens=${answer?.tokens} letters=${letters}
    most=${most} pieces=${answer?.pieces ?? []} more=${answer?.more} stale=${!fresh}>
    <${Fault} fault=${fault} again=${again} /><//>`;
}

function Row({ name, note, size, tokens, letters, most, pieces, more, stale, children }) {
  return html`<li data-vocabulary=${name} class=${stale ? "stale" : ""}>
    <p class="vocabulary-name"><b>${name}</b> <span class="quiet small">${note}${
      size ? `, ${count(size)} pieces` : ""}</span></p>
    <p class="vocabulary-count"><b>${count(tokens)}</b> <span class="quiet small">tokens${
      tokens ? `, ${(letters / tokens).toFixed(1)} characters each` : ""}</span>
      <i style=${{ width: `${((tokens ?? 0) / most) * 100}%` }}></i></p>
    <p class="vocabulary-split"><${PlainSplit} pieces=${pieces} />${more ? " …" : ""}</p>
    ${children}
  </li>`;
}

/** Why a vocabulary is not here, and what to do about it, in few words. */
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
