// How certain the model was at each token, whether the text went its way, and the chance of the whole of it.

import { count, html, nats, percent, plural } from "../lib.js";
import { Chart } from "./chart.js";
import { Figures, Power, power, reading, signed } from "./parts.js";
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

const LINES = [{ name: "chance of the text so far", color: "--d5", shade: true }];
const readTens = reading((tally) => [tally.logprobs.map((logprob) => logprob / Math.LN10)], { low: -1 });
const PLAIN = 6; // powers of ten that people read as a number

export function Chance({ branch }) {
  const tally = tallyOf(branch);
  const tens = -tally.logprob / Math.LN10;
  const odds = tens < PLAIN ? count(Math.round(10 ** tens)) : html`<${Power} exponent=${Math.round(tens)} />`;
  const tosses = Math.round(-tally.logprob / Math.LN2);
  return html`<section class="cost" aria-labelledby="cost-chance">
    <h3 id="cost-chance">Chance of this text</h3>
    <${Figures} of=${[
      ["chance", tens < 4 ? percent(10 ** -tens) : html`<${Power} exponent=${-Math.round(tens)} />`, "chance"],
      ["log probability", signed(tally.logprob), "logprob"],
      ["mean per token", percent(tally.typical), "typical"],
      ["perplexity", nats(tally.perplexity), "perplexity"],
    ]} />
    <${Chart} name="Chance of the text so far" lines=${LINES} format=${power} axis=${(tens) => (tens === 0 ? "1" : power(tens))}
      gist=${`The chance of the text falls with every token, to ${power(-tens)} after ${tally.length}.`}
      read=${readTens} />
    <p>This very text had a chance of <b>1 in ${odds}</b>${tosses > 3 ? html`, as rare as ${count(tosses)} coins that all show heads` : ""}.</p>
    <p class="quiet small">The chances of its ${plural(tally.length, "token")}, as the model gave them before sampling, are
      multiplied. On average (geometric mean) a token had ${percent(tally.typical)}, as if each time one of
      ${" "}${nats(tally.perplexity)} equally likely tokens were drawn: the perplexity.</p>
  </section>`;
}
