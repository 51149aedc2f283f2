// What the server sees inside the model at a place of a text: asked once, then remembered.

import { ApiFault, api } from "../api.js";
import { html, useEffect, useState } from "../lib.js";
import { on, promptLength, state, textLength, tokenAt } from "../state.js";

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
  const key = place && query !== null ? `${place.key} ${query}` : null;
  const [held, hold] = useState({});
  const [tries, setTries] = useState(0);
  const known = answers.get(key);
  useEffect(() => {
    if (key === null) return undefined;
    if (answers.has(key)) return void hold({ answer: answers.get(key), branch: place.branch });
    const stop = new AbortController();
    api.get(`/v1/tree/${place.branch}/look?at=${place.at}&${query}`, { signal: stop.signal }).then(
      (answer) => {
        remember(key, answer);
        if (!stop.signal.aborted) hold({ answer, branch: place.branch });
      },
      (error) => {
        if (stop.signal.aborted) return;
        const fault = error instanceof ApiFault ? error : new ApiFault(500, "The answer cannot be read.");
        hold({ fault, key });
      },
    );
    return () => stop.abort();
  }, [key, tries]);
  const fault = held.key === key && key !== null ? held.fault ?? null : null;
  useEffect(() => {
    if (!fault?.gone) return undefined;
    return on("server", () => state.server.ready && setTries((tries) => tries + 1));
  }, [fault]);
  const last = held.branch === place?.branch ? held.answer ?? null : null;
  return {
    answer: fault ? null : known ?? last,
    fault,
    again: () => {
      hold({});
      setTries(tries + 1);
    },
  };
}

function remember(key, answer) {
  answers.set(key, answer);
  if (answers.size > MOST_KEPT) answers.delete(answers.keys().next().value);
}

/** What stands in a section whose numbers are not there: why, and a way on. */
export function Missing({ fault, again }) {
  if (!fault) return html`<p class="quiet small" role="status">Looking inside …</p>`;
  return html`<div class="row small" role="alert">
    <span class="bad">${fault.message}</span>
    <button type="button" class="button tiny" onClick=${again}>Try again</button>
  </div>`;
}

/** The width on screen of an element, for pictures that are drawn in its pixels. */
export function useWidth(ref, otherwise = 400) {
  const [width, setWidth] = useState(otherwise);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => {
      const found = Math.floor(entry.contentRect.width);
      if (found > 0) setWidth(found);
    });
    watch.observe(ref.current);
    return () => watch.disconnect();
  }, []);
  return width;
}
