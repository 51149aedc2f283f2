// One branch in words, and what can be done with it: go there, name, compare, delete.

import { html, plural, useLayoutEffect, useRef } from "../lib.js";
import { originWords, ownWords, quoted } from "./facts.js";

const MOST_LETTERS = 200; // that the server takes as a name

/**
 * `item` is the branch's place in the map, `from` the branch it left, `others` those it can be
 * compared with, `now` the current branch.
 */
export function Card({ item, from, now, others, isEditing, onEdit, onName, onJump, onCompare, onRemove }) {
  const { branch } = item;
  const isCurrent = branch.id === now?.id;
  const words = ownWords(branch, 120) || "nothing yet";
  const said = item.start > 0 ? `… ${words}` : words;
  return html`<div class="map-card panel" role="group" aria-label="This branch">
    ${isEditing
      ? html`<${NameForm} branch=${branch} onName=${onName} onEdit=${onEdit} />`
      : html`<div class="row spread">
          <p class=${branch.name ? "map-name" : "map-words"}>${branch.name || said}</p>
          <button class="button tiny" type="button" onClick=${() => onEdit(branch.id)}>
            ${branch.name ? "Rename" : "Name it"}</button>
        </div>`}
    ${branch.name && html`<p class="map-words small">${said}</p>`}
    <p class="quiet small">${isCurrent ? "You are here: " : ""}${plural(branch.length, "token")}, ${
      originWords(item, from)}</p>
    <div class="row">
      ${!isCurrent && html`<button class="button tiny" type="button" onClick=${() => onJump(branch.id)}>
        Go there</button>`}
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
    field.current.value = branch.name ?? ""; // once: what is typed stays, whatever is drawn meanwhile
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
    <input class="field map-field" ref=${field} aria-label="Name of the branch" maxlength=${MOST_LETTERS}
      placeholder=${ownWords(branch, 40)} autocomplete="off" />
    <button class="button tiny" type="submit">Save</button>
    <button class="button tiny plain" type="button" onClick=${() => onEdit(null)}>Cancel</button>
  </form>`;
}
