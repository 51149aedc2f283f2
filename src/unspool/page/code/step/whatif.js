// What if: other settings on the same step. The server answers while the sliders move.

import { count, html, percent, Piece, spelled, useMemo, useState } from "../lib.js";
import { choose, useSettings } from "../actions.js";
import { Fault } from "../asking.js";
import { FIELDS } from "../settings.js";
import { laid } from "./draw.js";
import { Line } from "./line.js";
import { finalists, huesOf, settingsOf } from "./stages.js";
import { useTried } from "./tried.js";

const SHOWN = 8; // compared in numbers
const SLIDERS = FIELDS.filter((field) => field.kind === "number");
const FIRST = 4; // sliders that are always shown: temperature, top-k, top-p, min-p
const OFF = { temperature: null, top_p: 1, typical_p: 1, repetition_penalty: 1 }; // of all others: 0

let isOpen = false; // stays as it was left, from token to token

export function WhatIf({ branch, step }) {
  const [moved, move] = useState({}); // stays as the person goes from token to token
  const [isNear, comeNear] = useState(false);
  const real = useMemo(() => settingsOf(branch, step), [branch, step]);
  const changes = Object.fromEntries(Object.entries(moved).filter(([name, value]) => value !== real[name]));
  const isMoved = Object.keys(changes).length > 0;
  // Asked for as soon as a hand comes near, so that the first move has something beside it.
  const was = useTried(branch, step, {}, isNear || isMoved);
  const would = useTried(branch, step, changes, isMoved);
  if (branch.recorded) return null;
  const { made, fault, again } = isMoved ? would : was;
  const write = () => {
    useSettings(Object.fromEntries(SLIDERS.map(({ name, usual }) => [name, changes[name] ?? real[name] ?? usual])));
    choose(step.position, { token: made.token });
  };
  const come = () => comeNear(true);
  const slider = (field) => html`<${Slider} key=${field.name} field=${field} was=${real[field.name] ?? field.usual}
    value=${changes[field.name] ?? real[field.name] ?? field.usual}
    set=${(value) => move({ ...moved, [field.name]: value })} />`;
  const isOn = ({ name, usual }) => name in changes || (real[name] ?? usual) !== usual;
  const toggled = (event) => {
    if (event.target === event.currentTarget) isOpen = event.target.open;
  };
  return html`<details class="step-whatif" open=${isOpen} onToggle=${toggled} onPointerEnter=${come}
    onPointerDown=${come} onFocusIn=${come} onPointerLeave=${() => comeNear(false)}>
    <summary><h3 id="step-whatif">What if the settings were others?</h3></summary>
    <section class="step-settings" aria-labelledby="step-whatif">
    <p class="quiet small">Other settings, on this very token. The text stays as it is while you move.</p>
    <div class="step-sliders">${SLIDERS.slice(0, FIRST).map(slider)}
      <details open=${SLIDERS.slice(FIRST).some(isOn)}><summary class="small">More filters</summary>
        ${SLIDERS.slice(FIRST).map(slider)}</details>
    </div>
    <${Fault} fault=${fault} again=${again} />
    ${made && !fault && html`<${Outcome} step=${step} made=${made} was=${was.made ?? step} />`}
    ${isMoved && html`<div class="row">
      <button class="button main" disabled=${!made || !would.fresh} onClick=${write}>Write on like this</button>
      <button class="button" onClick=${() => move({})}>Reset</button>
    </div>`}
    </section>
  </details>`;
}

function Slider({ field: { name, title, least, most, step }, value, was, set }) {
  const id = `whatif-${name}`;
  const told = (x) => (name === "temperature" && x === 0 ? "0, greedy" : x === (OFF[name] ?? 0) ? "off"
    : x.toFixed(step < 1 ? 2 : 0));
  return html`<div class="step-slider">
    <label for=${id}>${title}</label>
    <input id=${id} type="range" min=${least} max=${most} step=${step} value=${value} aria-valuetext=${told(value)}
      onInput=${(event) => set(event.target.valueAsNumber)} />
    <output for=${id}>${told(value)}${value !== was && html`<small class="quiet"> was ${told(was)}</small>`}</output>
  </div>`;
}

function Outcome({ step, made, was }) {
  const hues = huesOf(step, made.candidates);
  const label = `With these settings ${spelled(made.piece)} is picked.`;
  return html`<div class="step-outcome" data-token=${made.token}>
    <p class="small">
      <b>${count(made.stages.at(-1)?.kept)} left.</b>${" "}<${Verdict} step=${step} made=${made} />
    </p>
    <${Line} parts=${laid(made, hues)} u=${made.draw?.u ?? null} hit=${made.token} label=${label} id="still" />
    <${Compared} made=${made} was=${was} hues=${hues} />
  </div>`;
}

function Verdict({ step, made }) {
  const isSame = made.token === step.token;
  const piece = html`<${Piece} text=${made.piece} />`;
  if (made.draw === null) return html`The likeliest is taken: ${piece}${isSame ? ", as it was." : "."}`;
  const number = html`<span class="mono">u = ${made.draw.u.toFixed(4)}</span>`;
  // A step that drew nothing still has a number, by its seed and position.
  const which = step.draw ? html`The same ${number}` : html`The number of this place, ${number},`;
  return html`${which} ${isSame ? "falls on" : "would have picked"} ${piece}${isSame ? " again." : " instead."}`;
}

/** The chances that were, beside those that would be. */
function Compared({ made, was, hues }) {
  const [before, now] = [was, made].map((one) => new Map(finalists(one).map((each) => [each.token, each])));
  const rows = [...new Map([...before, ...now]).values()]
    .map(({ token, text }) => ({
      token, text, old: before.get(token)?.probability ?? 0, now: now.get(token)?.probability ?? 0,
    }))
    .sort((a, b) => Math.max(b.old, b.now) - Math.max(a.old, a.now))
    .slice(0, SHOWN);
  const most = Math.max(...rows.map((row) => Math.max(row.old, row.now)));
  const width = (share) => ({ width: `${(100 * share) / most}%` });
  return html`<table class="step-compared">
    <thead><tr><th scope="col">token</th><td></td><th scope="col">was</th><th scope="col">would be</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${row.token} data-token=${row.token}
      class="${hues.get(row.token) ?? "hue-0"} ${row.token === made.token ? "picked" : ""} ${row.now ? "" : "removed"}">
      <th scope="row"><${Piece} text=${row.text} /></th>
      <td><div class="track"><span class="own" style=${width(row.old)}></span><span class="after"
        style=${width(row.now)}></span></div></td>
      <td class="number">${percent(row.old)}</td><td class="number strong">${percent(row.now)}</td>
    </tr>`)}</tbody>
  </table>`;
}
