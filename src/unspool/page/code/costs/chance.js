// The chance of the whole text: the chances of its tokens, multiplied.

import { count, html, nats, percent, plural } from "../lib.js";
import { Chart } from "./chart.js";
import { Figures, Power, power, reading, signed } from "./parts.js";
import { tallyOf } from "./tally.js";

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
