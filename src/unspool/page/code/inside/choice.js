// What a person chose to look at. It stays while they go from token to token: the same head, elsewhere.

import { changed } from "../state.js";

export const choice = {
  layer: null, // from 1; null: all, averaged
  head: null, // from 1; null: all of the layer, averaged
  withoutFirst: true, // leave the first token out and rescale the rest: it takes most, and says least
  shade: "weight", // of the map of heads: "weight" | "entropy"
  written: "picked", // which side of a written token: "picked" | "read"
  prompt: "read", // the same for a token of the prompt
  against: "runner", // attribution: "runner" | "mean" | "none"
  open: { way: false, attention: true, states: true, lens: false, pushes: false, neighbours: false },
};

export function choose(what) {
  Object.assign(choice, what);
  changed("inside");
}

/** A layer in the picture: chosen, or, chosen once more, let go. */
export function chooseLayer(layer) {
  choose({ layer: layer === choice.layer ? null : layer, head: null });
}

/** The choice as far as this model has such a layer and head. */
export function chosenIn({ layers, heads }) {
  const layer = choice.layer !== null && choice.layer <= layers ? choice.layer : null;
  const head = layer !== null && choice.head !== null && choice.head <= heads ? choice.head : null;
  return { layer, head };
}
