// What the server sees inside the model at a place of a text: asked once, then remembered.

import { api } from "../api.js";
import { Fault, useAnswer } from "../asking.js";
import { html, useChanges } from "../lib.js";
import { promptLength, state, textLength, tokenAt } from "../state.js";

const MOST_KEPT = 80;
const answers = new Map(); // oldest first

/** Where to look: the position that is read, with a mark that changes when the text before it does. */
export function placeIn(branch, at) {
  let mark = 0;
  // One beyond: the token that was picked belongs to the answer.
  for (let position = 0; position <= at + 1; position++) {
    mark = (Math.imul(mark, 31) + (tokenAt(branch, position)?.id ?? -1)) | 0;
  }
  return { branch: branch.id, at, key: `${branch.id} ${at} ${mark}` };
}

/** The positions to look at for a selected token: how it was picked, and how it is read. */
export function sidesOf(branch, selected) {
  const token = selected === null ? null : tokenAt(branch, selected);
  if (!token || selected >= textLength(branch)) return null;
  return { token, written: selected >= promptLength(branch), picked: selected - 1, read: selected };
}

/** Ask, and draw again when the answer is there. Until then the last answer of this text stays. */
export function useLook(place, query) {
  useChanges("server"); // what failed is asked for again when the server is back
  const key = place && query !== null ? `${place.key} ${query}` : null;
  const ask = key === null ? null : async (signal) => {
    if (!answers.has(key)) {
      answers.set(key, await api.get(`/v1/tree/${place.branch}/look?at=${place.at}&${query}`, { signal }));
      if (answers.size > MOST_KEPT) answers.delete(answers.keys().next().value);
    }
    return { answer: answers.get(key), branch: place.branch };
  };
  const { answer: held, fault, again } = useAnswer(ask, 0, [key, state.server.ready]);
  const last = held?.branch === place?.branch ? held.answer : null;
  return { answer: fault ? null : answers.get(key) ?? last, fault, again };
}

/** What stands in a section whose numbers are not there: why, and a way on. */
export const Missing = ({ fault, again }) => (fault ? html`<${Fault} fault=${fault} again=${again} />`
  : html`<p class="quiet small" role="status">Looking inside …</p>`);
