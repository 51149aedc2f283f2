// The Step panel: one token, its candidates, the sampling stages, the draw, and other settings on the same step.

import { chooseToken, updateSettings } from "../actions.js";
import { api } from "../api.js";
import {
  count, duration, html, nats, ordinal, percent, Piece, plural, RequestError, useChanges, useMemo, useRequest,
  useState, visibleText,
} from "../lib.js";
import { FIELDS } from "../settings.js";
import { currentBranch, modelOf, promptLength, state, stepAt, tokenAt } from "../state.js";
import { finalists, huesOf, ProbabilityLine, removedBy, settingsOf, StageChain, stageName } from "./stages.js";

const MAX_CANDIDATES = 100; // that the server sends
const WAIT = 40; // ms: no requests while the pointer passes over tokens or a slider moves

/** The settings of the request that generated this step. */
const settingsSentFor = (branch, step) => branch.runs?.findLast(({ from }) => from <= step.index)?.settings ?? {};

/** The step with `changes` to its settings, sampled again by the server: `{result, fault, fresh, again}`. */
function useWhatIf(branch, step, changes, isNeeded) {
  const body = { ...settingsSentFor(branch, step), ...changes, at: step.index, top: MAX_CANDIDATES };
  const ask = isNeeded && !branch.recorded // a recorded branch is not on the server
    ? async (signal) => ({ of: step, ...await api.post(`/v1/tree/${branch.id}/try`, body, { signal }) })
    : null;
  const { answer, ...status } = useRequest(ask, WAIT, [branch.id, step.token, body]);
  return { result: answer?.of === step ? answer.step : null, ...status };
}

// -- summary and figures ------------------------------------------------------------------------

/** How the token was generated, in one sentence. */
function Summary({ step, size }) {
  if (step.chosen) {
    return html`<p class="step-story"><span class="chip step-mine">chosen by you</span>${" "}
      Not sampled by the model; these are the candidates it had.</p>`;
  }
  const numLeft = step.stages.at(-1)?.kept ?? size;
  const vocabulary = html`<b>${count(size)} tokens</b> in the vocabulary`;
  const end = step.draw === null
    ? html`${vocabulary}; greedy: the <b>most likely</b> was taken.`
    : html`${vocabulary}, <b>${numLeft === size ? "all" : count(numLeft)}</b> left after the sampling
        stages;${" "}<${Piece} text=${step.piece} /> was <b>sampled</b>.`;
  return html`<p class="step-story">${end}${draftChip(step.draft)}</p>`;
}

function draftChip(draft) {
  if (draft === "accepted") return html` <span class="chip">draft token, accepted</span>`;
  if (draft === "rejected") return html` <span class="chip">a draft token was rejected here</span>`;
  return null;
}

function Facts({ step, size }) {
  const surprisal = step.logprob === null ? null : -step.logprob;
  const bits = surprisal === null ? "∞" : nats(surprisal / Math.LN2);
  return html`
    <dl class="step-facts">
      <${Fact} name="surprisal" value=${surprisal === null ? "∞" : nats(surprisal)} unit="nats"
        detail="${bits} bits" hint="−log of the probability that the model gave this token" />
      <${Fact} name="entropy" value=${nats(step.entropy)} unit="nats"
        detail=${choices(step.entropy)}
        hint="Entropy of the model's distribution at this position" />
      <${Fact} name="rank" value=${ordinal(step.rank + 1)} detail="of ${count(size)}"
        hint="Rank of the token by the model's probability" />
      <${Fact} name="time" value=${step.chosen ? "–" : duration(step.seconds)}
        detail=${step.chosen ? "not sampled" : "for this token"} hint="Time of this step" />
    </dl>
    <p class="quiet small step-bytes">
      Token ${count(step.token)} at position ${count(step.position)}, ${bytesText(step.bytes)}.
    </p>
  `;
}

function Fact({ name, value, unit, detail, hint }) {
  return html`<div title=${hint}>
    <dt>${name}</dt>
    <dd><b>${value}</b>${unit && html` <small>${unit}</small>`}<span class="quiet">${detail}</span></dd>
  </div>`;
}

/** exp(entropy): the number of equally likely tokens with the same entropy. */
function choices(entropy) {
  if (entropy === null) return "";
  const spread = Number(Math.exp(entropy).toPrecision(2));
  return spread === 1 ? "as 1 choice" : `as ${count(spread)} equal choices`;
}

