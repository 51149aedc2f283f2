// What is behind the text: a column beside it, or, on a narrow screen, a sheet at the bottom.

import { clamp, html, isNarrow, Tabs, useChanges, useEffect, useRef } from "../lib.js";
import { changed, state } from "../state.js";
import { closeSheet, show } from "../actions.js";
import { Lazy } from "../lazy.js";
import { SettingsPanel } from "./settings_panel.js";

const PANELS = {
  step: ["Step", "./step/panel.js", "StepPanel"],
  inside: ["Inside", "./inside/panel.js", "InsidePanel"],
  map: ["Map", "./map/panel.js", "MapPanel"],
  costs: ["Costs", "./costs/panel.js", "CostsPanel"],
  settings: ["Settings"],
};
const TITLES = Object.fromEntries(Object.entries(PANELS).map(([panel, [title]]) => [panel, title]));
const HIGHEST = 0.85; // of the screen
const LOWEST = 0.2; // below this it is let go

export function Side() {
  useChanges("panel");
  const side = useRef();
  useEffect(() => tapsOutside(side.current), []);
  const [, file, name] = PANELS[state.panel];
  const pick = (panel) => (isNarrow() && state.sheet && panel === state.panel ? closeSheet() : show(panel));
  return html`<aside class=${`side ${state.sheet ? "up" : ""}`} ref=${side} aria-label="Behind the text">
    <div class="sheet-head">
      <span class="sheet-grip" aria-hidden="true" onPointerDown=${(event) => drag(event, side.current)}></span>
      <button type="button" class="button plain tiny" id="close-sheet" aria-label="Close the panel" onClick=${closeSheet}>×</button>
    </div>
    <${Tabs} class="tabs" label="Panels" prefix="tab" controls="side-panel" tabs=${TITLES} now=${state.panel} pick=${pick} />
    <div class="panel side-panel" id="side-panel" role="tabpanel" aria-labelledby=${`tab-${state.panel}`} tabindex="-1">
      ${file ? html`<${Lazy} key=${file} file=${file} name=${name} />` : html`<${SettingsPanel} />`}
    </div>
  </aside>`;
}

/** A tap beside the sheet puts it away; one on a token shows that token. */
function tapsOutside(side) {
  const heard = ({ target }) => {
    const isKept = side.contains(target) || target.closest(".t, .tour-card, dialog");
    if (!isNarrow() || !state.sheet || isKept) return;
    state.sheet = false; // the focus goes where the tap goes
    changed("panel");
  };
  document.addEventListener("pointerdown", heard);
  return () => document.removeEventListener("pointerdown", heard);
}

/** Pull the sheet up or down; far enough down, it goes. */
function drag(event, side) {
  const grip = event.currentTarget;
  const [from, tall] = [event.clientY, side.offsetHeight];
  let share = tall / innerHeight;
  const moved = ({ clientY }) => {
    share = clamp((tall + from - clientY) / innerHeight, 0.05, HIGHEST);
    side.style.setProperty("--sheet", `${(100 * share).toFixed(1)}dvh`);
  };
  const released = () => {
    grip.removeEventListener("pointermove", moved);
    if (share > LOWEST) return;
    side.style.removeProperty("--sheet");
    closeSheet();
  };
  grip.setPointerCapture(event.pointerId);
  grip.addEventListener("pointermove", moved);
  grip.addEventListener("pointerup", released, { once: true });
  grip.addEventListener("pointercancel", released, { once: true });
}
