// One text of the search: its words token by token, its score and why, and the way into Write.

import { html, isNarrow, nats, useEffect, useRef } from "../lib.js";
import { state } from "../state.js";
import { openInWrite } from "../compare/popover.js";
import { TokenText } from "../compare/text.js";
import { isLost, openNode, pathTo, thinking } from "./runs.js";
import { scored } from "./words.js";

export function NodeCard({ pick }) {
  const box = useRef(null);
  const { open: number, winner } = thinking;
  useEffect(() => {
    if (number !== null && isNarrow()) box.current.scrollIntoView({ block: "nearest" });
  }, [number]);
  if (number === null) {
    return html`<section class="panel think-node" aria-label="A text of the search" ref=${box}>
      <p class="quiet small">Choose a text in the tree to read it token by token, and to go on with it by hand.</p></section>`;
  }
  const path = pathTo(number);
  const node = path.at(-1);
  const { id, fault } = thinking.opened.get(number) ?? {};
  const steps = state.branches.get(id)?.steps;
  const before = path.slice(0, -1).reduce((sum, { tokens }) => sum + tokens.length, 0);
  const length = before + node.tokens.length;
  const title = number === 0 ? "The prompt" : `Text ${number}`;
  return html`<section class="panel stack think-node" aria-label="A text of the search" ref=${box} data-open=${number}>
    <div class="row"><h3 class="grow">${title}${number === winner && html` <span class="chip think-won">★ winner</span>`}
      ${isLost(number) && html` <span class="chip">pruned</span>`}</h3>
      ${node.parent !== null && html`<button class="button tiny" onClick=${() => openNode(node.parent)}>What it continues</button>`}</div>
    ${number === 0 ? html`<p class="think-plain" dir="auto">${thinking.start.prompt.map(({ text }) => text).join("")}</p>`
      : html`<${Facts} node=${node} length=${length} />
        ${steps?.length ? html`<${TokenText} key=${id} steps=${steps} parts=${before || null} fork="What this text adds begins here" label=${`${title}, token by token`}
            pick=${(at, element) => pick({ id, at, element })} />`
          : html`<p class="think-plain" dir="auto" aria-busy=${!fault}>${path.map(({ text }) => text).join("")}</p>`}`}
    ${fault && html`<p class="fault" role="alert">${fault} <button class="button tiny" onClick=${() => openNode(number)}>Try again</button></p>`}
    <button class="button" id="think-write" disabled=${!id} onClick=${() => openInWrite(id)}>Go on in Write</button>
  </section>`;
}

function Facts({ node, length }) {
  const { score, why, answer, logprob, tokens, finished } = node;
  const judged = score === undefined ? "not judged" : score === null ? "the judge failed" : scored(score);
  return html`<dl class="cmp-numbers">
    <dt>Score</dt><dd data-number="score">${judged}</dd>
    ${answer != null && html`<dt>Answer</dt><dd data-number="answer">${String(answer)}</dd>`}
    <dt>Tokens</dt><dd data-number="tokens">${length === tokens.length ? length : `${length}, ${tokens.length} of them its own`}</dd>
    <dt title="How unlikely the model held each token of this piece, on average">Surprise</dt>
    <dd>${nats(tokens.length ? -logprob / tokens.length : null)} nats a token</dd>
    <dt>End</dt><dd>${finished ? "nothing follows" : "could be gone on with"}</dd>
  </dl>${why && html`<p class=${score === null ? "fault" : "small"} data-number="why">${why}</p>`}`;
}