function bytesText(bytes) {
  if (!bytes.length) return "a special token, without bytes";
  const hex = bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  const number = bytes.length === 1 ? "1 byte" : `${bytes.length} bytes`;
  return html`${number} <span class="mono">${hex}</span>${isValidUtf8(bytes) ? "" : ", part of a character"}`;
}

function isValidUtf8(bytes) {
  try {
    new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
    return true;
  } catch {
    return false;
  }
}

// -- the draw -----------------------------------------------------------------------------------

function Draw({ step }) {
  const { draw } = step;
  return html`<section class="step-part" aria-labelledby="step-drawn">
    <h3 id="step-drawn"><i aria-hidden="true">3</i> Sampled token</h3>
    ${draw === null
      ? html`<p class="quiet small">Greedy (temperature 0): the most likely token is always taken.</p>`
      : html`<${DrawDetails} step=${step} />`}
  </section>`;
}

function DrawDetails({ step }) {
  const { u, low, high } = step.draw;
  const parts = segmentsOf(step);
  const label = `A line from 0 to 1. The random number ${u.toFixed(4)} falls on ${visibleText(step.piece)}, `
    + `which covers ${low.toFixed(4)} to ${high.toFixed(4)}.`;
  return html`
    <p class="quiet small">The remaining candidates end to end, each as wide as its probability. A random number
      from 0 to 1 selects one.</p>
    <${ProbabilityLine} parts=${parts} u=${u} hit=${step.token} label=${label} id=${`${step.position}:${u}:${step.token}`} />
    <p class="small"><span class="mono">u = ${u.toFixed(4)}</span> fell on <${Piece} text=${step.piece} />, which
      covers ${low.toFixed(4)} to ${high.toFixed(4)}: probability ${percent(step.probability)}.</p>
  `;
}

/** The same as a small picture, for the head of the panel. */
function DrawPreview({ step }) {
  if (step.draw === null) return null;
  return html`<svg class="step-glance" aria-hidden="true" viewBox="0 0 1000 20" preserveAspectRatio="none">
    ${segmentsOf(step).map(({ token, low, high, hue }) => html`<rect key=${token} x=${1000 * low} y="8" height="12"
      class="${hue} ${token === step.token ? "hit" : ""}" width=${Math.max(1, 1000 * (high - low) - 3)} />`)}
    <rect class="mark" x=${1000 * step.draw.u - 2} y="0" width="5" height="20" />
  </svg>`;
}

/** Candidates as segments of the line from 0 to 1; the sampled one where the server reports it. */
function segmentsOf(step, hues = huesOf(step)) {
  let at = 0;
  const parts = [];
  for (const { token, text, probability } of finalists(step)) {
    if (token !== step.token) parts.push({ token, text, low: at, high: at + probability, hue: hues.get(token) });
    at += probability;
  }
  const { low, high } = step.draw ?? { low: 0, high: 1 }; // greedy: the whole line
  parts.push({ token: step.token, text: step.piece, low, high, hue: hues.get(step.token) ?? "hue-0" });
  return parts;
}

// -- candidate tokens ---------------------------------------------------------------------------

/** The step whose candidates to show: this one, or the step of the parent branch that it replaced. */
function stepWithCandidates(branch, step) {
  if (step.candidates.length) return step;
  const parent = step.index === branch.forked_at ? state.branches.get(branch.parent) : null;
  const before = parent?.steps[step.index];
  return before ? stepWithCandidates(parent, before) : step;
}

