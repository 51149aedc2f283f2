// The Map panel: all branches as a map, and a card with the actions of one branch.

import { canUndo, jump, removeBranch, renameBranch, undo, undoLabel } from "../actions.js";
import { api } from "../api.js";
import { html, plural, useChanges, useEffect, useLayoutEffect, useRef, useState, useThrottledChanges } from "../lib.js";
import { Drawing, labelOf, lengthOf, matching, origin, originWords, ownWords, quoted, trees } from "./drawing.js";
import { Futures } from "./futures.js";
import { adopt, changed, currentBranch, state } from "../state.js";
import { SteerChips } from "../steer/chips.js";
import { History } from "../write/view.js";

const MAX_NAME_LENGTH = 200; // of the server

/** One branch: open, rename, compare, delete. `from`: the branch it forks; `now`: the current branch. */
function Card({ item, from, now, others, isEditing, onEdit, onName, onJump, onCompare, onRemove }) {
  const { branch } = item;
  const isCurrent = branch.id === now?.id;
  const words = ownWords(branch, 120) || "(empty)";
  const text = item.start > 0 ? `… ${words}` : words;
  return html`<div class="map-card panel" role="group" aria-label="Selected branch">
    ${isEditing
      ? html`<${NameForm} branch=${branch} onName=${onName} onEdit=${onEdit} />`
      : html`<div class="row spread">
          <p class=${branch.name ? "map-name" : "map-words"}>${branch.name || text}</p>
          <button class="button tiny" type="button" onClick=${() => onEdit(branch.id)}>
            ${branch.name ? "Rename" : "Name"}</button>
        </div>`}
    ${branch.name && html`<p class="map-words small">${text}</p>`}
    <p class="quiet small">${isCurrent ? "Current branch: " : ""}${plural(branch.length, "token")}, ${
      originWords(item, from)}</p>
    <${SteerChips} branch=${branch} />
    <div class="row">
      ${!isCurrent && html`<button class="button tiny" type="button" onClick=${() => onJump(branch.id)}>
        Open</button>`}
      ${!isCurrent && now && html`<button class="button tiny" type="button"
        onClick=${() => onCompare(branch.id)}>Compare with ${quoted(now, 20)}</button>`}
      ${isCurrent && others.length > 0 && html`<select class="field map-compare" aria-label="Compare with"
          onChange=${(event) => { onCompare(event.target.value); event.target.value = ""; }}>
        <option value="">Compare with …</option>
        ${others.map((other) => html`<option key=${other.id} value=${other.id}>${quoted(other, 48)}</option>`)}
      </select>`}
      <button class="button tiny" type="button" onClick=${() => onRemove(branch.id)}>Delete</button>
    </div>
  </div>`;
}

function NameForm({ branch, onName, onEdit }) {
  const field = useRef(null);
  useLayoutEffect(() => {
    field.current.value = branch.name ?? ""; // once: rendering must not overwrite what is typed
    field.current.focus();
    field.current.select();
  }, []);
  const keep = (event) => {
    event.preventDefault();
    onName(branch.id, field.current.value.trim());
  };
  const leave = (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    onEdit(null);
  };
  return html`<form class="row" onSubmit=${keep} onKeyDown=${leave}>
    <input class="field map-field" ref=${field} aria-label="Name of the branch" maxlength=${MAX_NAME_LENGTH}
      placeholder=${ownWords(branch, 40)} autocomplete="off" />
    <button class="button tiny" type="submit">Save</button>
    <button class="button tiny plain" type="button" onClick=${() => onEdit(null)}>Cancel</button>
  </form>`;
}

// -- the panel ----------------------------------------------------------------------------------

const FILTER_FROM = 13; // branches: from here on there is a search field

/** Key of the branches with the same prompt; a branch without a loaded prompt belongs to its parent's group. */
function groupOf(branch) {
  for (let at = branch; at; at = state.branches.get(at.parent)) {
    if (at.prompt) return `${at.model} ${at.prompt.text}`;
    if (!state.branches.has(at.parent)) return at.id;
  }
}

