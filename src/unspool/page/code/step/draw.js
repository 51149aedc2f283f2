// The draw: a number between 0 and 1 falls on the candidates that are left.

import { html, percent, Piece, spelled } from "../lib.js";
import { finalists, huesOf } from "./stages.js";
import { Line } from "./line.js";

export function Draw({ step }) {
  const { draw } = step;
  return html`<section class="step-part" aria-labelledby="step-drawn">
    <h3 id="step-drawn"><i aria-hidden="true">3</i> Chance picks one</h3>
    ${draw === null
      ? html`<p class="quiet small">At temperature 0 nothing is drawn: the likeliest token is always taken.</p>`
      : html`<${Drawn} step=${step} />`}
  </section>`;
}

function Drawn({ step }) {
  const { u, low, high } = step.draw;
  const parts = laid(step);
  const label = `A line from 0 to 1. The number ${u.toFixed(4)} falls on ${spelled(step.piece)}, `
    + `which covers ${low.toFixed(4)} to ${high.toFixed(4)}.`;
  return html`
    <p class="quiet small">Those left lie end to end, each as wide as its chance. A random number from 0 to 1
      falls on one of them.</p>
    <${Line} parts=${parts} u=${u} hit=${step.token} label=${label} id=${`${step.position}:${u}:${step.token}`} />
    <p class="small"><span class="mono">u = ${u.toFixed(4)}</span> fell on <${Piece} text=${step.piece} />, which
      covers ${low.toFixed(4)} to ${high.toFixed(4)}: a chance of ${percent(step.probability)}.</p>
  `;
}

/** The same at a glance, for the head of the panel. */
export function Glance({ step }) {
  if (step.draw === null) return null;
  return html`<svg class="step-glance" aria-hidden="true" viewBox="0 0 1000 20" preserveAspectRatio="none">
    ${laid(step).map(({ token, low, high, hue }) => html`<rect key=${token} x=${1000 * low} y="8" height="12"
      class="${hue} ${token === step.token ? "hit" : ""}" width=${Math.max(1, 1000 * (high - low) - 3)} />`)}
    <rect class="mark" x=${1000 * step.draw.u - 2} y="0" width="5" height="20" />
  </svg>`;
}

/** The known ones from 0 on; the one that was hit lies where the server says, even if not among them. */
export function laid(step, hues = huesOf(step)) {
  let at = 0;
  const parts = [];
  for (const { token, text, probability } of finalists(step)) {
    if (token !== step.token) parts.push({ token, text, low: at, high: at + probability, hue: hues.get(token) });
    at += probability;
  }
  const { low, high } = step.draw ?? { low: 0, high: 1 }; // greedy: the whole line is its own
  parts.push({ token: step.token, text: step.piece, low, high, hue: hues.get(step.token) ?? "hue-0" });
  return parts;
}