function Candidates({ branch, step, isSelected }) {
  const [longFor, showLong] = useState(null); // the step whose long list is open
  const showsAll = longFor === step;
  const weighed = stepWithCandidates(branch, step);
  const isBare = weighed.candidates.length === 0; // chosen by the user: no candidates were recorded
  const { result, fault, again } = useWhatIf(branch, step, {}, showsAll || (isBare && isSelected));
  const source = (showsAll || isBare) && result ? result : weighed;
  const hues = huesOf({ ...weighed, token: step.token }, result?.candidates);
  const rows = showsAll ? source.candidates : source.candidates.slice(0, 12);
  const most = Math.max(...rows.map((candidate) => Math.max(Math.exp(candidate.logprob), candidate.probability ?? 0)), 0.01);
  return html`<section class="step-part" aria-labelledby="step-weighed">
    <h3 id="step-weighed"><i aria-hidden="true">1</i> Candidate tokens</h3>
    <p class="quiet small">
      ${source.stages.length > 0 && "Pale: the model’s probability. Strong: after the sampling stages. "}
      ${branch.recorded ? "This text is a recording and cannot be edited." : "Click one to continue with it."}
    </p>
    <ol class="step-candidates ${showsAll ? "long" : ""}">
      ${rows.map((candidate, rank) => html`<${Candidate} key=${candidate.token} candidate=${candidate} rank=${rank} step=${step}
        stages=${source.stages} isFixed=${branch.recorded} most=${most} hue=${hues.get(candidate.token) ?? "hue-0"} />`)}
    </ol>
    <${RequestError} fault=${fault} again=${again} />
    ${!branch.recorded && html`<div class="row step-pens">
      <${CustomText} step=${step} />
      <button class="button" aria-expanded=${showsAll}
        onClick=${() => showLong(showsAll ? null : step)}>${showsAll ? "Fewer" : "More"}</button>
    </div>`}
  </section>`;
}

function Candidate({ candidate, rank, step, stages, isFixed, most, hue }) {
  const modelProbability = Math.exp(candidate.logprob ?? -Infinity);
  const isPicked = candidate.token === step.token;
  const stage = candidate.probability > 0 ? null : removedBy(candidate.token, rank, stages);
  const hasAfter = candidate.probability !== null && stages.length > 0;
  const after = stage ? stageName(stage) : hasAfter ? percent(candidate.probability) : "";
  const label = `Continue with ${visibleText(candidate.text)}: model ${percent(modelProbability)}${
    stage ? `, removed by ${stageName(stage)}` : after && `, ${after} after the sampling stages`}${
    isPicked ? ", sampled" : ""}`;
  const width = (share) => ({ width: `${(100 * share) / most}%` });
  return html`<li>
    <button class="candidate ${hue} ${isPicked ? "picked" : ""} ${stage ? "removed" : ""}" data-token=${candidate.token}
      disabled=${isFixed} aria-label=${label} title=${label}
      onClick=${() => chooseToken(step.position, { token: candidate.token })}>
      <${Piece} text=${candidate.text} />
      <span class="track"><span class="own" style=${width(modelProbability)}></span>${
        hasAfter && html`<span class="after" style=${width(candidate.probability)}></span>`}</span>
      <span class="number">${percent(modelProbability)}</span>
      <span class="number ${stage ? "gone" : "strong"}">${after}</span>
    </button>
  </li>`;
}

function CustomText({ step }) {
  const [words, setWords] = useState("");
  // Inside a sentence, the space before a word is part of its token.
  const text = /^\s/.test(step.piece) && /^[\p{L}\p{N}]/u.test(words) ? ` ${words}` : words;
  const send = (event) => {
    event.preventDefault();
    if (!words) return;
    setWords("");
    chooseToken(step.position, { text });
  };
  return html`<form class="step-words" onSubmit=${send}>
    <input type="text" aria-label="Your own text at this position" placeholder="or type your own text"
      value=${words} onInput=${(event) => setWords(event.target.value)} autocomplete="off" />
    ${words && html`<span class="quiet small" aria-live="polite">Enter inserts <${Piece} text=${text} /></span>`}
  </form>`;
}

// -- other settings on the same step --------------------------------------------------------------

const MAX_COMPARED = 8; // compared in numbers
const SLIDERS = FIELDS.filter((field) => field.kind === "number");
const NUM_MAIN_SLIDERS = 4; // sliders that are always shown: temperature, top-k, top-p, min-p
const OFF = { temperature: null, top_p: 1, typical_p: 1, repetition_penalty: 1 }; // of all others: 0

let isOpen = false; // remembered from token to token

