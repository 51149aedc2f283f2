// The Search view of the Compare place: search for a better text with more compute (best of n, votes, beam and tree search).

import { connect } from "../actions.js";
import { PromptBar } from "../compare/prompt.js";
import {
  count, duration, html, isNarrow, nats, plural, useChanges, useEffect, useRef, useState,
} from "../lib.js";
import { shortName } from "../models.js";
import { state } from "../state.js";
import {
  isPruned, judgeModel, judgeModels, JUDGES, openNode, optionValue, pathTo, POLICIES, scoreText,
  search, setOption, setThinking, stop, thinking, tokensOf, WEIGHERS,
} from "./runs.js";
import { SearchTree } from "./tree.js";
import { CandidatesPopover, openInWrite, TokenText } from "../token_text.js";
import { TintChoice } from "../write/view.js";

const invalid = (name) => (thinking.fault?.param === name ? "true" : null);
const set = (event) => setThinking({ [event.target.name]: event.target.value, fault: null });

function SearchForm() {
  const { policy, judge, fault } = thinking;
  const submit = (event) => {
    event.preventDefault();
    search();
  };
  return html`<form class="think-asking" onSubmit=${submit} aria-label="Search">
    <div class="row">
      <${Choice} name="policy" title="Policy" now=${policy} choices=${POLICIES} />
      ${POLICIES[policy].options.map((option) => html`<${Option} key=${`${policy} ${option.name}`} option=${option} />`)}
      <${Choice} name="judge" title="Verifier" now=${judge} choices=${judgesHere()} />
      <${JudgeDetails} needs=${JUDGES[judge].needs} />
    </div>
    <p class="quiet small">${POLICIES[policy].help}<br />${JUDGES[judge].help}</p>
    <div class="row">
      <${Field} name="budget" title="Budget in tokens" help="All computed tokens count: the prompt once, generated tokens, and tokens read by a verifier" />
      <${Field} name="temperature" title="Temperature" help="Above 0, so that the texts differ" />
      <${Field} name="seed" title="Seed" help="The same seed gives the same tree; empty: random" />
      <button hidden>Run</button>
    </div>
    ${fault && html`<p class="fault" role="alert">${fault.message}</p>`}
  </form>`;
}

/** Judges that need a second model are listed only if there is one. */
const judgesHere = () => Object.fromEntries(Object.entries(JUDGES).filter(([, { needs }]) => needs !== "model" || judgeModels().length));

function Choice({ name, title, now, choices }) {
  return html`<label><span class="small">${title}</span>
    <select class="field" name=${name} value=${now} aria-invalid=${invalid(name)} onChange=${set}>
      ${Object.entries(choices).map(([value, { title: label }]) => html`<option key=${value} value=${value}>${label}</option>`)}</select></label>`;
}

function Field({ name, title, help = null, value = thinking[name], onInput = set, mode = "decimal" }) {
  return html`<label class="think-field" title=${help}><span class="small">${title}</span>
    <input class="field" name=${name} inputmode=${mode} autocomplete="off" value=${value} aria-invalid=${invalid(name)} onInput=${onInput} /></label>`;
}

function Option({ option }) {
  const { name, title, among } = option;
  const update = (event) => setOption(name, event.target.value);
  if (!among) return html`<${Field} name=${name} title=${title} value=${optionValue(option)} onInput=${update} mode="numeric" />`;
  return html`<label><span class="small">${title}</span><select class="field" name=${name} value=${optionValue(option)} onChange=${update}>
    ${among.map((value) => html`<option key=${value} value=${value}>${value}</option>`)}</select></label>`;
}

/** The argument of a judge. */
function JudgeDetails({ needs }) {
  if (needs === "pattern") {
    return html`<label class="grow"><span class="small">Pattern</span><input class="field mono" name="pattern" autocomplete="off" spellcheck="false"
      placeholder="answer is (\\d+)" value=${thinking.pattern} aria-invalid=${invalid("pattern")} onInput=${set} /></label>`;
  }
  if (needs === "weigher") return html`<${Choice} name="weigher" title="Weighted by" now=${thinking.weigher}
    choices=${Object.fromEntries(WEIGHERS.map((name) => [name, JUDGES[name]]))} />`;
  if (needs === "model") return html`<${Choice} name="model" title="Model" now=${judgeModel()}
    choices=${Object.fromEntries(judgeModels().map(({ id }) => [id, { title: shortName(id) }]))} />`;
  return null;
}

