// The tree of samples as a picture: ribbons with words, from the prompt to one leaf a sample.

import { html, percent, useMemo, useWidth } from "../lib.js";
import { layout } from "./wordtree.js";

const pen = document.createElement("canvas").getContext("2d");
const SIZE = 16; // at which words are measured; other sizes follow from it

function drawnPlan(tree, width, stem) {
  pen.font = `${SIZE}px ${getComputedStyle(document.body).fontFamily}`;
  const measure = (text, size) => (pen.measureText(text).width * size) / SIZE;
  return layout(tree, { width, measure, stem });
}

/** `point(samples | null)` when a path is under the pointer, `choose(sample)` when one is clicked. */
export function WordTree({ tree, texts, stem, lit, shown, point, choose }) {
  const [frame, width] = useWidth(0);
  const plan = useMemo(() => width && drawnPlan(tree, width, stem), [tree, width, stem]);
  return html`<div class="cmp-frame" ref=${frame}>${plan && html`
    <${Drawing} plan=${plan} texts=${texts} lit=${lit} shown=${shown} point=${point} choose=${choose} />`}</div>`;
}

function Drawing({ plan, texts, lit, shown, point, choose }) {
  const { width, height, bands, bends, leaves } = plan;
  const look = (samples) => (lit && !samples.some((sample) => lit.includes(sample)) ? "dim" : "");
  const over = (samples) => ({ onPointerEnter: () => point(samples), onPointerLeave: () => point(null) });
  const label = `${texts.length} samples as a tree with ${bands.length} runs of words. `
    + "The leaves on the right are the samples; each can be read.";
  return html`<svg class="cmp-tree" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`}
      role="group" aria-label=${label}>
    <g aria-hidden="true">
      ${bends.map(({ samples, path, hue, step, x, y }) => html`<g class=${look(samples)} ...${over(samples)}>
        <path class=${`cmp-ribbon hue-${hue}`} d=${path} />
        ${step && html`<text class="cmp-chance" x=${x} y=${y}>${percent(Math.exp(step.logprob))}</text>`}
      </g>`)}
      ${bands.map((band) => html`<g class=${look(band.samples)} ...${over(band.samples)}
          onClick=${() => band.samples.length === 1 && choose(band.samples[0])}>
        <rect class=${`cmp-ribbon hue-${band.hue}`} x=${band.x} y=${band.y}
          width=${band.width} height=${band.height} />
        ${band.lines.map(({ text, x, y }) => html`<text class=${`cmp-words ${band.isPrompt ? "quiet" : ""}`}
          x=${x} y=${y} font-size=${band.size}>${text}</text>`)}
      </g>`)}
    </g>
    ${leaves.map((leaf, index) => html`<${Leaf} key=${leaf.sample} leaf=${leaf} text=${texts[leaf.sample]}
      first=${index === 0} shown=${shown === leaf.sample} look=${look([leaf.sample])}
      point=${point} choose=${choose} />`)}
  </svg>`;
}

/** The end of a sample: a button; the arrow keys go from one to the next. */
function Leaf({ leaf, text, first, shown, look, point, choose }) {
  const keys = (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter" || event.key === " ") choose(leaf.sample);
    else if (move) {
      const all = [...event.currentTarget.ownerSVGElement.querySelectorAll(".cmp-leaf")];
      all[all.indexOf(event.currentTarget) + move]?.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<g class=${`cmp-leaf hue-${leaf.hue} ${look}`} role="button" tabindex=${first ? 0 : -1}
      aria-pressed=${shown} aria-label=${`Sample ${leaf.sample + 1}: ${text}`} data-sample=${leaf.sample + 1}
      onClick=${() => choose(leaf.sample)} onKeyDown=${keys}
      onFocus=${() => point([leaf.sample])} onBlur=${() => point(null)}
      onPointerEnter=${() => point([leaf.sample])} onPointerLeave=${() => point(null)}>
    <circle cx=${leaf.x + 18} cy=${leaf.y} r="11" />
    <text x=${leaf.x + 18} y=${leaf.y}>${leaf.sample + 1}</text>
  </g>`;
}