function WhatIf({ branch, step }) {
  const [moved, move] = useState({}); // remembered from token to token
  const [isNear, comeNear] = useState(false);
  const real = useMemo(() => settingsOf(branch, step), [branch, step]);
  const changes = Object.fromEntries(Object.entries(moved).filter(([name, value]) => value !== real[name]));
  const isMoved = Object.keys(changes).length > 0;
  // Requested when the pointer comes near, so that the first move of a slider has a comparison.
  const was = useWhatIf(branch, step, {}, isNear || isMoved);
  const would = useWhatIf(branch, step, changes, isMoved);
  if (branch.recorded) return null;
  const { result, fault, again } = isMoved ? would : was;
  const write = () => {
    updateSettings(Object.fromEntries(SLIDERS.map(({ name, defaultValue }) => [name, changes[name] ?? real[name] ?? defaultValue])));
    chooseToken(step.position, { token: result.token });
  };
  const come = () => comeNear(true);
  const slider = (field) => html`<${Slider} key=${field.name} field=${field} was=${real[field.name] ?? field.defaultValue}
    value=${changes[field.name] ?? real[field.name] ?? field.defaultValue}
    set=${(value) => move({ ...moved, [field.name]: value })} />`;
  const isOn = ({ name, defaultValue }) => name in changes || (real[name] ?? defaultValue) !== defaultValue;
  const toggled = (event) => {
    if (event.target === event.currentTarget) isOpen = event.target.open;
  };
  return html`<details class="step-whatif" open=${isOpen} onToggle=${toggled} onPointerEnter=${come}
    onPointerDown=${come} onFocusIn=${come} onPointerLeave=${() => comeNear(false)}>
    <summary><h3 id="step-whatif">Try other settings</h3></summary>
    <section class="step-settings" aria-labelledby="step-whatif">
    <p class="quiet small">Sample this token again with other settings and the same random number. The text does not change.</p>
    <div class="step-sliders">${SLIDERS.slice(0, NUM_MAIN_SLIDERS).map(slider)}
      <details open=${SLIDERS.slice(NUM_MAIN_SLIDERS).some(isOn)}><summary class="small">More stages</summary>
        ${SLIDERS.slice(NUM_MAIN_SLIDERS).map(slider)}</details>
    </div>
    <${RequestError} fault=${fault} again=${again} />
    ${result && !fault && html`<${Outcome} step=${step} result=${result} was=${was.result ?? step} />`}
    ${isMoved && html`<div class="row">
      <button class="button main" disabled=${!result || !would.fresh} onClick=${write}>Continue with these settings</button>
      <button class="button" onClick=${() => move({})}>Reset</button>
    </div>`}
    </section>
  </details>`;
}

function Slider({ field: { name, title, min, max, step }, value, was, set }) {
  const id = `whatif-${name}`;
  const valueText = (x) => (name === "temperature" && x === 0 ? "0, greedy" : x === (OFF[name] ?? 0) ? "off"
    : x.toFixed(step < 1 ? 2 : 0));
  return html`<div class="step-slider">
    <label for=${id}>${title}</label>
    <input id=${id} type="range" min=${min} max=${max} step=${step} value=${value} aria-valuetext=${valueText(value)}
      onInput=${(event) => set(event.target.valueAsNumber)} />
    <output for=${id}>${valueText(value)}${value !== was && html`<small class="quiet"> was ${valueText(was)}</small>`}</output>
  </div>`;
}

function Outcome({ step, result, was }) {
  const hues = huesOf(step, result.candidates);
  const label = `With these settings ${visibleText(result.piece)} is sampled.`;
  return html`<div class="step-outcome" data-token=${result.token}>
    <p class="small">
      <b>${count(result.stages.at(-1)?.kept)} left.</b>${" "}<${Verdict} step=${step} result=${result} />
    </p>
    <${ProbabilityLine} parts=${segmentsOf(result, hues)} u=${result.draw?.u ?? null} hit=${result.token} label=${label} id="still" />
    <${ComparedTable} result=${result} was=${was} hues=${hues} />
  </div>`;
}

function Verdict({ step, result }) {
  const isSame = result.token === step.token;
  const piece = html`<${Piece} text=${result.piece} />`;
  if (result.draw === null) return html`Greedy: ${piece}${isSame ? ", the same token." : "."}`;
  const number = html`<span class="mono">u = ${result.draw.u.toFixed(4)}</span>`;
  // A greedy step has a random number too, by its seed and position.
  const which = step.draw ? html`The same ${number}` : html`The random number of this position, ${number},`;
  return html`${which} ${isSame ? "selects" : "would have selected"} ${piece}${isSame ? " again." : " instead."}`;
}

