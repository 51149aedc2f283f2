// Look inside: what happened in the model for the selected token.

import { html, Piece, useChanges, useMemo } from "../lib.js";
import { branchNow, state, stepAt } from "../state.js";
import { Attention } from "./attention.js";
import { choice, choose } from "./choice.js";
import { Lens } from "./lens.js";
import { Missing, placeIn, sidesOf, useLook } from "./looks.js";
import { Pushes } from "./pushes.js";
import { States } from "./states.js";
import { Way } from "./way.js";

export function InsidePanel() {
  useChanges("selection", "steps", "current", "inside");
  const branch = branchNow();
  const sides = branch ? sidesOf(branch, state.selected) : null;
  if (sides && branch.recorded) {
    return html`<p class="quiet">This text was shown from a file, and the server does not have it. To look inside, have
      it written here again.</p>`;
  }
  if (sides) return html`<${Selected} branch=${branch} sides=${sides} />`;
  return html`<p class="quiet">Select a token in the text to look inside the model: where it looked, what each
    layer made of it, and how an answer came out.</p>`;
}

function Selected({ branch, sides }) {
  const name = sides.written ? "written" : "prompt";
  const side = sides.picked < 0 ? "read" : choice[name];
  const place = useSame(placeIn(branch, sides[side]));
  const own = useSame(placeIn(branch, sides.read));
  return html`<div class="inside stack" data-looked-at=${place.at}>
    <h2 class="visually-hidden">Look inside</h2>
    <${Sides} sides=${sides} side=${side} name=${name} step=${stepAt(branch, sides.read)} />
    <${Parts} place=${place} own=${own} side=${side} text=${sides.token.text} />
  </div>`;
}

/** The same object as long as it means the same place. */
const useSame = (place) => useMemo(() => place, [place.key]);

function Sides({ sides, side, name, step }) {
  const token = html`<${Piece} text=${sides.token.text} />`;
  const button = (which, label) => html`<button type="button" aria-pressed=${side === which}
    disabled=${which === "picked" && sides.picked < 0}
    onClick=${() => choose({ [name]: which })}>${label}</button>`;
  return html`<div class="segments small" role="group" aria-label="Which side of the token">
      ${button("picked", sides.written ? "How it was picked" : "Was it expected?")}
      ${button("read", "How it is read")}
    </div>
    <p class="quiet small">${saying(sides, side, token, step)}</p>`;
}

function saying(sides, side, token, step) {
  if (sides.picked < 0) {
    return html`${token} is the first token: nothing stands before it, so nothing could be expected here.
      This is how it is read.`;
  }
  if (side === "read") {
    return html`How the model reads ${token}, with all that stands before it, and what it then expects next.`;
  }
  if (!sides.written) {
    return html`${token} is part of the prompt. This is what the model expected in its place, seen at the
      token before it.`;
  }
  if (step?.chosen) {
    return html`A person put ${token} there. This is what the model made of that place, seen at the token
      before it.`;
  }
  return html`A token is picked while the one before it is read. So this is the model reading the token
    before ${token}.`;
}

function Parts({ place, own, side, text }) {
  const base = useLook(place, "include=vectors,attention&top=8");
  const runner = base.answer?.position === place.at ? runnerUp(base.answer) : null;
  const next = side === "picked" ? "picked" : "next";
  const part = (name, title, draw) => html`<${Part} name=${name} title=${title} draw=${draw} />`;
  return useMemo(() => {
    const whole = (draw) => () => (base.answer ? draw(base.answer) : html`<${Missing} ...${base} />`);
    return html`<div class="inside-parts">
      <${FoldAll} />
      ${part("way", "The way through the model", whole((look) => html`<${Way} look=${look} next=${next} />`))}
      ${part("attention", "Where it looks", whole((look) => html`<${Attention} place=${place} look=${look} />`))}
      ${base.answer?.states && part("states", "What it carries along", whole((look) => html`<${States} look=${look} />`))}
      ${part("lens", "What each layer would have said", () => html`<${Lens} place=${place} />`)}
      ${part("pushes", "Which parts pushed it", () => html`<${Pushes} place=${place} runner=${runner} />`)}
      ${part("neighbours", "Nearest neighbours", () => html`<${Neighbours} place=${own} text=${text} />`)}
    </div>`;
  }, [place, own, base.answer, base.fault, next]);
}

/** The strongest rival of the token that the numbers are about. */
function runnerUp({ head }) {
  return head.candidates.find(({ id }) => id !== head.followed.id) ?? null;
}

/** The column is long: all of it, or a list of what there is. */
function FoldAll() {
  useChanges("inside");
  const isAll = Object.values(choice.open).every(Boolean);
  const set = () => choose({ open: Object.fromEntries(Object.keys(choice.open).map((name) => [name, !isAll])) });
  return html`<button type="button" class="link small" id="inside-fold" onClick=${set}>${isAll ? "Fold all" : "Open all"}</button>`;
}

/** A section that can be folded; folded, it asks the server nothing. */
function Part({ name, title, draw }) {
  useChanges("inside");
  const open = choice.open[name];
  const toggle = (event) => {
    if (event.currentTarget.open !== open) choose({ open: { ...choice.open, [name]: !open } });
  };
  return html`<details class="inside-part" data-part=${name} open=${open} onToggle=${toggle}>
    <summary><h3>${title}</h3></summary>
    ${open && html`<div class="stack inside-body">${draw()}</div>`}
  </details>`;
}

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
