// The Costs panel: time, probability, repetition, entropy and draft tokens of the current branch.

import { resumeWriting, selectToken, updateSettings } from "../actions.js";
import { api } from "../api.js";
import { Chart } from "./chart.js";
import { MEAN_OVER, tallyOf, WINDOW } from "./tally.js";
import { count, duration, html, nats, percent, Piece, plural, useThrottledChanges } from "../lib.js";
import { changed, currentBranch, on, promptLength, sharedSteps, state } from "../state.js";
import { perSecond, speedOf } from "../write/footer.js";

/** Figures side by side: `[name, value, key for tests]`. */
function Figures({ figures }) {
  return html`<dl class="cost-figures">${figures.map(([name, value, key]) => html`<div key=${name}>
    <dt class="quiet small">${name}</dt><dd data-figure=${key}>${value}</dd></div>`)}</dl>`;
}

/** A chart's `read` function: series from the statistics of the current branch. */
const chartSeries = (series, bounds) => () => {
  const branch = currentBranch();
  return branch && { first: promptLength(branch), series: series(tallyOf(branch), branch), ...bounds };
};

/** A setting that is on or off; it applies from the next generation on. */
function Switch({ setting, on, off, defaultValue, children }) {
  const value = state.settings[setting] ?? defaultValue;
  return html`<label class="cost-switch"><input type="checkbox" role="switch" checked=${value === on}
    onChange=${(event) => updateSettings({ [setting]: event.target.checked ? on : off })} />
    <span>${children}</span></label>`;
}

