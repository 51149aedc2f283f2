// How certain the model was at each token, and whether the text went its way.

import { html, nats } from "../lib.js";
import { Chart } from "./chart.js";
import { reading, signed } from "./parts.js";
import { MEAN_OVER, tallyOf } from "./tally.js";

const ENTROPY = [
  { name: "entropy", color: "--quiet", width: 0.75 },
  { name: `mean of ${MEAN_OVER}`, color: "--d4", width: 2.25 },
];
const DRIFT = [{ name: "surprise minus entropy, summed up", color: "--d3", shade: true }];
const readEntropy = reading((tally) => [tally.entropies, tally.means], { high: 0.5 });
const readDrift = reading((tally) => [tally.drifts], { high: 0.5 });
const CLOSE = 0.1; // nats a token within which the text is as likely as expected

export function Certainty({ branch }) {
  const tally = tallyOf(branch);
  const drift = tally.drifts.at(-1) ?? 0;
  const early = tally.means[Math.min(MEAN_OVER, tally.length) - 1] ?? 0;
  const now = tally.means.at(-1) ?? 0;
  return html`<section class="cost" aria-labelledby="cost-certainty">
    <h3 id="cost-certainty">Certainty</h3>
    <${Chart} name="Entropy per token" lines=${ENTROPY} format=${nats} axis=${short}
      gist=${`Entropy per token: ${nats(early)} nats at the beginning, ${nats(now)} at the end.`}
      read=${readEntropy} />
    <p>${moved(early, now, tally.length)}</p>
    <${Chart} name="Drift" lines=${DRIFT} format=${signed} axis=${short} gist=${`Surprise minus entropy, summed up: ${signed(drift)} nats.`}
      read=${readDrift} />
    <p data-drift=${drift.toFixed(4)}>${told(drift, tally.length)}</p>
    <p class="quiet small">Entropy is the surprise that the model expected before a token was picked. A line that
      climbs took less likely tokens than expected; one that falls took the likely ones again and again.</p>
  </section>`;
}

const short = (value) => String(Number(value.toPrecision(3))).replace("-", "−");

function moved(early, now, length) {
  if (length < 2 * MEAN_OVER) return `So far the model was uncertain by ${nats(now)} nats a token.`;
  const than = `${nats(now)} nats over the last ${MEAN_OVER} tokens, ${nats(early)} over the first`;
  if (Math.abs(now - early) < 0.25) return `The model is about as certain as at the beginning: ${than}.`;
  return `The model has become ${now < early ? "more" : "less"} certain: ${than}.`;
}

function told(drift, length) {
  const by = `${nats(Math.abs(drift))} nats`;
  if (Math.abs(drift) < CLOSE * length) {
    return `The text is about as likely as the model expected, ${by} off in all.`;
  }
  return drift > 0
    ? `The text is ${by} less likely than the model itself expected.`
    : `The text is ${by} more likely than the model itself expected, as one that keeps to the likely tokens is.`;
}
