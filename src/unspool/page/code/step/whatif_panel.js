// What if: other settings on the same step, worked out here while the sliders move.

import { count, html, percent, Piece, spelled, useMemo, useState } from "../lib.js";
import { choose, useSettings } from "../actions.js";
import { useAlternatives } from "./alternatives.js";
import { Line } from "./line.js";
import { besides, editsOf, finalists, huesOf, settingsOf, stageName } from "./stages.js";
import { uniform } from "./uniform.js";
import { SIMULATED, startAfter, startOf, whatIf } from "./whatif.js";

const SHOWN = 8; // compared in numbers
const NAMED = 60; // on the line; those behind are too thin to be seen
const STEPS_OF_K = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 0];

const SLIDERS = [
  { name: "temperature", title: "Temperature", least: 0, most: 2, by: 0.05,
    told: (t) => (t === 0 ? "0, greedy" : t.toFixed(2)) },
  { name: "top_k", title: "Top-k", told: (k) => (k === 0 ? "off" : count(k)) },
  { name: "top_p", title: "Top-p", least: 0, most: 1, by: 0.01, told: (p) => (p === 1 ? "off" : p.toFixed(2)) },
  { name: "min_p", title: "Min-p", least: 0, most: 0.5, by: 0.005, told: (p) => (p === 0 ? "off" : p.toFixed(3)) },
];

export function WhatIf({ branch, step }) {
  const [moved, move] = useState({}); // stays as the person goes from token to token
  const [isNear, comeNear] = useState(false);
  const real = useMemo(() => settingsOf(branch, step), [branch, step]);
  const wished = { ...real, ...moved };
  const isMoved = SIMULATED.some((name) => wished[name] !== real[name]);
  // Asked for as soon as a hand comes near, so that the first move shows something at once.
  const { found, fault } = useAlternatives(branch, step, isNear || isMoved);
  const start = useMemo(() => found && startingPoint(step, found), [step, found]);
  if (branch.recorded) return null;
  const u = step.draw?.u ?? uniform(branch.seed, branch.settings.sample ?? 0, step.position);
  const made = start && whatIf(start, wished, u);
  const write = () => {
    useSettings(Object.fromEntries(SIMULATED.map((name) => [name, wished[name]])));
    choose(step.position, { token: made.pick.token });
  };
  const come = () => comeNear(true);
  return html`<section class="step-part" aria-labelledby="step-whatif" onPointerEnter=${come}
    onPointerDown=${come} onFocusIn=${come} onPointerLeave=${() => comeNear(false)}>
    <h3 id="step-whatif"><i aria-hidden="true">?</i> What if</h3>
    <p class="quiet small">Other settings, on this very token. Nothing is run again while you move.</p>
    <div class="step-sliders">
      ${SLIDERS.map((slider) => html`<${Slider} key=${slider.name} slider=${slider} was=${real[slider.name]}
        value=${wished[slider.name]} set=${(value) => move({ ...moved, [slider.name]: value })} />`)}
    </div>
    ${fault && html`<p class="small step-fault" role="alert">${fault.message}</p>`}
    ${isMoved && !found && !fault && html`<p class="quiet small">Asking the model once …</p>`}
    ${made && html`<${Outcome} step=${step} made=${made} u=${wished.temperature === 0 ? null : u}
      was=${wasOf(step, start, real)} real=${real} size=${start.candidates.length + start.rest.tokens} />`}
    ${isMoved && html`<div class="row">
      <button class="button main" disabled=${!made?.pick} onClick=${write}>Write on like this</button>
      <button class="button" onClick=${() => move({})}>Reset</button>
    </div>`}
  </section>`;
}

function Slider({ slider: { name, title, least, most, by, told }, value, was, set }) {
  const id = `whatif-${name}`;
  const isK = name === "top_k";
  const counts = STEPS_OF_K.includes(was) ? STEPS_OF_K : [...STEPS_OF_K.slice(0, -1), was, 0];
  const range = isK
    ? { min: 0, max: counts.length - 1, step: 1, value: counts.indexOf(value) }
    : { min: least, max: most, step: by, value };
  const read = (event) => set(isK ? counts[event.target.valueAsNumber] : event.target.valueAsNumber);
  return html`<div class="step-slider">
    <label for=${id}>${title}</label>
    <input id=${id} type="range" ...${range} aria-valuetext=${told(value)} onInput=${read} />
    <output for=${id}>${told(value)}${value !== was && html`<small class="quiet"> was ${told(was)}</small>`}</output>
  </div>`;
}

