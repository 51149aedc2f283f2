// What a token costs in time, and what the cache saves of it.

import { count, duration, html, ordinal, plural } from "../lib.js";
import { branchNow, promptLength, sharedSteps, state } from "../state.js";
import { Chart } from "./chart.js";
import { paceOf, perSecond } from "./live.js";
import { hadCache, isMeasuring, measure, measureOf, MOST, startOf, stopMeasuring } from "./measure.js";
import { Figures, Switch } from "./parts.js";
import { tallyOf } from "./tally.js";

const TELLING = 6; // tokens; the times of fewer say nothing
const WITH = { name: "with the cache", color: "--d1" };
const WITHOUT = { name: "without", color: "--d2" };
const fitted = (of) => ({ color: of.color, width: 1, dash: [4, 3] });

/** Seconds at an axis: round numbers need no decimals. */
function axisTime(seconds) {
  if (seconds <= 0) return "0";
  return seconds < 1 ? `${Number((seconds * 1000).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`;
}

export function Time({ branch }) {
  const { first, rate, reused } = paceOf(branch);
  const { seconds } = tallyOf(branch);
  const mixed = branch.runs.some(({ from }) => !hadCache(branch, from));
  const usual = ceiling(seconds, 0.5);
  return html`<section class="cost" aria-labelledby="cost-time">
    <h3 id="cost-time">Time</h3>
    <${Figures} of=${[
      ["first token", duration(first), "first"],
      ["tokens/s", perSecond(rate), "rate"],
      ["reused tokens", count(reused), "reused"],
    ]} />
    <${Chart} name="Time per token" format=${duration} axis=${axisTime} lines=${mixed ? [WITH, WITHOUT] : [WITH]}
      gist=${`Time for each of ${plural(seconds.length, "token")}; half of them took at most ${duration(usual)}.`}
      read=${() => readTimes(mixed)} />
    <p class="quiet small">The first token waits for the prompt to be read. Tokens that an earlier
      writing has left in the cache are reused, not computed again.</p>
    <div class="row">
      <${Switch} setting="cache" on=${true} off=${false} usual=${true}>Cache<//>
      <span class="quiet small">Off: for every token the whole text is read anew.</span>
    </div>
    <${Comparison} branch=${branch} />
  </section>`;
}

/** Time per token, apart for those written with the cache and those without. */
function readTimes(mixed) {
  const branch = branchNow();
  if (!branch) return null;
  const { seconds } = tallyOf(branch);
  const series = mixed
    ? [true, false].map((cache) => seconds.map((s, i) => (hadCache(branch, i) === cache ? s : NaN)))
    : [seconds];
  return { first: promptLength(branch), series, high: ceiling(seconds) * 1.35 || 0.01, clip: true };
}

function Comparison({ branch }) {
  const found = measureOf(branch);
  const left = branch.steps.length - startOf(branch);
  const other = hadCache(branch, branch.steps.length - 1) ? "without" : "with";
  const why = branch.recorded ? "This text was loaded from a file, and the server does not have it."
    : left < 2 ? "Let the model write a few tokens first." : null;
  return html`<div class="stack">
    <div class="row">
      ${found?.running
        ? html`<button class="button" onClick=${stopMeasuring}>Stop measuring</button>
          <progress max=${Math.min(MOST, left)} value=${found.steps.length} aria-label="Tokens measured"></progress>`
        : html`<button class="button" disabled=${why !== null || state.writing !== null || isMeasuring()}
            onClick=${() => measure(branch)}>Write the same text ${other} the cache</button>`}
      ${why && html`<span class="quiet small">${why}</span>`}
    </div>
    ${found === null && why === null && html`<p class="quiet small">Writes ${left > MOST ? `${MOST} tokens of it` : "it"} once
      more on the side, by the same seed. The copy is deleted when it is done.</p>`}
    ${found?.fault && html`<p class="bad small" role="alert">${found.fault}</p>`}
    ${found?.steps.length > 1 && html`<${Compared} branch=${branch} found=${found} />`}
  </div>`;
}