// -- progress and result ------------------------------------------------------------------------

const KINDS = { prompt: "prompt", written: "generated", judged: "read by the verifier" };

/** Tokens spent of the budget, by kind. */
function BudgetMeter() {
  const { spent, running, start } = thinking;
  if (!start) return null;
  const { growing = 0, ...counts } = spent ?? { prompt: 0, written: 0, judged: 0 };
  const limit = counts.limit ?? start.budget;
  // Tokens generated since the last report of the server are added.
  const parts = { prompt: counts.prompt, written: counts.written + growing, judged: counts.judged };
  const total = Math.min(limit, Object.values(parts).reduce((sum, part) => sum + part, 0));
  return html`<div class="think-spending">
    <div class="track" role="meter" aria-label="Tokens computed" aria-valuemin="0" aria-valuemax=${limit} aria-valuenow=${total}
      aria-valuetext=${`${total} of ${plural(limit, "token")}`}>
      ${Object.entries(parts).map(([kind, part]) => html`<span key=${kind} class=${`think-${kind}`} style=${{ width: `${(part / limit) * 100}%` }} />`)}</div>
    <p class="small" data-number="spent"><b>${count(total)}</b> of ${plural(limit, "token")}${running ? " so far" : ""}:
      ${Object.entries(KINDS).map(([kind, name]) => html` <span class="think-key"><i class=${`think-${kind}`} aria-hidden="true" /> ${parts[kind]} ${name}</span>`)}</p>
  </div>`;
}

/** The state or result of the search as a sentence. */
function Outcome() {
  const { nodes, winner, done, running, stopped, seconds, start } = thinking;
  if (!start) return html`<p role="status">${running ? "Starting …" : ""}</p>`;
  const texts = plural(nodes.length - 1, "piece");
  const pruned = nodes.filter(({ number }) => isPruned(number)).length;
  if (running || winner === null) {
    const status = running ? "Searching" : stopped ? "Stopped" : "Not finished";
    return html`<p role="status">${status}: ${texts} so far, ${pruned} pruned.</p>`;
  }
  const { score } = nodes[winner];
  const { length } = tokensOf(winner);
  const total = done?.spent.total;
  return html`<p role="status">Winner: text ${winner}${score == null ? "" : `, score ${scoreText(score)}`}, of ${texts} (${pruned} pruned), in ${
    duration(done?.seconds ?? seconds)}.${total && length ? ` ${(total / length).toFixed(1)} tokens computed per token of the winner (${length}).` : ""}</p>`;
}

/** Answers and their votes. */
function Votes() {
  const votes = new Map();
  for (const { answer, score } of thinking.nodes) {
    if (answer == null || score == null) continue;
    const previous = votes.get(String(answer)) ?? { count: 0, score: -Infinity };
    votes.set(String(answer), { count: previous.count + 1, score: Math.max(previous.score, score) });
  }
  if (!votes.size) return null;
  const most = Math.max(...[...votes.values()].map(({ score }) => score), 1e-9);
  const won = String(thinking.nodes[thinking.winner]?.answer);
  const rows = [...votes].sort(([, a], [, b]) => b.score - a.score).sort(([a], [b]) => (b === won) - (a === won));
  return html`<section aria-label="Votes" class="think-votes"><h3>Votes</h3><div class="bars">${rows.map(([answer, { count, score }]) => html`
    <span key=${answer} dir="auto">${answer}</span><div class="track" aria-hidden="true"><span style=${{ width: `${Math.max(0, score / most) * 100}%` }} /></div>
    <span class="small">${scoreText(score)}, ${plural(count, "text")}</span>`)}</div></section>`;
}

// -- one node -----------------------------------------------------------------------------------