function Outcome({ step, made, u, was, real, size }) {
  const hues = huesOf(step, made.candidates);
  const hueOf = (token) => hues.get(token) ?? "hue-0";
  const parts = made.candidates.slice(0, NAMED).map((one) => ({ ...one, hue: hueOf(one.token) }));
  const label = `With these settings ${made.pick ? spelled(made.pick.text) : "another token"} is picked.`;
  return html`<div class="step-outcome">
    <p class="small">
      <b>${count(made.stages.at(-1)?.kept ?? size)} left.</b>${" "}<${Verdict} step=${step} made=${made} u=${u} />
    </p>
    <${Line} parts=${parts} u=${u} hit=${made.pick?.token} label=${label} id="still" />
    <${Compared} made=${made} was=${was} hueOf=${hueOf} />
    ${caveats(step, made, real).map((words) => html`<p key=${words} class="quiet small">${words}</p>`)}
  </div>`;
}

function Verdict({ step, made, u }) {
  const number = u !== null && html`<span class="mono">u = ${u.toFixed(4)}</span>`;
  if (!made.pick) {
    return html`${number} falls on one of the unlikely many beyond the ${count(made.candidates.length)} known here.`;
  }
  const isSame = made.pick.token === step.token;
  const piece = html`<${Piece} text=${made.pick.text} />`;
  if (u === null) return html`The likeliest is taken: ${piece}${isSame ? ", as it was." : "."}`;
  // A step that drew nothing still has a number, by its seed and position.
  const which = step.draw ? html`The same ${number}` : html`The number of this place, ${number},`;
  return html`${which} ${isSame ? "falls on" : "would have picked"} ${piece}${isSame ? " again." : " instead."}`;
}

/** The chances that were, beside those that would be. */
function Compared({ made, was, hueOf }) {
  const would = new Map(made.candidates.map((one) => [one.token, one]));
  const texts = new Map([...was, ...would].map(([token, one]) => [token, one.text]));
  const rows = [...texts.keys()]
    .map((token) => ({ token, old: was.get(token)?.probability ?? 0, now: would.get(token)?.probability ?? 0 }))
    .sort((a, b) => Math.max(b.old, b.now) - Math.max(a.old, a.now))
    .slice(0, SHOWN);
  const most = Math.max(...rows.map(({ old, now }) => Math.max(old, now)));
  const width = (share) => ({ width: `${(100 * share) / most}%` });
  return html`<table class="step-compared">
    <thead><tr><th scope="col">token</th><td></td><th scope="col">was</th><th scope="col">would be</th></tr></thead>
    <tbody>${rows.map(({ token, old, now }) => html`<tr key=${token} data-token=${token}
      class="${hueOf(token)} ${token === made.pick?.token ? "picked" : ""} ${now === 0 ? "removed" : ""}">
      <th scope="row"><${Piece} text=${texts.get(token)} /></th>
      <td><div class="track"><span class="own" style=${width(old)}></span><span class="after"
        style=${width(now)}></span></div></td>
      <td class="number">${percent(old)}</td><td class="number strong">${percent(now)}</td>
    </tr>`)}</tbody>
  </table>`;
}

/** What stages that change single tokens did is taken from the step; they come before all others. */
function startingPoint(step, found) {
  const start = startOf(found);
  const edits = editsOf(step);
  return edits.length ? startAfter(start, edits.at(-1)) : start;
}

/** The distribution that really was: as the step tells it, and worked out where it tells nothing. */
function wasOf(step, start, real) {
  const guessed = besides(real).length && !step.chosen ? [] : whatIf(start, real).candidates;
  return new Map([...guessed, ...step.candidates, ...finalists(step)].map((one) => [one.token, one]));
}

function caveats(step, made, real) {
  const edits = editsOf(step).map(({ name }) => name);
  const others = besides(real).filter((name) => !edits.includes(name));
  const listed = (names) => names.map(stageName).join(", ");
  const said = [];
  if (edits.length) {
    said.push(`What ${listed(edits)} changed is taken over for the likeliest few; for others it is a guess.`);
  }
  if (others.length) said.push(`Also on, but left out here: ${listed(others)}.`);
  if (!made.exact) said.push("A filter cuts among the unlikely many; their numbers are a close guess.");
  return said;
}