/** A number of nats with its sign. */
const signedNats = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${nats(Math.abs(value))}`;

/** A power of ten. */
const Power = ({ exponent }) => html`10<sup>${exponent < 0 ? "−" : ""}${Math.abs(exponent)}</sup>`;

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

/** The same as plain text. */
export const power = (exponent) => `10${[...String(Math.round(exponent))].map((sign) => RAISED[sign]).join("")}`;

// -- the same text generated with the KV cache off (or on): in a temporary branch --------------------

const MAX_MEASURED = 60; // tokens; without the cache each takes longer than the one before

const measurements = new WeakMap(); // branch → its measurement
let runningMeasurement = null;

/** `{start, cache, steps, running, stopped, fault}` or null. */
export const measurementOf = (branch) => measurements.get(branch) ?? null;

const isMeasuring = () => runningMeasurement !== null;

/** Whether a step was generated with the KV cache. */
function usedCache(branch, index) {
  const run = branch.runs.findLast(({ from }) => from <= index);
  return (run?.settings ?? branch.settings)?.cache !== false;
}

/** First step from which the seed reproduces the text: after the last chosen token and the last change of settings. */
function reproducibleFrom(branch) {
  const lastChosen = branch.steps.findLastIndex((step) => step.chosen) + 1;
  let start = 0;
  for (let i = branch.runs.length - 1; i > 0; i--) {
    if (JSON.stringify(branch.runs[i].settings) !== JSON.stringify(branch.runs[i - 1].settings)) {
      start = branch.runs[i].from;
      break;
    }
  }
  return Math.max(lastChosen, start);
}

async function measureWithOtherCache(branch) {
  const start = reproducibleFrom(branch);
  const cache = !usedCache(branch, branch.steps.length - 1);
  const control = new AbortController();
  const measurement = { start, cache, steps: [], running: true, stopped: false, fault: null };
  measurements.set(branch, measurement);
  runningMeasurement = { measurement, control };
  changed("costs");
  let fork = null;
  try {
    const name = cache ? "with cache" : "without cache";
    fork = await api.post(`/v1/tree/${branch.id}/fork`, { at: start, name });
    const body = {
      cache, speculate: null, seed: branch.seed, stream: true, trace: false,
      max_tokens: Math.min(MAX_MEASURED, branch.steps.length - start),
    };
    const events = api.stream(`/v1/tree/${fork.id}/resume`, body, { signal: control.signal });
    for await (const { event, data } of events) {
      if (event === "step") measurement.steps[data.index - start] = data;
      else if (event === "retract") measurement.steps.length = data.to - start;
      changed("costs");
    }
  } catch (error) {
    if (!control.signal.aborted) measurement.fault = error.message;
  } finally {
    measurement.running = false;
    runningMeasurement = null;
    changed("costs");
    if (fork) api.delete(`/v1/tree/${fork.id}`).catch(() => {}); // the server is away
  }
}

function stopMeasuring() {
  if (!runningMeasurement) return;
  runningMeasurement.measurement.stopped = true;
  runningMeasurement.control.abort();
}

// Two generations at the same time would slow each other down and spoil the measurement.
on("writing", () => state.writing && stopMeasuring());

// -- time ----------------------------------------------------------------------------------------------

const MIN_TOKENS = 6; // tokens; fewer are not conclusive
const WITH = { name: "with KV cache", color: "--d1" };
const WITHOUT = { name: "without", color: "--d2" };
const fitted = (source) => ({ color: source.color, width: 1, dash: [4, 3] });

/** Seconds as an axis label, without needless decimals. */
function axisTime(seconds) {
  if (seconds <= 0) return "0";
  return seconds < 1 ? `${Number((seconds * 1000).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`;
}

function Time({ branch }) {
  const { first, rate, reused } = speedOf(branch);
  const { seconds } = tallyOf(branch);
  const mixed = branch.runs.some(({ from }) => !usedCache(branch, from));
  const median = ceiling(seconds, 0.5);
  return html`<section class="cost" aria-labelledby="cost-time">
    <h3 id="cost-time">Time</h3>
    <${Figures} figures=${[
      ["time to first token", duration(first), "first"],
      ["tokens/s", perSecond(rate), "rate"],
      ["reused tokens", count(reused), "reused"],
    ]} />
    <${Chart} name="Time per token" format=${duration} axis=${axisTime} lines=${mixed ? [WITH, WITHOUT] : [WITH]}
      gist=${`Time for each of ${plural(seconds.length, "token")}; half of them took at most ${duration(median)}.`}
      read=${() => readTimes(mixed)} />
    <p class="quiet small">The first token includes the prefill of the prompt. Reused tokens are
      already in the KV cache.</p>
    <div class="row">
      <${Switch} setting="cache" on=${true} off=${false} defaultValue=${true}>KV cache<//>
      <span class="quiet small">Off: every step recomputes the whole text.</span>
    </div>
    <${CacheMeasurement} branch=${branch} />
  </section>`;
}

/** Time per token; one series with the cache and one without. */
function readTimes(mixed) {
  const branch = currentBranch();
  if (!branch) return null;
  const { seconds } = tallyOf(branch);
  const series = mixed
    ? [true, false].map((cache) => seconds.map((s, i) => (usedCache(branch, i) === cache ? s : NaN)))
    : [seconds];
  return { first: promptLength(branch), series, high: ceiling(seconds) * 1.35 || 0.01, clip: true };
}

function CacheMeasurement({ branch }) {
  const measurement = measurementOf(branch);
  const available = branch.steps.length - reproducibleFrom(branch);
  const other = usedCache(branch, branch.steps.length - 1) ? "without" : "with";
  const why = branch.recorded ? "This text was loaded from a file and is not on the server."
    : available < 2 ? "Generate a few tokens first." : null;
  return html`<div class="stack">
    <div class="row">
      ${measurement?.running
        ? html`<button class="button" onClick=${stopMeasuring}>Stop measuring</button>
          <progress max=${Math.min(MAX_MEASURED, available)} value=${measurement.steps.length} aria-label="Tokens measured"></progress>`
        : html`<button class="button" disabled=${why !== null || state.writing !== null || isMeasuring()}
            onClick=${() => measureWithOtherCache(branch)}>Measure ${other} the KV cache</button>`}
      ${why && html`<span class="quiet small">${why}</span>`}
    </div>
    ${measurement === null && why === null && html`<p class="quiet small">Generates ${available > MAX_MEASURED ? `${MAX_MEASURED} tokens of this text` : "this text"} again
      with the same seed, in a temporary branch.</p>`}
    ${measurement?.fault && html`<p class="bad small" role="alert">${measurement.fault}</p>`}
    ${measurement?.steps.length > 1 && html`<${CacheComparison} branch=${branch} measurement=${measurement} />`}
  </div>`;
}

/** Times per token of both texts, as far as both exist. */
function timesOf(branch, measurement) {
  const measuredSteps = branch.steps.slice(measurement.start, measurement.start + measurement.steps.length);
  const times = [measuredSteps, measurement.steps].map((steps) => steps.map((step) => step.seconds));
  const [withCache, without] = measurement.cache ? times.reverse() : times;
  return { measuredSteps, withCache, without };
}

/** Tokens computed for `n` new ones after `before` others without a cache. */
export const readWithout = (before, n) => n * before + (n * (n - 1)) / 2;

function CacheComparison({ branch, measurement }) {
  const { measuredSteps, withCache, without } = timesOf(branch, measurement);
  const n = Math.min(withCache.length, without.length);
  const shared = sharedSteps(measuredSteps, measurement.steps);
  const slower = without[n - 1] / withCache[n - 1];
  const read = () => {
    const times = timesOf(branch, measurement);
    const later = times.withCache.map((seconds, i) => (i === 0 ? NaN : seconds)); // includes the prefill
    const lines = [later, times.without].map(fitLine);
    return {
      first: promptLength(branch) + measurement.start,
      series: [times.withCache, times.without, ...lines.map((fit) => lineValues(fit, n < MIN_TOKENS ? 0 : times.without.length))],
      high: Math.max(ceiling(times.withCache), ceiling(times.without)) * 1.15 || 0.01,
      clip: true,
    };
  };
  if (n < 2) return null;
  return html`
    <${Chart} name="Time per token with and without KV cache" tall=${true} format=${duration} axis=${axisTime}
      lines=${[WITH, WITHOUT, fitted(WITH), fitted(WITHOUT)]} read=${read}
      gist=${`Time per token: token ${measurement.start + n} took ${duration(withCache[n - 1])} with the KV cache, ${duration(without[n - 1])} without.`} />
    ${n >= MIN_TOKENS && html`<p class="cost-verdict" data-verdict>Without the KV cache, token ${count(measurement.start + n)} took
      ${" "}<b>${slower.toFixed(slower < 10 ? 1 : 0)} times as long</b> (${duration(without[n - 1])} instead of
      ${" "}${duration(withCache[n - 1])}); all ${n} tokens took <b>${duration(sum(without))} instead of ${duration(sum(withCache))}</b>.
      ${" "}${count(readWithout(promptLength(branch) + measurement.start, n))} tokens were computed instead of
      ${" "}${count(promptLength(branch) + measurement.start + n - 1)}: without the cache the cost grows with the square
      of the length.</p>`}
    <p class="small ${shared === n ? "quiet" : "bad"}" data-same=${shared === n}>${shared === n
      ? `Both texts are the same: ${n} of ${plural(n, "token")} compared.`
      : `The texts diverge at token ${measurement.start + shared + 1}: of ${plural(n, "token")} the first ${shared} are the same.`}
      ${measurement.stopped ? " Stopped before the end." : ""} ${measurement.running ? "" : "The temporary branch was deleted."}</p>`;
}

/** Least-squares line through the values: `{start, slope}`. */
export function fitLine(values) {
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
const lineValues = ({ start, slope }, length) => Array.from({ length }, (_, x) => start + slope * x);

const sum = (values) => values.reduce((total, x) => total + (Number.isFinite(x) ? x : 0), 0);

/** A high quantile of the values, for a scale that outliers do not flatten. */
export function ceiling(values, share = 0.97) {
  const stride = Math.max(1, Math.floor(values.length / 400));
  const some = [];
  for (let i = values.length - 1; i >= 0; i -= stride) {
    if (Number.isFinite(values[i])) some.push(values[i]);
  }
  if (some.length === 0) return 0;
  some.sort((a, b) => a - b);
  const most = some.length > 3 ? some.length - 2 : some.length - 1; // leave out at least one outlier
  return some[Math.min(most, Math.floor(share * some.length))];
}

// -- entropy and drift ---------------------------------------------------------------------------------

const ENTROPY = [
  { name: "entropy", color: "--quiet", width: 0.75 },
  { name: `mean of ${MEAN_OVER}`, color: "--d4", width: 2.25 },
];
const DRIFT = [{ name: "cumulative surprisal − entropy", color: "--d3", shade: true }];
const readEntropy = chartSeries((tally) => [tally.entropies, tally.means], { high: 0.5 });
const readDrift = chartSeries((tally) => [tally.drifts], { high: 0.5 });
const CLOSE = 0.1; // nats a token: within this the text counts as likely as expected

function Entropy({ branch }) {
  const tally = tallyOf(branch);
  const drift = tally.drifts.at(-1) ?? 0;
  const early = tally.means[Math.min(MEAN_OVER, tally.length) - 1] ?? 0;
  const now = tally.means.at(-1) ?? 0;
  return html`<section class="cost" aria-labelledby="cost-certainty">
    <h3 id="cost-certainty">Entropy</h3>
    <${Chart} name="Entropy per token" lines=${ENTROPY} format=${nats} axis=${axisNumber}
      gist=${`Entropy per token: ${nats(early)} nats at the beginning, ${nats(now)} at the end.`}
      read=${readEntropy} />
    <p>${entropyChangeText(early, now, tally.length)}</p>
    <${Chart} name="Drift" lines=${DRIFT} format=${signedNats} axis=${axisNumber} gist=${`Cumulative surprisal minus entropy: ${signedNats(drift)} nats.`}
      read=${readDrift} />
    <p data-drift=${drift.toFixed(4)}>${driftText(drift, tally.length)}</p>
    <p class="quiet small">Entropy is the expected surprisal of the next token. A rising line means less likely tokens than
      expected; a falling one, more likely tokens.</p>
  </section>`;
}

const axisNumber = (value) => String(Number(value.toPrecision(3))).replace("-", "−");

function entropyChangeText(early, now, length) {
  if (length < 2 * MEAN_OVER) return `Mean entropy so far: ${nats(now)} nats a token.`;
  const than = `${nats(now)} nats over the last ${MEAN_OVER} tokens, ${nats(early)} over the first`;
  if (Math.abs(now - early) < 0.25) return `The entropy is about the same as at the start: ${than}.`;
  return `The entropy has ${now < early ? "fallen" : "risen"}: ${than}.`;
}

function driftText(drift, length) {
  const by = `${nats(Math.abs(drift))} nats`;
  if (Math.abs(drift) < CLOSE * length) {
    return `The text is about as likely as expected, ${by} off in total.`;
  }
  return drift > 0
    ? `The text is ${by} less likely than the model expected.`
    : `The text is ${by} more likely than the model expected, as with greedy or low-temperature sampling.`;
}

const LINES = [{ name: "probability of the text so far", color: "--d5", shade: true }];
const readTens = chartSeries((tally) => [tally.logprobs.map((logprob) => logprob / Math.LN10)], { low: -1 });
const PLAIN = 6; // below this power of ten, odds are written in full

function TextProbability({ branch }) {
  const tally = tallyOf(branch);
  const tens = -tally.logprob / Math.LN10;
  const odds = tens < PLAIN ? count(Math.round(10 ** tens)) : html`<${Power} exponent=${Math.round(tens)} />`;
  const tosses = Math.round(-tally.logprob / Math.LN2);
  return html`<section class="cost" aria-labelledby="cost-chance">
    <h3 id="cost-chance">Probability of this text</h3>
    <${Figures} figures=${[
      ["probability", tens < 4 ? percent(10 ** -tens) : html`<${Power} exponent=${-Math.round(tens)} />`, "chance"],
      ["log probability", signedNats(tally.logprob), "logprob"],
      ["mean per token", percent(tally.typical), "typical"],
      ["perplexity", nats(tally.perplexity), "perplexity"],
    ]} />
    <${Chart} name="Probability of the text so far" lines=${LINES} format=${power} axis=${(tens) => (tens === 0 ? "1" : power(tens))}
      gist=${`The probability of the text falls with every token, to ${power(-tens)} after ${tally.length}.`}
      read=${readTens} />
    <p>This text had a probability of <b>1 in ${odds}</b>${tosses > 3 ? html`, as rare as ${count(tosses)} coin tosses that are all heads` : ""}.</p>
    <p class="quiet small">The product of the model's probabilities of its ${plural(tally.length, "token")}, before the sampling
      stages. The geometric mean per token is ${percent(tally.typical)}; the perplexity is its inverse.</p>
  </section>`;
}

// -- repetition, and what the loop guard rewound --------------------------------------------------------

const MAX_LISTED = 12; // repairs that are listed, the last ones
const SOME = 0.25, MUCH = 0.6; // from where on the gauge warns

function Repetition({ branch }) {
  const { loops } = tallyOf(branch);
  const share = loops.share();
  const level = share >= MUCH ? "much" : share >= SOME ? "some" : "little";
  return html`<section class="cost" aria-labelledby="cost-loops">
    <h3 id="cost-loops">Repetition</h3>
    <div class="loop-meter ${level}">
      <div class="loop-gauge" role="meter" aria-label="Loop meter" aria-valuemin="0" aria-valuemax="100"
        aria-valuenow=${Math.round(share * 100)} aria-valuetext="${Math.round(share * 100)} % of the last tokens repeat">
        <span style=${{ width: `${share * 100}%` }}></span></div>
      <b data-figure="loops">${percent(share)}</b>
    </div>
    <${Cells} loops=${loops} />
    <p>${repeatText(branch, loops, share)}</p>
    <p class="quiet small">Share of the last ${WINDOW} tokens whose 4-gram occurred before.</p>
    <div class="row">
      <${Switch} setting="guard" on="loop" off=${null} defaultValue=${null}>Guard against loops<//>
      <button class="button" disabled=${state.writing !== null || branch.recorded} onClick=${resumeWithGuard}>
        Continue with the guard</button>
    </div>
    <${Repairs} branch=${branch} />
  </section>`;
}

function resumeWithGuard() {
  updateSettings({ guard: "loop" });
  return resumeWriting();
}

/** The last tokens as cells; those that repeat are filled. */
function Cells({ loops }) {
  const from = Math.max(0, loops.repeats.length - WINDOW);
  let fresh = "", again = "";
  loops.repeats.slice(from).forEach((repeats, i) => {
    const cell = `M${i * 5} 0h4v10h-4z`;
    if (repeats) again += cell;
    else fresh += cell;
  });
  const many = loops.sums.at(-1) - loops.sums[from];
  return html`<svg class="loop-cells" viewBox="0 0 ${WINDOW * 5 - 1} 10" preserveAspectRatio="none" role="img"
    aria-label="Of the last ${plural(loops.repeats.length - from, "token")}, ${many} repeat."><path class="fresh" d=${fresh}/><path
    class="again" d=${again}/></svg>`;
}

function repeatText(branch, loops, share) {
  const { length, distance, times } = loops.tail();
  if (times > 1) {
    const words = branch.steps.slice(-distance).map((step) => step.piece).join("");
    return html`The text loops: the last ${distance === 1 ? "token" : `${distance} tokens`},${" "}
      <${Piece} text=${shortened(words)} />, came ${times} times in a row.`;
  }
  if (length) return `The last ${length} tokens occurred before, ${distance} tokens earlier.`;
  if (share >= SOME) return "Much of the end repeats earlier text.";
  return "The end of the text does not repeat itself.";
}

/** What the guard rewound: position, number of tokens, and the steps where they are known. */
function repairsOf(branch) {
  const retractions = branch.retracted.filter(({ verb }) => verb === "retract");
  const listed = new Set(retractions.map(({ at }) => at));
  const marked = branch.steps
    .filter((step) => step.retracts > 0 && !listed.has(step.index))
    .map((step) => ({ at: step.index, steps: [], count: step.retracts }));
  return [...marked, ...retractions.map(({ at, steps }) => ({ at, steps, count: steps.length }))];
}

function Repairs({ branch }) {
  const repairs = repairsOf(branch);
  const stopped = branch.finish_reason === "guard" ? branch.notes?.find((note) => note.startsWith("stopped:")) : null;
  if (!repairs.length) {
    return html`<p class="quiet small">In a loop, the guard rewinds the repeated tokens and samples another
      continuation. Nothing was rewound so far.</p>`;
  }
  const hidden = repairs.length - MAX_LISTED;
  return html`
    <p class="small">${plural(repairs.length, "repair")}${hidden > 0 ? `, of which the last ${MAX_LISTED} are listed` : ""}.
      ${" "}<span class="quiet">They are marked in the text; click one to see what replaced it.</span></p>
    <ol class="repairs" start=${Math.max(1, hidden + 1)}>
      ${repairs.slice(-MAX_LISTED).map((repair, k) => html`<li key=${Math.max(0, hidden) + k}><${Repair} branch=${branch} ...${repair} /></li>`)}
    </ol>
    ${stopped && html`<p class="small">The guard stopped the text: ${stopped.slice("stopped: ".length)}.</p>`}`;
}

function Repair({ branch, at, steps, count }) {
  const words = steps.map((step) => step.piece).join("");
  return html`<button class="repair" disabled=${at >= branch.steps.length}
    onClick=${() => selectToken(promptLength(branch) + at)}>
    <span class="quiet">token ${at + 1}, ${plural(count, "token")} rewound</span>
    ${words && html`<del>${shortened(words)}</del>`}</button>`;
}

const shortened = (words) => (words.length > 60 ? `${words.slice(0, 40)}…${words.slice(-18)}` : words);

// -- speculative decoding -------------------------------------------------------------------------------

/**
 * Accepted and rejected draft tokens of the last generation, as the server counts them. While it runs they are counted
 * from the steps, which show only the first rejected token of a draft.
 */
function draftsOf(branch) {
  const { last } = branch;
  if (state.writing?.branch !== branch.id && last?.drafted_tokens) {
    return { accepted: last.accepted_tokens, rejected: last.drafted_tokens - last.accepted_tokens };
  }
  const { drafts } = tallyOf(branch);
  const before = drafts[Math.min(branch.runs.at(-1)?.from ?? 0, drafts.length - 1)];
  const now = drafts.at(-1);
  return { accepted: now.accepted - before.accepted, rejected: now.rejected - before.rejected };
}

function Drafts({ branch }) {
  const { accepted, rejected } = draftsOf(branch);
  const all = accepted + rejected;
  const note = branch.notes?.findLast((text) => text.startsWith("drafting stopped"));
  return html`<section class="cost" aria-labelledby="cost-drafts">
    <h3 id="cost-drafts">Speculative decoding</h3>
    <${Switch} setting="speculate" on="lookup" off=${null} defaultValue=${null}>Prompt lookup<//>
    ${all > 0 && html`
      <${Figures} figures=${[
        ["accepted", html`<span class="accepted">${accepted}</span>`, "accepted"],
        ["rejected", html`<span class="rejected">${rejected}</span>`, "rejected"],
        ["acceptance rate", percent(accepted / all), "kept"],
      ]} />
      <svg class="draft-bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img"
        aria-label="Of ${plural(all, "draft token")}, ${accepted} were accepted and ${rejected} rejected.">
        <rect class="accepted" width=${(accepted / all) * 100} height="10" />
        <rect class="rejected" x=${(accepted / all) * 100} width=${(rejected / all) * 100} height="10" />
      </svg>`}
    ${note && html`<p class="quiet small">${note.charAt(0).toUpperCase() + note.slice(1)}.</p>`}
    <p class="quiet small">Where an n-gram repeats, the tokens that followed it before become a draft, which the model
      verifies in one pass. The text is the same with and without
      it.${all === 0 ? " The last generation had no draft tokens." : ""}</p>
  </section>`;
}

// -- the panel --------------------------------------------------------------------------------------------

export function CostsPanel() {
  useThrottledChanges("steps", "current", "writing", "branches", "settings", "costs");
  const branch = currentBranch();
  if (!branch || !branch.steps.length) {
    return html`<div class="costs"><p class="quiet">Generate a text to see its time, probability and repetition here.</p></div>`;
  }
  return html`<div class="costs">
    <h2 class="visually-hidden">Costs</h2>
    ${[Time, TextProbability, Repetition, Entropy, Drafts].map((Section) => html`<${Section} branch=${branch} />`)}
  </div>`;
}
