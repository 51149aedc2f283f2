// The line under the text: speed and context window.

import { openView } from "../actions.js";
import { clamp, count, duration, html, percent, plural, useThrottledChanges } from "../lib.js";
import { currentBranch, state } from "../state.js";

export function LiveFigures() {
  useThrottledChanges("steps", "current", "writing", "branches");
  const branch = currentBranch();
  if (!branch || (!branch.steps.length && !branch.writing)) return null;
  if (branch.progress) return html`<${PromptProgress} ...${branch.progress} />`;
  const { first, rate } = speedOf(branch);
  return html`<p class="live-figures quiet small">
    ${first !== null && html`<span>time to first token <b data-live="first">${duration(first)}</b></span>
      <span><b data-live="rate">${perSecond(rate)}</b> tokens/s</span>`}
    <span data-live="tokens">${plural(branch.steps.length, "token")}</span>
    <button type="button" class="link" id="text-costs" title="Time, probability and repetition, token by token" onClick=${() => openView("text")}>Costs</button>
  </p>`;
}

/** How much of a long prompt is computed. */
function PromptProgress({ computed, total }) {
  return html`<p class="live-figures quiet small" role="status"><progress max=${total} value=${computed} aria-label="Prompt computed"></progress>
    Reading the prompt: ${count(computed)} of ${plural(total, "token")}</p>`;
}

export const perSecond = (rate) => (rate === null ? "–" : rate < 10 ? rate.toFixed(1) : count(Math.round(rate)));

/**
 * `{first, rate, reused, written}` of the running generation, or of the last: time to first token in seconds, tokens a
 * second after it, tokens reused from the cache, tokens generated.
 */
export function speedOf(branch) {
  const { writing } = state;
  if (writing?.branch === branch.id) {
    const from = branch.runs.at(-1)?.from ?? 0;
    const written = Math.max(0, branch.steps.length - from);
    const passed = (performance.now() - writing.began) / 1000;
    return { first: writing.first, reused: null, written, rate: tokensPerSecond(written, writing.first, passed) };
  }
  const { last } = branch;
  if (!last) return { first: null, rate: null, reused: null, written: 0 };
  return {
    first: last.first_token_seconds,
    rate: tokensPerSecond(last.written_tokens, last.first_token_seconds, last.total_seconds),
    reused: last.reused_tokens,
    written: last.written_tokens,
  };
}

/** Decode speed without the first token, which includes the prefill. */
export function tokensPerSecond(written, first, total) {
  return written > 1 && first !== null && total > first ? (written - 1) / (total - first) : null;
}

// -- context window ---------------------------------------------------------------------------------

const NEARLY_FULL = 0.85;

/** How full the context window is. `parts`: `[{name, tokens, color}]`; without them, one part. */
export function ContextBar({ used, total, parts }) {
  if (!total) return null;
  const visibleParts = (parts ?? [{ name: "used", tokens: used, color: "var(--accent)" }])
    .filter((part) => part.tokens > 0);
  const over = used - total;
  const state = over > 0 ? "over" : used >= total * NEARLY_FULL ? "near" : "";
  const room = over > 0
    ? `${plural(over, "token")} over the limit`
    : `${count(total - used)} free`;
  const sentence = `${count(used)} of ${plural(total, "token")} (${percent(used / total)}), ${room}`;
  const scale = Math.max(used, total);
  return html`<div class="context-bar ${state}" data-state=${state || "calm"}>
    <div class="context-track" role="meter" aria-label="Context window" aria-valuemin="0"
         aria-valuemax=${total} aria-valuenow=${clamp(used, 0, total)} aria-valuetext=${sentence}>
      ${visibleParts.map((part) => html`<span key=${part.name} title="${part.name}: ${count(part.tokens)}"
        style=${{ width: `${(part.tokens / scale) * 100}%`, background: part.color }}></span>`)}
      ${over > 0 && html`<b style=${{ left: `${(total / scale) * 100}%` }}></b>`}
    </div>
    <p class="small">
      <span class="context-sum">${sentence}</span>
      ${parts && visibleParts.map((part) => html`<span class="context-part" key=${part.name}>
        <i style=${{ background: part.color }}></i>${part.name} ${count(part.tokens)}</span>`)}
    </p>
  </div>`;
}