/** The times of both texts, as far as both have been written. */
function timesOf(branch, found) {
  const ours = branch.steps.slice(found.start, found.start + found.steps.length);
  const times = [ours, found.steps].map((steps) => steps.map((step) => step.seconds));
  const [withCache, without] = found.cache ? times.reverse() : times;
  return { ours, withCache, without };
}

/** Tokens read for `n` new ones behind `before` others, if each time all are read again. */
export const readWithout = (before, n) => n * before + (n * (n - 1)) / 2;

function Compared({ branch, found }) {
  const { ours, withCache, without } = timesOf(branch, found);
  const n = Math.min(withCache.length, without.length);
  const same = sharedSteps(ours, found.steps);
  const slower = without[n - 1] / withCache[n - 1];
  const read = () => {
    const both = timesOf(branch, found);
    const later = both.withCache.map((seconds, i) => (i === 0 ? NaN : seconds)); // the prompt is read once
    const lines = [later, both.without].map(line);
    return {
      first: promptLength(branch) + found.start,
      series: [both.withCache, both.without, ...lines.map((fit) => along(fit, n < TELLING ? 0 : both.without.length))],
      high: Math.max(ceiling(both.withCache), ceiling(both.without)) * 1.15 || 0.01,
      clip: true,
    };
  };
  if (n < 2) return null;
  return html`
    <${Chart} name="Time per token with and without the cache" tall=${true} format=${duration} axis=${axisTime}
      lines=${[WITH, WITHOUT, fitted(WITH), fitted(WITHOUT)]} read=${read}
      gist=${`Time per token: token ${found.start + n} took ${duration(withCache[n - 1])} with the cache, ${duration(without[n - 1])} without.`} />
    ${n >= TELLING && html`<p class="cost-verdict" data-verdict>Without the cache the ${ordinal(found.start + n)} token took
      ${" "}<b>${slower.toFixed(slower < 10 ? 1 : 0)} times as long</b> (${duration(without[n - 1])} instead of
      ${" "}${duration(withCache[n - 1])}), and all ${n} tokens <b>${duration(sum(without))} instead of ${duration(sum(withCache))}</b>.
      ${" "}It read ${count(readWithout(promptLength(branch) + found.start, n))} tokens instead of
      ${" "}${count(promptLength(branch) + found.start + n - 1)}: each token has one more to read again than the one before,
      so the sum grows with the square of the length.</p>`}
    <p class="small ${same === n ? "quiet" : "bad"}" data-same=${same === n}>${same === n
      ? `Both texts are the same: ${n} of ${plural(n, "token")} compared.`
      : `The texts part at token ${found.start + same + 1}: of ${plural(n, "token")} the first ${same} are the same.`}
      ${found.stopped ? " Stopped before the end." : ""} ${found.running ? "" : "The copy has been deleted."}</p>`;
}

/** The line that comes closest to the values (least squares): `{start, slope}`. */
export function line(values) {
  let n = 0, sumX = 0, sumY = 0, sumXX = 0, sumXY = 0;
  values.forEach((y, x) => {
    if (!Number.isFinite(y)) return;
    n += 1;
    sumX += x;
    sumY += y;
    sumXX += x * x;
    sumXY += x * y;
  });
  const spread = n * sumXX - sumX * sumX;
  if (n === 0) return { start: 0, slope: 0 };
  const slope = spread === 0 ? 0 : (n * sumXY - sumX * sumY) / spread;
  return { start: (sumY - slope * sumX) / n, slope };
}

/** The values of such a line. */
export const along = ({ start, slope }, length) => Array.from({ length }, (_, x) => start + slope * x);

export const sum = (values) => values.reduce((total, x) => total + (Number.isFinite(x) ? x : 0), 0);

/** So high that the few outliers at the top do not flatten the rest; for a scale. */
export function ceiling(values, share = 0.97) {
  const stride = Math.max(1, Math.floor(values.length / 400));
  const some = [];
  for (let i = values.length - 1; i >= 0; i -= stride) {
    if (Number.isFinite(values[i])) some.push(values[i]);
  }
  if (some.length === 0) return 0;
  some.sort((a, b) => a - b);
  const most = some.length > 3 ? some.length - 2 : some.length - 1; // one outlier, at least
  return some[Math.min(most, Math.floor(share * some.length))];
}