/** Load missing prompts: they are the titles of the trees. */
function usePrompts(branches) {
  const requested = useRef(new Set());
  useEffect(() => {
    for (const branch of branches) {
      const isKnown = branch.prompt || branch.recorded || state.branches.has(branch.parent);
      if (isKnown || requested.current.has(branch.id)) continue;
      requested.current.add(branch.id);
      // If that fails, the title is the length of the prompt: no error to report.
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
  useThrottledChanges("steps"); // while a text streams
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
  const matches = hasFilter && letters.trim() ? filtered(branches, letters) : null;
  const visibleTrees = trees(branches, matches?.visible);
  const items = visibleTrees.flatMap((tree) => tree.items);
  const inHand = items.find((item) => item.id === hand) ?? items.find((item) => item.id === current);
  const from = inHand && state.branches.get(inHand.from);

  const backToMap = () => requestAnimationFrame(() =>
    (large.current ?? panel.current)?.querySelector('[role="treeitem"][tabindex="0"]')?.focus());
  async function removeSelected(id) {
    const name = quoted(state.branches.get(id));
    await removeBranch(id);
    setDeleted({ name, label: undoLabel() });
    requestAnimationFrame(() => document.querySelector(".map-deleted button")?.focus());
  }
  async function undoRemoval() {
    setDeleted(null);
    await undo();
    backToMap();
  }
  async function saveName(id, name) {
    setEditing(null);
    if (name !== (state.branches.get(id)?.name ?? "")) await renameBranch(id, name);
    backToMap();
  }
  function pressed(event, id) {
    const acts = {
      F2: () => setEditing(id), Delete: () => removeSelected(id), c: () => id !== current && compare(id),
    };
    if (!(event.key in acts)) return;
    event.preventDefault();
    setHand(id);
    acts[event.key]();
  }

  if (!branches.length) {
    return html`<div class="map stack">
      <${Deleted} deleted=${deleted} onUndo=${undoRemoval} />
      <p class="quiet">No branches yet. Every text and every edit will be a branch here.</p></div>`;
  }
  const parts = html`
    <${Deleted} deleted=${deleted} onUndo=${undoRemoval} />
    ${hasFilter && html`<${Filter} letters=${letters} onInput=${setLetters}
      status=${matches && `${plural(matches.hits.size, "branch", "branches")} found`} />`}
    <${Drawing} trees=${visibleTrees} current=${current} comparing=${comparing} hits=${matches?.hits ?? null}
      inHand=${hand} onHand=${setHand} onJump=${jump} onKey=${pressed} />
    ${inHand && html`<${Card} key=${inHand.id} item=${inHand} from=${from} now=${currentBranch()}
      others=${branches.filter((branch) => branch.id !== inHand.id)} isEditing=${editing === inHand.id}
      onEdit=${(id) => { setEditing(id); if (id === null) backToMap(); }} onName=${saveName}
      onJump=${jump} onCompare=${(id) => { setLarge(false); compare(id); }} onRemove=${removeSelected} />`}`;
  return html`<div class="map stack" ref=${panel}>
    <div class="map-head">
      <p class="quiet small">${plural(branches.length, "branch", "branches")}. Click one to open it.</p>
      <span class="row"><${Futures} />
        <button class="button tiny" type="button" onClick=${() => setLarge(true)}>Enlarge</button></span>
    </div>
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

/** Notice about the last deletion, until another action. */
function Deleted({ deleted, onUndo }) {
  const holds = deleted && canUndo() && undoLabel() === deleted.label;
  return html`<div role="status" class=${holds ? "map-deleted row spread" : "map-silent"}>${holds && html`
    <span>Deleted ${deleted.name}.</span>
    <button class="button tiny" type="button" onClick=${onUndo}>Undo</button>`}</div>`;
}

function Filter({ letters, onInput, status }) {
  return html`<div class="row"><input class="field map-field" type="search" value=${letters}
      aria-label="Search branches by name or text" placeholder="Search by name or text"
      onInput=${(event) => onInput(event.target.value)} />
    <span class="quiet small" role="status">${status}</span></div>`;
}
