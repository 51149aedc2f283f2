// The features of the selected token, by a sparse autoencoder of the server: bars in the Steer section. A click clamps one.

import { api } from "../api.js";
import { html, Piece, RequestError, useRequest, useState } from "../lib.js";

const NUM_FEATURES = 12;
const NUM_EXAMPLES = 3;
const inLine = (text) => text.replaceAll("\n", "⏎");

/** A change that clamps a feature, at first to twice the value that it has at the token. */
export function featureChange(sae, { feature, strength, examples }) {
  const most = Number((2 * Math.max(2 * strength, ...examples.map((example) => example.strength))).toPrecision(2));
  return { what: `feature:${sae}:${feature}`, sae, feature, strength: Number((2 * strength).toPrecision(2)), range: { min: 0, max: most, step: Number((most / 100).toPrecision(2)) } };
}

/** `clamped`: the numbers of clamped features; `clamp` and `release` change that. */
export function Features({ branch, position, textKey, autoencoders, clamped, clamp, release }) {
  const [name, setName] = useState(autoencoders[0].name);
  const sae = autoencoders.find((item) => item.name === name) ?? autoencoders[0];
  const query = new URLSearchParams({ at: position, sae: sae.name, top: NUM_FEATURES });
  const { answer, fault, again } = useRequest((signal) => api.get(`/v1/tree/${branch.id}/features?${query}`, { signal }), 80, [textKey, sae.name, position]);
  const most = Math.max(0, ...(answer?.features ?? []).map(({ strength }) => strength));
  const choice = autoencoders.length > 1 && html`<select class="field inside-choice small" id="features-sae" aria-label="Sparse autoencoder" value=${sae.name}
    onChange=${({ target }) => setName(target.value)}>${autoencoders.map((item) => html`<option value=${item.name}>${item.name}</option>`)}</select>`;
  return html`<div class="features" id="features" aria-busy=${!answer}>
    <div class="row spread"><h4>Features of <${Piece} text=${answer?.text} /></h4>${choice}</div>
    <${RequestError} fault=${fault} again=${again} />
    ${answer && html`<p class="quiet small">${answer.num_active} of ${answer.num_features.toLocaleString()} are active${sae.layer === null ? "" : ` in layer ${sae.layer + 1}`};
      ${" "}they leave ${Math.round(100 * answer.unexplained)} % of the vector unexplained. Click one to clamp it.</p>
      <ul>${answer.features.map((item) => html`<${FeatureRow} key=${item.feature} item=${item} most=${most} isClamped=${clamped(sae.name, item.feature)}
        toggle=${() => (clamped(sae.name, item.feature) ? release(sae.name, item.feature) : clamp(featureChange(sae.name, item)))} />`)}</ul>`}
  </div>`;
}

function FeatureRow({ item, most, isClamped, toggle }) {
  const { feature, strength, examples } = item;
  const [first] = examples;
  return html`<li>
    <button type="button" class="feature-row small" aria-pressed=${isClamped} aria-label=${`Clamp feature ${feature}, strength ${strength.toPrecision(3)}`} onClick=${toggle}>
      <span class="mono">${feature}</span><span class="feature-bar" aria-hidden="true"><i style=${{ "--share": most ? strength / most : 0 }}></i></span>
      <span class="mono">${strength.toPrecision(3)}</span>
      <span class="feature-example quiet" dir="auto">${first ? html`${inLine(first.before).slice(-16)}<b>${inLine(first.token)}</b>${inLine(first.after).slice(0, 16)}` : ""}</span>
    </button>
    ${isClamped && examples.length > 0 && html`<ol class="feature-examples small" aria-label=${`Where feature ${feature} is strongest`}>${examples.slice(0, NUM_EXAMPLES).map((example) => html`<li dir="auto">
      …${inLine(example.before)}<mark>${inLine(example.token)}</mark>${inLine(example.after)}… <span class="quiet mono">${example.strength.toPrecision(3)}</span></li>`)}</ol>`}
  </li>`;
}
