// One place of the canvas: what could stand there, and the person's own hand.

import { html, percent, Piece, plural, useState } from "../lib.js";
import { change, goOnFromHere, isWriting, passNow, placesAfter, put, putWords, twins } from "./runs.js";
import { withHand } from "./looks.js";

export function PlacePanel() {
  const { place: number, hand, right } = twins;
  const open = number === null ? null : withHand(placesAfter(passNow())[number]);
  const isBehind = passNow() < right.passes.length;
  const canGo = !isWriting() && (hand.size > 0 || isBehind || right.done?.finish_reason === "interrupted");
  return html`<div class="stack twins-hand">
    ${open && html`<${Candidates} place=${open} key=${number} />`}
    ${(canGo || hand.size > 0) && html`<div class="row">
      <button class="button main" id="twins-go-on" disabled=${!canGo} onClick=${goOnFromHere}>Go on from here</button>
      ${hand.size > 0 && html`<span class="small">${plural(hand.size, "place")} changed by hand</span>
        <button class="button tiny" onClick=${() => change({ hand: new Map() })}>Take that back</button>`}</div>`}
    ${!open && !hand.size && html`<p class="quiet small">Choose a place to see what could stand there, and to set or clear it by hand.</p>`}
  </div>`;
}

function Candidates({ place }) {
  const { number, token, candidates = [] } = place;
  const [words, setWords] = useState("");
  const [fault, setFault] = useState(null);
  const most = Math.max(...candidates.map(({ probability }) => probability ?? 0), 1e-9);
  const submit = async (event) => {
    event.preventDefault();
    if (!words) return;
    try {
      await putWords(number, words);
      setWords("");
      setFault(null);
    } catch (error) {
      setFault(error.message);
    }
  };
  return html`<div class="panel stack twins-place" role="group" aria-label=${`Place ${number + 1}`}>
    <div class="row spread"><h4>Place ${number + 1}</h4>
      <button class="button tiny" id="twins-clear" disabled=${token === null} onClick=${() => put(number, [null])}>Clear it</button></div>
    ${candidates.length === 0 && html`<p class="quiet small">Nothing is guessed here yet.</p>`}
    <ul class="twins-candidates">${candidates.map((one) => html`<li key=${one.token}>
      <button aria-pressed=${one.token === token} onClick=${() => put(number, [{ token: one.token, text: one.text }])}>
        <${Piece} text=${one.text} /><span class="track" aria-hidden="true"><span style=${{ width: `${((one.probability ?? 0) / most) * 100}%` }} /></span>
        <span class="twins-chance">${percent(one.probability)}</span></button></li>`)}</ul>
    <form class="row" onSubmit=${submit}><label class="grow"><span class="visually-hidden">Your own words, from this place on</span>
      <input class="field" dir="auto" placeholder="Your own words, from here on" value=${words} onInput=${(event) => setWords(event.target.value)} /></label>
      <button class="button" disabled=${!words}>Put</button></form>
    ${fault && html`<p class="fault" role="alert">${fault}</p>`}
  </div>`;
}
