// The context window as a bar that fills: what the model can hold in view at once.

import { clamp, count, html, percent, plural } from "../lib.js";

const NEARLY_FULL = 0.85;

/** `parts`: what fills it, as `{name, tokens, color}`; without them, one part. */
export function ContextBar({ used, total, parts }) {
  if (!total) return null;
  const shown = (parts ?? [{ name: "used", tokens: used, color: "var(--accent)" }])
    .filter((part) => part.tokens > 0);
  const over = used - total;
  const state = over > 0 ? "over" : used >= total * NEARLY_FULL ? "near" : "";
  const said = over > 0
    ? `${plural(over, "token")} too many`
    : `${count(total - used)} free`;
  const sentence = `${count(used)} of ${plural(total, "token")} (${percent(used / total)}), ${said}`;
  const scale = Math.max(used, total);
  return html`<div class="context-bar ${state}" data-state=${state || "calm"}>
    <div class="context-track" role="meter" aria-label="Context window" aria-valuemin="0"
         aria-valuemax=${total} aria-valuenow=${clamp(used, 0, total)} aria-valuetext=${sentence}>
      ${shown.map((part) => html`<span key=${part.name} title="${part.name}: ${count(part.tokens)}"
        style=${{ width: `${(part.tokens / scale) * 100}%`, background: part.color }}></span>`)}
      ${over > 0 && html`<b style=${{ left: `${(total / scale) * 100}%` }}></b>`}
    </div>
    <p class="small">
      <span class="context-sum">${sentence}</span>
      ${parts && shown.map((part) => html`<span class="context-part" key=${part.name}>
        <i style=${{ background: part.color }}></i>${part.name} ${count(part.tokens)}</span>`)}
    </p>
  </div>`;
}
