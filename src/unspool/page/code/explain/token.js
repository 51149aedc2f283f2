// The view One token: one token on its way through the model, stage by stage, with the numbers of the current model.

import { openView, selectToken } from "../actions.js";
import { Targets, useArcs, withoutFirstToken } from "../inside/attention.js";
import { Embedding, Probabilities } from "../inside/layers.js";
import { formatNumber, paintRows, Pending, placeInText, useInspection } from "../inside/lookups.js";
import {
  count, html, percent, Piece, plural, reducedMotion, useChanges, useEffect, useMemo, useState, useTheme,
} from "../lib.js";
import { currentBranch, modelOf, promptLength, state, stepAt, tokenAt } from "../state.js";
import { StageChain } from "../step/stages.js";
import { Pane } from "../write/view.js";

const STAGES = { tokens: "Tokens", embedding: "Embedding", attention: "Attention", layers: "Layers", output: "Output", sampling: "Sampling" };
const STAGE_MS = 2200;
const LAYER_MS = 450;
const MAX_TOKENS = 14; // shown of the text before

export function OneTokenView() {
  useChanges("current", "selection", "writing");
  const branch = currentBranch();
  const canShow = branch?.prompt && branch.steps.length > 0 && !branch.recorded;
  useEffect(() => {
    if (canShow && stepAt(branch, state.selected) === null) selectToken(promptLength(branch) + Math.min(4, branch.steps.length - 1));
  }, [branch?.id, canShow]);
  if (!canShow) {
    return html`<section class="beside-empty stack" aria-label="One token"><h2>One token through the model</h2>
      <p class="quiet">How a token is predicted: tokens, embedding, attention, layers, output, sampling. No generated text is open.</p>
      <button class="button main" type="button" onClick=${() => openView("write")}>Open Write</button></section>`;
  }
  const step = stepAt(branch, state.selected);
  return html`<section class="beside" aria-label="One token">
    <h2 class="visually-hidden">One token through the model</h2>
    <div class="paper"><p class="quiet small">Click a generated token to follow how it was predicted.</p><${Pane} /></div>
    <div class="panel beside-panel inside one-token" tabindex="0" role="region" aria-label="Stages of the forward pass">
      ${step && state.selected > 0 ? html`<${Way} key=${`${branch.id} ${state.selected}`} branch=${branch} step=${step} />`
        : html`<p class="quiet">This token is part of the prompt: it was not predicted.</p>`}</div>
  </section>`;
}

function Way({ branch, step }) {
  const next = placeInText(branch, step.position - 1);
  const place = useMemo(() => next, [next.key]);
  const base = useInspection(place, "include=vectors,attention&top=8");
  const lens = useInspection(place, "include=lens&top=3");
  const [stage, setStage] = useState("tokens");
  const [layer, setLayer] = useState(1);
  const [plays, setPlays] = useState(!reducedMotion());
  const look = base.answer?.position === place.at ? base.answer : null;
  const lensRows = lens.answer?.position === place.at ? lens.answer.lens : null;
  const isReady = look !== null && lensRows !== null;
  const names = Object.keys(STAGES);

  useEffect(() => {
    if (!plays || !isReady) return undefined;
    const timer = setTimeout(() => {
      if (stage === "layers" && layer < look.layers) setLayer(layer + 1);
      else if (stage === names.at(-1)) setPlays(false);
      else goTo(names[names.indexOf(stage) + 1], true);
    }, stage === "layers" ? LAYER_MS : STAGE_MS);
    return () => clearTimeout(timer);
  }, [plays, stage, layer, isReady]);
  const goTo = (name, keepsPlaying = false) => {
    setStage(name);
    if (name === "layers") setLayer(keepsPlaying ? 1 : look?.layers ?? 1);
    if (!keepsPlaying) setPlays(false);
  };
  const play = () => {
    if (!plays && stage === names.at(-1)) goTo(names[0], true);
    setPlays(!plays);
  };
  const row = isReady && (stage === "attention" ? look.attention.mean : stage === "layers" ? look.attention.by_layer[layer - 1] : null);
  const weights = useMemo(() => (row && look.position > 0 ? withoutFirstToken(row) : row || null), [row]);
  useArcs(place.at, weights);

  const Stage = PARTS[stage];
  return html`<div class="stack">
    <div class="row"><h3>How <${Piece} text=${step.piece} /> was predicted</h3></div>
    <div class="row">
      <button type="button" class="button main" id="play" disabled=${!isReady} onClick=${play}>${plays ? "Pause" : stage === names.at(-1) ? "Play again" : "Play"}</button>
      <div class="segments small stage-names" role="group" aria-label="Stage">${names.map((name, at) => html`<button type="button" key=${name}
        aria-pressed=${stage === name} onClick=${() => goTo(name)}>${at + 1}. ${STAGES[name]}</button>`)}</div>
    </div>
    ${isReady ? html`<div class="one-stage stack" key=${stage} data-stage=${stage}><${Stage} branch=${branch} step=${step} look=${look} lens=${lensRows}
        weights=${weights} layer=${layer} setLayer=${(value) => { setPlays(false); setLayer(value); }} /></div>`
      : html`<${Pending} fault=${base.fault ?? lens.fault} again=${base.fault ? base.again : lens.again} />`}
  </div>`;
}

