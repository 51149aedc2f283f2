// The head of a step: in one sentence how it came about, and its numbers.

import { count, duration, html, nats, ordinal, Piece, plural } from "../lib.js";

/** How the token came about, for somebody who has never seen it happen. */
export function Story({ step, size }) {
  if (step.chosen) {
    return html`<p class="step-story"><span class="chip step-mine">you put it here</span>${" "}
      The model was not asked; this is what it would have weighed.</p>`;
  }
  const left = step.stages.at(-1)?.kept ?? size;
  const weighed = html`The model weighed <b>${count(size)} tokens</b>`;
  const end = step.draw === null
    ? html`${weighed}, and the <b>likeliest</b> was taken.`
    : html`${weighed}, filters left <b>${left === size ? "all of them" : count(left)}</b>, and
        a${" "}<b>random number</b> fell on <${Piece} text=${step.piece} />.`;
  return html`<p class="step-story">${end}${drafted(step.draft)}</p>`;
}

function drafted(draft) {
  if (draft === "accepted") return html` <span class="chip">a guess from the text before, accepted</span>`;
  if (draft === "rejected") return html` <span class="chip">a guess was rejected here</span>`;
  return null;
}

export function Facts({ step, size }) {
  const surprise = step.logprob === null ? null : -step.logprob;
  const bits = surprise === null ? "∞" : nats(surprise / Math.LN2);
  return html`
    <dl class="step-facts">
      <${Fact} name="surprise" value=${surprise === null ? "∞" : nats(surprise)} unit="nats"
        more="${bits} bits" hint="How little the model expected this token: −log of its probability" />
      <${Fact} name="entropy" value=${nats(step.entropy)} unit="nats"
        more=${choices(step.entropy)}
        hint="How unsure the model was before it was picked" />
      <${Fact} name="rank" value=${ordinal(step.rank + 1)} more="of ${count(size)}"
        hint="Its place in the model's own order" />
      <${Fact} name="time" value=${step.chosen ? "–" : duration(step.seconds)}
        more=${step.chosen ? "nothing computed" : "for this token"} hint="How long this step took" />
    </dl>
    <p class="quiet small step-bytes">
      Token ${count(step.token)} at position ${count(step.position)}, ${told(step.bytes)}.
    </p>
  `;
}

function Fact({ name, value, unit, more, hint }) {
  return html`<div title=${hint}>
    <dt>${name}</dt>
    <dd><b>${value}</b>${unit && html` <small>${unit}</small>`}<span class="quiet">${more}</span></dd>
  </div>`;
}

/** e to the entropy: so many equally likely tokens would leave the model as unsure. */
function choices(entropy) {
  if (entropy === null) return "";
  const spread = Number(Math.exp(entropy).toPrecision(2));
  return spread === 1 ? "about 1 choice" : `about ${count(spread)} equal choices`;
}

function told(bytes) {
  if (!bytes.length) return "a sign of the model's own, without bytes";
  const hex = bytes.map((one) => one.toString(16).padStart(2, "0")).join(" ");
  const number = bytes.length === 1 ? "1 byte" : `${bytes.length} bytes`;
  return html`${number} <span class="mono">${hex}</span>${isWhole(bytes) ? "" : ", part of a character"}`;
}

function isWhole(bytes) {
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
    return true;
  } catch {
    return false;
  }
}
