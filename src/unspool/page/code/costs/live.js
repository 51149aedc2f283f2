// One line under the text: how fast it is being written.

import { count, duration, html, plural, useCalmChanges } from "../lib.js";
import { branchNow, state } from "../state.js";

export function LiveFigures() {
  useCalmChanges("steps", "current", "writing", "branches");
  const branch = branchNow();
  if (!branch || (!branch.steps.length && !branch.writing)) return null;
  const { first, rate } = paceOf(branch);
  return html`<p class="live-figures quiet small">
    <span>first token <b data-live="first">${duration(first)}</b></span>
    <span><b data-live="rate">${perSecond(rate)}</b> tokens/s</span>
    <span data-live="tokens">${plural(branch.steps.length, "token")}</span>
  </p>`;
}

export const perSecond = (rate) => (rate === null ? "–" : rate < 10 ? rate.toFixed(1) : count(Math.round(rate)));

/**
 * `{first, rate, reused, written}` of the writing that goes on, or of the last: seconds to the first
 * token, tokens a second behind it, tokens that were not computed again, tokens written.
 */
export function paceOf(branch) {
  const { writing } = state;
  if (writing?.branch === branch.id) {
    const from = branch.runs.at(-1)?.from ?? 0;
    const written = Math.max(0, branch.steps.length - from);
    const passed = (performance.now() - writing.began) / 1000;
    return { first: writing.first, reused: null, written, rate: rate(written, writing.first, passed) };
  }
  const { last } = branch;
  if (!last) return { first: null, rate: null, reused: null, written: 0 };
  return {
    first: last.first_token_seconds,
    rate: rate(last.written_tokens, last.first_token_seconds, last.total_seconds),
    reused: last.reused_tokens,
    written: last.written_tokens,
  };
}

/** The first token waits for the prompt to be read, and would make a short text look slow. */
export function rate(written, first, total) {
  return written > 1 && first !== null && total > first ? (written - 1) / (total - first) : null;
}
