// The question, and how it is searched for.

import { html } from "../lib.js";
import { changed, modelNow, state } from "../state.js";
import { shortName } from "../models/name.js";
import { JUDGES, POLICIES, WEIGHERS } from "./choices.js";
import { change, judgeModel, judgeModels, optionNow, promptNow, search, setOption, stop, thinking } from "./runs.js";

const invalid = (name) => (thinking.fault?.param === name ? "true" : null);
const set = (event) => change({ [event.target.name]: event.target.value, fault: null });

export function Asking() {
  const { policy, judge, fault, running } = thinking;
  const submit = (event) => {
    event.preventDefault();
    search();
  };
  const enter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && submit(event);
  return html`<form class="think-asking" onSubmit=${submit} aria-label="What is searched for">
    <label><span class="small">Question</span>
      <textarea class="field" name="prompt" rows="2" dir="auto" value=${promptNow()} aria-invalid=${invalid("prompt")} onInput=${set} onKeyDown=${enter} /></label>
    <div class="row">
      <${Mode} />
      <${Choice} name="policy" title="Policy" now=${policy} choices=${POLICIES} />
      ${POLICIES[policy].options.map((option) => html`<${Option} key=${`${policy} ${option.name}`} option=${option} />`)}
      <${Choice} name="judge" title="Judge" now=${judge} choices=${judgesHere()} />
      <${Rest} needs=${JUDGES[judge].needs} />
    </div>
    <p class="quiet small">${POLICIES[policy].help}<br />${JUDGES[judge].help}</p>
    <div class="row">
      <${Field} name="budget" title="Budget in tokens" help="Every token that is computed counts: the prompt once, all that is written, all that a judge reads" />
      ${!POLICIES[policy].isLong && html`<${Field} name="length" title="Tokens of a text" />`}
      <${Field} name="temperature" title="Temperature" help="Above 0: texts must differ for a search to find anything" />
      <${Field} name="seed" title="Seed" help="The same seed gives the same tree; empty: by chance" />
      ${running ? html`<button class="button" type="button" id="think-stop" onClick=${stop}>Stop</button>`
        : html`<button class="button main" id="think-search" disabled=${!state.model}>Think</button>`}
    </div>
    ${fault && html`<p class="fault" role="alert">${fault.message}</p>`}
  </form>`;
}

/** Judges that are models need one beside the writer. */
const judgesHere = () => Object.fromEntries(Object.entries(JUDGES).filter(([, { needs }]) => needs !== "model" || judgeModels().length));

function Mode() {
  const pick = (mode) => {
    state.mode = mode;
    changed("mode");
  };
  return html`<div class="segments" role="group" aria-label="Mode">
    ${[["chat", "Chat"], ["plain", "Plain"]].map(([mode, title]) => html`<button type="button" aria-pressed=${state.mode === mode}
      disabled=${mode === "chat" && modelNow()?.unspool.chat === false} onClick=${() => pick(mode)}>${title}</button>`)}</div>`;
}

function Choice({ name, title, now, choices }) {
  return html`<label><span class="small">${title}</span>
    <select class="field" name=${name} value=${now} aria-invalid=${invalid(name)} onChange=${set}>
      ${Object.entries(choices).map(([value, { title: said }]) => html`<option key=${value} value=${value}>${said}</option>`)}</select></label>`;
}

function Field({ name, title, help = null, value = thinking[name], onInput = set, mode = "decimal" }) {
  return html`<label class="think-field" title=${help}><span class="small">${title}</span>
    <input class="field" name=${name} inputmode=${mode} autocomplete="off" value=${value} aria-invalid=${invalid(name)} onInput=${onInput} /></label>`;
}

function Option({ option }) {
  const { name, title, among } = option;
  const put = (event) => setOption(name, event.target.value);
  if (!among) return html`<${Field} name=${name} title=${title} value=${optionNow(option)} onInput=${put} mode="numeric" />`;
  return html`<label><span class="small">${title}</span><select class="field" name=${name} value=${optionNow(option)} onChange=${put}>
    ${among.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>`;
}

/** What stands behind the judge's name. */
function Rest({ needs }) {
  if (needs === "pattern") {
    return html`<label class="grow"><span class="small">Pattern</span><input class="field mono" name="pattern" autocomplete="off" spellcheck="false"
      placeholder="answer is (\\d+)" value=${thinking.pattern} aria-invalid=${invalid("pattern")} onInput=${set} /></label>`;
  }
  if (needs === "weigher") return html`<${Choice} name="weigher" title="Weighed by" now=${thinking.weigher}
    choices=${Object.fromEntries(WEIGHERS.map((name) => [name, JUDGES[name]]))} />`;
  if (needs === "model") return html`<${Choice} name="model" title="Model" now=${judgeModel()}
    choices=${Object.fromEntries(judgeModels().map(({ id }) => [id, { title: shortName(id) }]))} />`;
  return null;
}
