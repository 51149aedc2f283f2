// The Learn view: a training as a film. The curve is what one drags along, and the frames below it are what the
// model wrote at that time, with the same prompt and the same seed.

import { html, useChanges, useEffect } from "../lib.js";
import { state } from "../state.js";
import { TintChoice } from "../write/controls.js";
import { Side } from "../write/side.js";
import { Columns } from "./columns.js";
import { Curve } from "./curve.js";
import { Head, Start } from "./head.js";
import { learn, listRuns } from "./run.js";
import { isWriting, modeNow, promptNow, setAsked, stopWriting, texts, writeFrames } from "./texts.js";

const AGAIN = 5000; // milliseconds: a run that was started in a terminal shows up by itself

export function LearnView() {
  useChanges("learn", "selection", "current");
  useEffect(() => {
    listRuns();
    const timer = setInterval(listRuns, AGAIN);
    return () => clearInterval(timer);
  }, []);
  const isOpen = state.selected !== null && [...texts.of.values()].some(({ id }) => id !== null && id === state.current);
  return html`<section class=${`lrn ${isOpen ? "lrn-beside" : ""}`} aria-label="Learn">
    <div class="stack lrn-main">
      <${Head} />
      ${learn.run && html`<${Curve} />
        <${Asking} />
        <${Columns} />
        <${TintChoice} />`}
      <${Start} />
    </div>
    ${isOpen && html`<${Side} />`}
  </section>`;
}

function Asking() {
  const { fault } = texts;
  const invalid = (param) => (fault?.param === param ? "true" : null);
  const set = (event) => setAsked({ [event.target.name]: event.target.value });
  const submit = (event) => {
    event.preventDefault();
    writeFrames();
  };
  const field = (name, title, mode) => html`<label class="lrn-number"><span class="small">${title}</span>
    <input class="field" name=${name} inputmode=${mode} autocomplete="off" value=${texts[name]} aria-invalid=${invalid(name)} onInput=${set} /></label>`;
  return html`<form class="row lrn-asking" onSubmit=${submit} aria-label="What every checkpoint writes">
    <label class="grow"><span class="small">Prompt, for every checkpoint</span>
      <input class="field" name="prompt" dir="auto" autocomplete="off" value=${promptNow()} aria-invalid=${invalid("prompt")} onInput=${set} /></label>
    <div class="segments" role="group" aria-label="Mode">
      ${[["chat", "Chat"], ["plain", "Plain"]].map(([mode, title]) => html`<button type="button" aria-pressed=${modeNow() === mode}
        onClick=${() => setAsked({ mode })}>${title}</button>`)}
    </div>
    ${field("length", "Tokens", "numeric")} ${field("temperature", "Temperature", "decimal")} ${field("seed", "Seed", "numeric")}
    ${isWriting() ? html`<button class="button" type="button" onClick=${stopWriting}>Stop</button>`
      : html`<button class="button main" id="lrn-write">Write</button>`}
    ${fault && html`<p class="fault" role="alert">${fault.message}</p>`}
  </form>`;
}
