// Candidates laid end to end on a line from 0 to 1, and the number that falls on it.

import { html, spelled, useWidth } from "../lib.js";

/** As many letters of a token as fit; none if not even three do. */
export function fitting(text, width, letter = 6.6) {
  const most = Math.floor((width - 8) / letter);
  const shown = spelled(text);
  if (shown.length <= most) return shown;
  return most < 3 ? "" : `${shown.slice(0, most - 1)}…`;
}

const TOP = 34;
const HEIGHT = 30;
const BALL = 6;

/** `parts`: [{token, text, low, high, hue}]; what they leave free is grey. `hit`: the token u fell on. */
export function Line({ parts, u, hit, label, id }) {
  const [box, width] = useWidth();
  const x = (share) => BALL + share * (width - 2 * BALL);
  const struck = parts.find(({ token }) => token === hit);
  return html`<div class="step-line" ref=${box}>
    <svg role="img" aria-label=${label} width=${width} height=${TOP + HEIGHT + 22}
      viewBox="0 0 ${width} ${TOP + HEIGHT + 22}">
      <rect class="line-rest" x=${x(0)} y=${TOP} width=${x(1) - x(0)} height=${HEIGHT} rx="3" />
      ${parts.map(({ token, text, low, high, hue }) => html`<g key=${token}
        class="line-part ${hue} ${token === hit ? "hit" : ""}">
        <rect x=${x(low)} y=${TOP} width=${Math.max(0.5, x(high) - x(low) - 1)} height=${HEIGHT} />
        <text x=${(x(low) + x(high)) / 2} y=${TOP + HEIGHT / 2 + 4}>${fitting(text, x(high) - x(low))}</text>
      </g>`)}
      ${struck && html`<rect class="line-struck" x=${x(struck.low) - 1} y=${TOP - 2}
        width=${Math.max(2, x(struck.high) - x(struck.low) + 1)} height=${HEIGHT + 4} rx="3" />`}
      ${[0, 0.25, 0.5, 0.75, 1].map((tick) => html`<text key=${tick} class="line-tick" y=${TOP + HEIGHT + 17}
        x=${x(tick)} text-anchor=${tick === 0 ? "start" : tick === 1 ? "end" : "middle"}>${tick}</text>`)}
      ${u !== null && html`<g key=${id} class="line-fall">
        <line x1=${x(u)} x2=${x(u)} y1="0" y2=${TOP - BALL} />
        <circle cx=${x(u)} cy=${TOP - BALL + 1} r=${BALL} />
        <text x=${x(u) + (u > 0.7 ? -12 : 12)} y="14" text-anchor=${u > 0.7 ? "end" : "start"}>${u.toFixed(4)}</text>
      </g>`}
    </svg>
  </div>`;
}
