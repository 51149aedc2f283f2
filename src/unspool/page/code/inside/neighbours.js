// The tokens whose embeddings lie nearest: which the model takes in as nearly the same.

import { Piece, html } from "../lib.js";
import { Missing, useLook } from "./looks.js";

export function Neighbours({ place, text }) {
  const found = useLook(place, "include=neighbours&top=14");
  if (!found.answer) return html`<${Missing} ...${found} />`;
  return html`
    <p class="quiet small">Tokens whose embeddings point nearly the same way as that of <${Piece} text=${text} />. The number
      is the cosine of the angle between them: 1 is the same direction, 0 has nothing in common.</p>
    <ul class="inside-near">
      ${found.answer.neighbours.map((near) => html`<li class="chip" data-token=${near.token}
        style=${{ "--p": Math.max(0, near.similarity).toFixed(3) }}>
        <${Piece} text=${near.text} /><span class="mono">${near.similarity.toFixed(2)}</span></li>`)}
    </ul>`;
}