function NodeCard({ pick }) {
  const box = useRef(null);
  const { open: number, winner } = thinking;
  useEffect(() => {
    if (number !== null && isNarrow()) box.current.scrollIntoView({ block: "nearest" });
  }, [number]);
  if (number === null) {
    return html`<section class="panel think-node" aria-label="A text of the search" ref=${box}>
      <p class="quiet small">Select a text in the tree to inspect its tokens, and to continue it.</p></section>`;
  }
  const path = pathTo(number);
  const node = path.at(-1);
  const { id, fault } = thinking.opened.get(number) ?? {};
  const steps = state.branches.get(id)?.steps;
  const before = path.slice(0, -1).reduce((sum, { tokens }) => sum + tokens.length, 0);
  const length = before + node.tokens.length;
  const title = number === 0 ? "Prompt" : `Text ${number}`;
  return html`<section class="panel stack think-node" aria-label="A text of the search" ref=${box} data-open=${number}>
    <div class="row"><h3 class="grow">${title}${number === winner && html` <span class="chip think-won">★ winner</span>`}
      ${isPruned(number) && html` <span class="chip">pruned</span>`}</h3>
      ${node.parent !== null && html`<button class="button tiny" onClick=${() => openNode(node.parent)}>Parent</button>`}</div>
    ${number === 0 ? html`<p class="think-plain" dir="auto">${thinking.start.prompt.map(({ text }) => text).join("")}</p>`
      : html`<${Facts} node=${node} length=${length} />
        ${steps?.length ? html`<${TokenText} key=${id} steps=${steps} parts=${before || null} fork="This piece starts here" label=${`${title}, token by token`}
            pick=${(at, element) => pick({ id, at, element })} />`
          : html`<p class="think-plain" dir="auto" aria-busy=${!fault}>${path.map(({ text }) => text).join("")}</p>`}`}
    ${fault && html`<p class="fault" role="alert">${fault} <button class="button tiny" onClick=${() => openNode(number)}>Try again</button></p>`}
    <button class="button" id="think-write" disabled=${!id} onClick=${() => openInWrite(id)}>Open in Write</button>
  </section>`;
}

function Facts({ node, length }) {
  const { score, why, answer, logprob, tokens, finished } = node;
  const judged = score === undefined ? "not scored" : score === null ? "the verifier failed" : scoreText(score);
  return html`<dl class="cmp-numbers">
    <dt>Score</dt><dd data-number="score">${judged}</dd>
    ${answer != null && html`<dt>Answer</dt><dd data-number="answer">${String(answer)}</dd>`}
    <dt>Tokens</dt><dd data-number="tokens">${length === tokens.length ? length : `${length}, ${tokens.length} in this piece`}</dd>
    <dt title="Mean of −ln(probability) over the tokens of this piece">Surprisal</dt>
    <dd>${nats(tokens.length ? -logprob / tokens.length : null)} nats a token</dd>
    <dt>Finished</dt><dd>${finished ? "yes" : "no"}</dd>
  </dl>${why && html`<p class=${score === null ? "fault" : "small"} data-number="why">${why}</p>`}`;
}

// -- the view -----------------------------------------------------------------------------------

export function ThinkView() {
  useChanges("think", "models", "mode", "branches");
  useEffect(() => { connect(); }, []);
  const [picked, setPicked] = useState(null);
  const close = (back) => {
    if (back && picked?.element.isConnected) picked.element.focus();
    setPicked(null);
  };
  useEffect(() => setPicked(null), [thinking.open]);
  return html`<section class="think stack" aria-label="Search">
    <h2 class="visually-hidden">Search</h2>
    <${PromptBar} running=${thinking.running} start=${search} stop=${stop} canStart=${Boolean(state.model)}
      hasLength=${!POLICIES[thinking.policy].isLong} />
    <p class="quiet small">Test-time compute: a policy samples several continuations, a verifier scores them, and a budget limits the number of
      tokens. Verifiers that run files need the command line: <code>unspool think --judge python:FILE.py</code>.</p>
    <${SearchForm} />
    <${Outcome} />
    ${thinking.start && html`<${BudgetMeter} />
      <div class="row"><${TintChoice} /><${HidePruned} /></div>
      <div class="think-columns"><${SearchTree} /><div class="stack think-side"><${NodeCard} pick=${setPicked} /><${Votes} /></div></div>`}
    ${picked && html`<${CandidatesPopover} picked=${picked} close=${close} />`}
  </section>`;
}

function HidePruned() {
  if (!thinking.nodes.some(({ number }) => isPruned(number))) return null;
  return html`<label class="small"><input type="checkbox" id="think-hides" checked=${thinking.hides}
    onChange=${(event) => setThinking({ hides: event.target.checked })} /> Hide pruned texts</label>`;
}
