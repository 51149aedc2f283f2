// “Rewrite this part”: what else could stand in the words that are marked, ranked with what is before and behind
// them; a click puts one there, and the rest of the text stays.

import { api } from "../api.js";
import { clamp, html, nats, percent, useChanges, useEffect, useLayoutEffect, useRef, useState } from "../lib.js";
import { promptLength, state } from "../state.js";
import { short, tried } from "../actions.js";
import { clearPart } from "./marks.js";
import { placeOf } from "./pane.js";
import { replaceParts } from "./replacing.js";

const CANDIDATES = 8;

export function Rewrite() {
  useChanges("part", "current", "layout");
  const { part } = state;
  if (!part || part.branch !== state.current) return null;
  return html`<${Popup} key=${`${part.branch} ${part.first} ${part.last}`} part=${part} />`;
}

function Popup({ part }) {
  const box = useRef();
  const [found, setFound] = useState(null); // null: not asked; "asking"; or what the server said
  const branch = state.branches.get(part.branch);
  const place = usePlace(box, branch, part, found);
  const ask = async () => {
    setFound("asking");
    const goes = await tried(async () => {
      const { first, last } = part;
      const told = await api.post(`/v1/tree/${branch.id}/fill`, { first, last, candidates: CANDIDATES });
      setFound(told);
    });
    if (!goes) setFound(null);
  };
  useEffect(() => { if (part.asked && found === null) ask(); }, [part.asked]);
  useEffect(() => { if (found?.candidates) box.current?.querySelector("li button:not(:disabled)")?.focus(); }, [found]);
  const leave = () => {
    clearPart();
    document.getElementById("text").focus({ preventScroll: true });
  };
  const onKey = (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    event.stopPropagation(); // the keys of the page are not for here
    if (event.key === "Escape") leave();
    else if (move) {
      const all = [...box.current.querySelectorAll("li button:not(:disabled)")];
      all[(all.indexOf(document.activeElement) + move + all.length) % all.length]?.focus();
      event.preventDefault();
    }
  };
  const put = async (candidate) => {
    await replaceParts(branch, [candidate], { label: `rewrite “${short(found.old)}”` });
    document.getElementById("text")?.focus({ preventScroll: true });
  };
  return html`<div ref=${box} class="rewrite panel" role="group" aria-label="The marked part" style=${place} onKeyDown=${onKey}>
    ${found === null && html`<button class="button main" id="rewrite" onClick=${ask}>Rewrite this part</button>`}
    ${found === "asking" && html`<p class="quiet small" role="status">Drafting, and weighing with what follows …</p>`}
    ${found?.candidates && html`<${Found} found=${found} put=${put} leave=${leave} />`}
  </div>`;
}

function Found({ found, put, leave }) {
  const most = Math.max(...found.candidates.map(({ probability }) => probability), 1e-9);
  return html`<div class="row spread"><h2>Instead of “${short(found.old)}”</h2>
      <button class="button plain tiny" aria-label="Close" onClick=${leave}>×</button></div>
    <ul class="rewrite-list">${found.candidates.map((one) => html`<li key=${one.new}>
      <button disabled=${one.now} onClick=${() => put(one)} title=${one.now ? "What stands there now" : "Put this there"}>
        <span class="rewrite-words" dir="auto">${one.new}${one.now && html` <small class="quiet">stands there</small>`}</span>
        <span class="track" aria-hidden="true"><span style=${{ width: `${(one.probability / most) * 100}%` }} /></span>
        <span class="rewrite-number">${percent(one.probability)}</span>
        <span class="rewrite-number quiet" title="Log-probability of the text with it, in nats">${nats(one.score)}</span>
      </button></li>`)}</ul>
    <p class="quiet small">${HOW[found.by] ?? ""}</p>`;
}

const HOW = {
  ranking: "Drafted from the left, ranked by how likely each makes what follows.",
  fim: "Written by the model from both sides.",
  masked: "Guessed from both sides at once.",
};

/** Below the part, inside the text. */
function usePlace(box, branch, part, found) {
  const [place, setPlace] = useState({ opacity: 0 });
  useLayoutEffect(() => {
    const own = promptLength(branch);
    const [begin, end] = [placeOf(own + part.first), placeOf(own + part.last - 1)];
    if (!begin || !end || !box.current) return;
    const room = box.current.parentElement.parentElement.clientWidth - box.current.offsetWidth - 8;
    const left = begin.y === end.y ? begin.x : 8;
    const next = { left: `${clamp(left, 8, Math.max(8, room))}px`, top: `${end.y + end.height + 4}px` };
    if (next.left !== place.left || next.top !== place.top) setPlace(next);
  });
  useLayoutEffect(() => { if (found?.candidates) box.current?.scrollIntoView({ block: "nearest" }); }, [found, place.top]);
  return place;
}