/** Probabilities with the old settings, beside those with the new ones. */
function ComparedTable({ result, was, hues }) {
  const [before, now] = [was, result].map((source) => new Map(finalists(source).map((candidate) => [candidate.token, candidate])));
  const rows = [...new Map([...before, ...now]).values()]
    .map(({ token, text }) => ({
      token, text, old: before.get(token)?.probability ?? 0, now: now.get(token)?.probability ?? 0,
    }))
    .sort((a, b) => Math.max(b.old, b.now) - Math.max(a.old, a.now))
    .slice(0, MAX_COMPARED);
  const most = Math.max(...rows.map((row) => Math.max(row.old, row.now)));
  const width = (share) => ({ width: `${(100 * share) / most}%` });
  return html`<table class="step-compared">
    <thead><tr><th scope="col">token</th><td></td><th scope="col">before</th><th scope="col">now</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.token} data-token=${row.token}
      class="${hues.get(row.token) ?? "hue-0"} ${row.token === result.token ? "picked" : ""} ${row.now ? "" : "removed"}">
      <th scope="row"><${Piece} text=${row.text} /></th>
      <td><div class="track"><span class="own" style=${width(row.old)}></span><span class="after"
        style=${width(row.now)}></span></div></td>
      <td class="number">${percent(row.old)}</td><td class="number strong">${percent(row.now)}</td>
    </tr>`)}</tbody>
  </table>`;
}

// -- the panel ----------------------------------------------------------------------------------

export function StepPanel() {
  useChanges("selection", "hover", "current", "steps");
  const branch = currentBranch();
  const position = state.hovered ?? state.selected;
  const step = position === null ? null : stepAt(branch, position);
  const token = branch && position !== null ? tokenAt(branch, position) : null;
  const isSelected = position === state.selected;
  // While a text streams this runs every frame: reuse what did not change.
  const content = useMemo(() => {
    if (step) return html`<${Step} branch=${branch} step=${step} isSelected=${isSelected} />`;
    if (token) return html`<${PromptToken} token=${token} position=${position} />`;
    return html`<${Hint} />`;
  }, [branch, step, token?.id, token?.added, position, isSelected]);
  return html`<div class="step-panel">
    <${EditNote} branch=${branch} />
    ${content}
  </div>`;
}

function Step({ branch, step, isSelected }) {
  const size = modelOf(branch)?.unspool.vocabulary ?? 0;
  return html`
    <header class="step-head">
      <h2 class="step-token"><${Piece} text=${step.piece} /></h2>
      <${Summary} step=${step} size=${size} />
      <${DrawPreview} step=${step} />
    </header>
    <${Facts} step=${step} size=${size} />
    <${WhatIf} branch=${branch} step=${step} />
    <${Candidates} branch=${branch} step=${step} isSelected=${isSelected} />
    ${step.stages.length > 0 && html`<${StageChain} branch=${branch} step=${step} size=${size} />`}
    ${!step.chosen && html`<${Draw} step=${step} />`}
  `;
}

function PromptToken({ token, position }) {
  return html`
    <header class="step-head">
      <h2 class="step-token"><${Piece} text=${token.text} /></h2>
      <p class="step-story">${token.added
        ? "Added by the chat template."
        : "Part of your prompt: not sampled."}</p>
    </header>
    <p class="quiet small">Token ${count(token.id)} at position ${count(position)}.</p>
  `;
}

function Hint() {
  return html`<div class="step-hint">
    <p>Point at a generated token, or click it.</p>
    <p class="quiet">You will see its candidate tokens, what each sampling stage removed, and how one was sampled.
      Click another candidate to continue from there.</p>
  </div>`;
}

/** What it cost to continue from an edited token. */
function EditNote({ branch }) {
  if (!branch?.isFromChoice) return null;
  const { last } = branch;
  if (!last) {
    const isWritten = state.writing?.branch === branch.id;
    return isWritten && html`<p class="step-pen small" role="status">Your edit: generating from there …</p>`;
  }
  // Only for the first generation after the edit: later ones reuse everything.
  const firstWritten = branch.steps.slice(branch.forked_at).findIndex((step) => !step.chosen);
  if (firstWritten < 0 || last.tokens_before > promptLength(branch) + branch.forked_at + firstWritten) return null;
  const { reused_tokens: reused, tokens_before: before, first_token_seconds: first } = last;
  return html`<p class="step-pen small" role="status">
    Your edit: <b>${plural(reused, "token")} of ${count(before)}</b> reused from the KV cache. Time to first token
    ${" "}<b>${duration(first)}</b>.
  </p>`;
}
