// The way through the model, from the text to the probabilities, with this token's own numbers.

import { useTheme } from "../colors.js";
import { count, html, ordinal, percent, Piece, useMemo, useState, useWidth } from "../lib.js";
import { cellText, paintedGrid, rounded } from "./cells.js";
import { Layers } from "./layers.js";

export function Way({ look, next }) {
  const { token, vectors, head, position, position_told: told, layers, norms } = look;
  return html`<ol class="inside-way">
    <li>
      <h4>Token <span class="quiet">→ number</span></h4>
      <p class="row"><${Piece} text=${token.text} /><span class="quiet">→</span>
        <b class="mono" data-fact="id">${token.id}</b></p>
      <p class="quiet small">Its number in the vocabulary of ${count(head.vocabulary)} tokens.</p>
    </li>
    <li>
      <h4>Embedding <span class="quiet">· a vector of ${count(vectors.width)} numbers</span></h4>
      <${Embedding} vectors=${vectors} token=${token} />
      <p class="quiet small">Row ${count(token.id)} of a table the model has learned; ${rounded(norms[0])} long.
        Each cell is one number: <b class="inside-above">above</b> or <b class="inside-below">below</b> zero.</p>
    </li>
    <li>
      <h4>Position ${position}</h4>
      <${Position} told=${told} position=${position} />
    </li>
    <li>
      <h4>${layers} layers</h4>
      <p class="quiet small">Each adds to the vector${look.states ? "" : " twice"}: what <b class="inside-attention">attention</b>
        ${" "}fetched from earlier tokens${look.states && " or a recurrence from its state"}, then what the${" "}
        <b class="inside-forward">feed-forward</b> net made of it. Pick a layer to follow it below.</p>
      <${Layers} look=${look} />
    </li>
    <li>
      <h4>Head <span class="quiet">→ probabilities</span></h4>
      <p class="quiet small">The last vector is normalized (now ${rounded(head.norm)} long) and held against all
        ${" "}${count(head.vocabulary)} tokens: a score each, the logit. Softmax makes them probabilities, here before
        temperature and other stages.</p>
      <${Probabilities} head=${head} picked=${look.picked} next=${next} />
    </li>
  </ol>`;
}

function Embedding({ vectors, token }) {
  const [frame, width] = useWidth();
  const theme = useTheme();
  const [read, setRead] = useState(null);
  const cells = vectors.cells[0];
  const columns = Math.min(cells.length, Math.floor(width / 7));
  const size = width / columns;
  const height = Math.ceil(cells.length / columns) * size;
  const source = useMemo(() => paintedGrid(cells, columns), [cells, columns, theme]);
  const point = (event) => {
    const at = Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
    setRead(at >= 0 && at < cells.length ? at : null);
  };
  return html`<div ref=${frame} class="inside-cells">
    <svg width=${width} height=${height} role="img"
      aria-label=${`The embedding of token ${token.id}: ${vectors.width} numbers as colored cells`}
      onPointerMove=${point} onPointerLeave=${() => setRead(null)}>
      <image href=${source} width=${width} height=${height} preserveAspectRatio="none" />
    </svg>
    ${read !== null && html`<output class="inside-read mono">${cellText(vectors, 0, read)}</output>`}
  </div>`;
}

const POSITIONS = {
  rotary: "Rotary: nothing is added to the vector. Inside each layer, pairs of numbers are turned like clock "
    + "hands by angles that grow with the position; what counts between two tokens is the angle between them.",
  learned: "A learned vector for this position is added; in the cells above it is already in.",
  sinusoidal: "A fixed pattern of waves for this position is added; in the cells above it is already in.",
  none: "This model is not told positions; it has only the order in which the mask lets tokens be seen.",
};

function Position({ told, position }) {
  const size = 26;
  return html`${told.dials.length > 0 && html`<svg class="inside-dials" width=${told.dials.length * (size + 8)}
      height=${size + 2} role="img"
      aria-label=${`How far position ${position} turns pairs ${told.dials.map((dial) => dial.pair).join(", ")}: `
        + told.dials.map((dial) => `${rounded(dial.angle)} radians`).join(", ")}>
      ${told.dials.map(({ pair, angle }, at) => {
        const [x, y, r] = [at * (size + 8) + size / 2 + 1, size / 2 + 1, size / 2];
        return html`<g>
          <title>pair ${pair} of ${told.pairs}: ${rounded(angle)} radians</title>
          <circle cx=${x} cy=${y} r=${r} />
          <line x1=${x} y1=${y} x2=${x + r * Math.cos(angle)} y2=${y - r * Math.sin(angle)} />
        </g>`;
      })}
    </svg>`}
    <p class="quiet small">${POSITIONS[told.way]}</p>`;
}

function Probabilities({ head, picked, next }) {
  const marked = picked ? head.followed : null;
  const shown = head.candidates.slice(0, 6);
  if (marked && !shown.some(({ id }) => id === marked.id)) shown.push(marked);
  const most = Math.max(...shown.map(({ probability }) => probability), 1e-9);
  return html`<div class="inside-chances" role="list" aria-label="What the model expects next">
    ${shown.map((each) => {
      const followed = each.id === marked?.id;
      return html`<div role="listitem" class=${followed ? "followed" : ""} data-token=${each.id}>
        <${Piece} text=${each.text} />
        <span class="track"><span style=${{ width: `${(100 * each.probability) / most}%` }}></span></span>
        <span class="mono small">${percent(each.probability)}</span>
        <span class="mono small quiet" title="logit">${each.logit.toFixed(1)}</span>
      </div>`;
    })}
    <p class="quiet small">${marked && html`<b class="inside-above">${spoken(marked, next)}</b> · `}Right: the logit.</p>
  </div>`;
}

function spoken({ rank }, next) {
  const which = next === "picked" ? "The token that was picked" : "The token that came next";
  return `${which} stands ${ordinal(rank + 1)}`;
}
