// A place of the canvas: what it is now, how it looks, and how it is said.

import { percent, spelled } from "../lib.js";
import { twins } from "./runs.js";

const SAID = { set: "set now", edited: "replaced now", cleared: "taken back now", hand: "by hand" };

/** A place with what a person put there meanwhile. */
export function withHand(place) {
  if (!twins.hand.has(place.number)) return place;
  const now = twins.hand.get(place.number);
  return { ...place, token: now?.token ?? null, text: now?.text ?? place.text, change: "hand", isByHand: true };
}

export function lookOf(place) {
  const names = ["place"];
  if (place.token === null) names.push(place.isOpen || place.probability != null ? "guess" : "blank");
  if (place.change) names.push(`did-${place.change}`);
  if (twins.place === place.number) names.push("looked-at");
  return names.join(" ");
}

/** In words, for those who hear the page and those who point. */
export function saidOf(place) {
  const what = place.token === null ? (place.probability == null ? "masked" : `masked, would say ${spelled(place.text)}`) : spelled(place.text);
  const sure = place.probability == null ? "" : `, ${percent(place.probability)}`;
  return `Place ${place.number + 1}: ${what}${sure}${place.change ? `, ${SAID[place.change]}` : ""}`;
}
