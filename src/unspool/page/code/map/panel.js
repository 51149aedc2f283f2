// The side panel with the map of the tree: where the text went, and every way it left.

import { canRedo, canUndo, jump, redo, redoLabel, remove, rename, undo, undoLabel } from "../actions.js";
import { api } from "../api.js";
import { html, plural, useCalmChanges, useChanges, useEffect, useLayoutEffect, useRef, useState } from "../lib.js";
import { adopt, branchNow, changed, state } from "../state.js";
import { Card } from "./card.js";
import { Drawing } from "./drawing.js";
import { labelOf, lengthOf, matching, quoted } from "./facts.js";
import { origin, trees } from "./layout.js";

const FILTER_FROM = 13; // branches: fewer are found at a glance

/** Which branches begin with the same prompt; one whose prompt is not here goes with its parent. */
function groupOf(branch) {
  for (let at = branch; at; at = state.branches.get(at.parent)) {
    if (at.prompt) return `${at.model} ${at.prompt.text}`;
    if (!state.branches.has(at.parent)) return at.id;
  }
}

/** Prompts that the list of branches did not tell: the map names its trees by them. */
function usePrompts(branches) {
  const asked = useRef(new Set());
  useEffect(() => {
    for (const branch of branches) {
      const isKnown = branch.prompt || branch.recorded || state.branches.has(branch.parent);
      if (isKnown || asked.current.has(branch.id)) continue;
      asked.current.add(branch.id);
      // Without an answer the tree is headed by the length of its prompt, which is no fault to report.
      api.get(`/v1/tree/${branch.id}?steps=false`).then(adopt, () => {});
    }
  });
}

const compare = (id) => {
  state.comparing = id || null;
  changed("comparing");
};

export function MapPanel() {
  useChanges("branches", "current", "writing", "comparing", "history");
  useCalmChanges("steps"); // the map of a text that streams grows in calm
  const [hand, setHand] = useState(null);
  const [editing, setEditing] = useState(null);
  const [letters, setLetters] = useState("");
  const [isLarge, setLarge] = useState(false);
  const [deleted, setDeleted] = useState(null);
  const panel = useRef(null);
  const { current, comparing } = state;
  const branches = [...state.branches.values()].map((branch) => ({
    ...branch, length: lengthOf(branch), group: groupOf(branch), label: labelOf(branch),
    writing: branch.writing || state.writing?.branch === branch.id,
  }));
  usePrompts(branches);
  useEffect(() => setHand(null), [current]);
  const large = useRef(null);
  useLayoutEffect(() => {
    if (isLarge) large.current?.showModal();
  }, [isLarge]);

  const hasFilter = branches.length >= FILTER_FROM;
  const found = hasFilter && letters.trim() ? filtered(branches, letters) : null;
  const shown = trees(branches, found?.shown);
  const items = shown.flatMap((tree) => tree.items);
  const inHand = items.find((item) => item.id === hand) ?? items.find((item) => item.id === current);
  const from = inHand && state.branches.get(inHand.from);

  const backToMap = () => requestAnimationFrame(() =>
    (large.current ?? panel.current)?.querySelector('[role="treeitem"][tabindex="0"]')?.focus());
  async function letGo(id) {
    const name = quoted(state.branches.get(id));
    await remove(id);
    setDeleted({ name, label: undoLabel() });
    requestAnimationFrame(() => document.querySelector(".map-deleted button")?.focus());
  }
  async function giveBack() {
    setDeleted(null);
    await undo();
    backToMap();
  }
  async function keepName(id, name) {
    setEditing(null);
    if (name !== (state.branches.get(id)?.name ?? "")) await rename(id, name);
    backToMap();
  }
  function pressed(event, id) {
    const acts = {
      F2: () => setEditing(id), Delete: () => letGo(id), c: () => id !== current && compare(id),
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    setHand(id);
    acts[event.key]();
  }

  if (!branches.length) {
    return html`<div class="map stack"><${History} />
      <${Deleted} deleted=${deleted} onUndo=${giveBack} />
      <p class="quiet">Nothing is written yet. Every way the text takes will be drawn here.</p></div>`;
  }
  const parts = html`
    <${Deleted} deleted=${deleted} onUndo=${giveBack} />
    ${hasFilter && html`<${Filter} letters=${letters} onInput=${setLetters}
      said=${found && `${plural(found.hits.size, "branch", "branches")} found`} />`}
    <${Drawing} trees=${shown} current=${current} comparing=${comparing} hits=${found?.hits ?? null}
      inHand=${hand} onHand=${setHand} onJump=${jump} onKey=${pressed} />
    ${inHand && html`<${Card} key=${inHand.id} item=${inHand} from=${from} now=${branchNow()}
      others=${branches.filter((branch) => branch.id !== inHand.id)} isEditing=${editing === inHand.id}
      onEdit=${(id) => { setEditing(id); if (id === null) backToMap(); }} onName=${keepName}
      onJump=${jump} onCompare=${(id) => { setLarge(false); compare(id); }} onRemove=${letGo} />`}`;
  return html`<div class="map stack" ref=${panel}>
    <div class="map-head">
      <${History} />
      <button class="button tiny" type="button" onClick=${() => setLarge(true)}>Enlarge</button>
    </div>
    <p class="quiet small">${plural(branches.length, "branch", "branches")}. Every text you left stays: click one to go back to it.</p>
    ${isLarge
      ? html`<dialog class="map-large" ref=${large} aria-label="Map of all branches"
            onClose=${() => setLarge(false)}>
          <div class="map-head"><h2>Map of all branches</h2><${History} />
            <button class="button" type="button" onClick=${() => large.current.close()}>Close</button></div>
          ${parts}
        </dialog>`
      : parts}
  </div>`;
}

function filtered(branches, letters) {
  const byId = new Map(branches.map((branch) => [branch.id, branch]));
  return matching(branches, letters, (branch) => origin(branch, byId));
}

function History() {
  useChanges("history");
  const said = (verb, can, label) => (can ? `${verb}: ${label}` : verb);
  const button = (verb, can, label, act) => html`<button class="button tiny map-history" type="button"
    disabled=${!can} title=${said(verb, can, label)} onClick=${act}><span>${said(verb, can, label)}</span></button>`;
  return html`<div class="row map-undo">
    ${button("Undo", canUndo(), undoLabel(), undo)}${button("Redo", canRedo(), redoLabel(), redo)}</div>`;
}

/** Said in place until something else is done. */
function Deleted({ deleted, onUndo }) {
  const holds = deleted && canUndo() && undoLabel() === deleted.label;
  return html`<div role="status" class=${holds ? "map-deleted row spread" : "map-silent"}>${holds && html`
    <span>Deleted ${deleted.name}.</span>
    <button class="button tiny" type="button" onClick=${onUndo}>Undo</button>`}</div>`;
}

function Filter({ letters, onInput, said }) {
  return html`<div class="row"><input class="field map-field" type="search" value=${letters}
      aria-label="Find branches by name or words" placeholder="Find by name or words"
      onInput=${(event) => onInput(event.target.value)} />
    <span class="quiet small" role="status">${said}</span></div>`;
}