function Tokens({ branch, look }) {
  const first = Math.max(0, look.position + 1 - MAX_TOKENS);
  const tokens = Array.from({ length: look.position + 1 - first }, (_, at) => tokenAt(branch, first + at));
  return html`<p>The text is a list of tokens, each with an id. The model reads ${plural(look.position + 1, "token")} and predicts the next one.</p>
    <ol class="one-tokens" aria-label="Last tokens">${first > 0 && html`<li class="quiet">…</li>`}
      ${tokens.map((token, at) => html`<li key=${at} style=${{ "--at": at }} class=${at === tokens.length - 1 ? "last" : ""}>
        <${Piece} text=${token.text} /><span class="mono small quiet">${token.id}</span></li>`)}</ol>
    <p class="quiet small">All positions are computed together. From here on the last one is followed: the next token is read from it.</p>`;
}

const EmbeddingStage = ({ look }) => html`<p>Token ${count(look.token.id)} becomes a vector of ${count(look.vectors.width)} numbers: its row of the
    embedding matrix.</p>
  <${Embedding} vectors=${look.vectors} token=${look.token} />
  <p class="quiet small">Norm ${formatNumber(look.norms[0])}. This vector is the start of the residual stream.</p>`;

const AttentionStage = ({ look, weights }) => html`<p>In each layer this position reads from itself and the positions before it. The arcs in the
    text are the attention weights, averaged over all layers and heads, without the first token.</p>
  ${weights && html`<${Targets} row=${weights} tokens=${look.tokens} />`}
  <p class="quiet small">Later positions are hidden by the causal mask.</p>`;

/** The residual stream layer by layer, and what the output head would predict from it. */
function Layers({ look, lens, layer, setLayer, weights }) {
  const theme = useTheme();
  const source = useMemo(() => paintRows(look.vectors.cells.slice(0, layer + 1)), [look, layer, theme]);
  const row = lens.layers[layer];
  const most = Math.max(...row.candidates.map(({ probability }) => probability), 1e-9);
  return html`<label class="one-layer"><span>Layer ${layer} of ${look.layers}</span>
      <input type="range" min="1" max=${look.layers} value=${layer} aria-valuetext=${`layer ${layer} of ${look.layers}`} onInput=${(event) => setLayer(Number(event.target.value))} /></label>
    <img class="one-stream" src=${source} alt=${`Residual stream after ${plural(layer, "layer")}, one row for each`} style=${{ height: `${4 * (layer + 1)}px` }} />
    <p>If the model stopped after this layer, it would predict (logit lens):</p>
    <div class="bars">${row.candidates.map((candidate) => html`<${Piece} key=${candidate.token} text=${candidate.text} />
      <div class="track" aria-hidden="true"><span style=${{ width: `${(100 * candidate.probability) / most}%` }}></span></div><span class="small">${percent(candidate.probability)}</span>`)}</div>
    <p class="small"><${Piece} text=${lens.text} /> has rank <b>${count(row.rank + 1)}</b> after this layer.</p>
    ${weights && html`<p class="quiet small">This layer attends most to:</p><${Targets} row=${weights} tokens=${look.tokens} />`}`;
}

const Output = ({ look }) => html`<p>After the last layer the vector is normalized and multiplied with the output matrix: a logit for each of
    ${" "}${count(look.head.vocabulary)} tokens. Softmax turns them into probabilities.</p>
  <${Probabilities} head=${look.head} picked=${look.picked} next="picked" />`;

function Sampling({ branch, step }) {
  const size = modelOf(branch)?.unspool.vocabulary ?? 0;
  if (step.chosen) return html`<p>You chose this token: it was not sampled.</p>`;
  return html`<p>${step.draw ? html`The sampling stages drop unlikely tokens. A random number then picks one of ${
      count(step.stages.at(-1)?.kept ?? size)}: <${Piece} text=${step.piece} />.` : html`Greedy: the most likely token is taken, <${Piece} text=${step.piece} />.`}
      It is appended, and the next step starts with it.</p>
    ${step.stages.length > 0 && html`<${StageChain} branch=${branch} step=${step} size=${size} />`}`;
}

const PARTS = { tokens: Tokens, embedding: EmbeddingStage, attention: AttentionStage, layers: Layers, output: Output, sampling: Sampling };
