// What else the model weighed at one token: a small window beside it.

import { jump, open } from "../actions.js";
import { Piece, clamp, html, percent, useEffect, useLayoutEffect, useRef, useState } from "../lib.js";
import { promptLength, state } from "../state.js";

const SHOWN = 8;

/** Take a branch to the Write view, at one of its tokens if one is given. */
export async function openInWrite(id, at = null) {
  const branch = state.branches.get(id);
  await jump(id, at === null ? null : promptLength(branch) + at);
  open("write");
}

/** `picked`: `{id, at, element}`. */
export function Popover({ picked, close }) {
  const box = useRef(null);
  const [place, setPlace] = useState(null);
  const step = state.branches.get(picked.id)?.steps[picked.at];

  useLayoutEffect(() => {
    if (!box.current) return;
    const token = picked.element.getClientRects()[0] ?? picked.element.getBoundingClientRect();
    const inside = box.current.offsetParent.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = box.current;
    const below = token.bottom + 6;
    const fits = below + height < innerHeight || token.top - height < 8;
    setPlace({
      left: `${clamp(token.left - inside.left - 12, 0, Math.max(0, inside.width - width))}px`,
      top: `${(fits ? below : token.top - height - 6) - inside.top}px`,
    });
    box.current.focus({ preventScroll: true });
  }, [picked]);

  useEffect(() => {
    const outside = (event) => {
      if (!box.current?.contains(event.target) && !event.target.closest?.("[data-at]")) close(false);
    };
    document.addEventListener("pointerdown", outside);
    return () => document.removeEventListener("pointerdown", outside);
  }, []);

  if (!step) return null;
  const candidates = step.candidates.slice(0, SHOWN);
  if (!candidates.some((candidate) => candidate.token === step.token)) {
    candidates.splice(SHOWN - 1, 1, step); // taken from far behind: it takes the last place
  }
  const most = Math.max(...candidates.map(chance));
  return html`<div ref=${box} class="cmp-popover panel" role="dialog" tabindex="-1"
      aria-label=${`What the model weighed at token ${picked.at + 1}`}
      style=${place ?? { opacity: 0 }}
      onKeyDown=${(event) => event.key === "Escape" && (event.stopPropagation(), close(true))}>
    <p class="small">Token ${picked.at + 1}: <${Piece} text=${step.piece} />
      ${step.draw ? `, drawn with ${percent(step.probability)}` : ""}</p>
    <table class="cmp-weighed">
      <thead class="visually-hidden"><tr>
        <th>token</th><th>bar</th><th>model</th><th>after the settings</th></tr></thead>
      <tbody>${candidates.map((candidate) => html`
        <tr class=${candidate.token === step.token ? "taken" : ""}>
          <th scope="row"><${Piece} text=${candidate.piece ?? candidate.text} /></th>
          <td aria-hidden="true"><div class="track">
            <span style=${{ width: `${(chance(candidate) / most) * 100}%` }} /></div></td>
          <td class="cmp-number">${percent(chance(candidate))}</td>
          <td class="cmp-number quiet">${percent(candidate.probability)}</td>
        </tr>`)}</tbody>
    </table>
    <p class="quiet small">First number: the model’s own. Second: after the settings.</p>
    <div class="row">
      <button class="button" onClick=${() => openInWrite(picked.id, picked.at)}>Open in Write</button>
      <button class="button" onClick=${() => close(true)}>Close</button>
    </div>
  </div>`;
}

const chance = (candidate) => Math.exp(candidate.logprob);
