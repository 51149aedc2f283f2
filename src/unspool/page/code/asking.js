// Questions to the server that follow what a person types: late enough not to ask at every key, and
// an answer that was overtaken by a newer question is never shown.

import { connect } from "./actions.js";
import { ApiFault } from "./api.js";
import { html, useEffect, useState } from "./lib.js";

/**
 * Ask `wait` milliseconds after `keys` last changed. Gives `{answer, fault, fresh, again}`: the last
 * answer stays until the next one is here (`fresh` tells which), `again()` repeats the question.
 * With `ask` null nothing is asked.
 */
export function useAnswer(ask, wait, keys) {
  const [told, tell] = useState({ answer: null, fault: null, of: null });
  const [turn, setTurn] = useState(0);
  const question = JSON.stringify([...keys, turn]);
  useEffect(() => {
    if (!ask) return undefined;
    const overtaken = new AbortController();
    const timer = setTimeout(async () => {
      try {
        const answer = await ask(overtaken.signal);
        if (!overtaken.signal.aborted) tell({ answer, fault: null, of: question });
      } catch (error) {
        if (overtaken.signal.aborted) return;
        if (!(error instanceof ApiFault)) throw error;
        tell((before) => ({ ...before, fault: error, of: question }));
        if (error.gone || error.status === 401) connect(); // the page waits for the server, or for a key
      }
    }, wait);
    return () => {
      clearTimeout(timer);
      overtaken.abort();
    };
  }, [question, ask === null]);
  return {
    answer: told.answer,
    fault: told.of === question ? told.fault : null,
    fresh: told.of === question && !told.fault,
    again: () => setTurn((n) => n + 1),
  };
}

/** What went wrong, where it went wrong. */
export const Fault = ({ fault, again }) => fault && html`
  <p class="fault" role="alert">
    ${fault.message} <button type="button" class="button tiny" onClick=${again}>Try again</button>
  </p>`;
