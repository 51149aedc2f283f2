// The bar under the text: what the caret offers, what happens after an edit, and whether all words are sent.

import { resumeWriting } from "../actions.js";
import { html, storage, useChanges, useEffect } from "../lib.js";
import { changed, currentBranch, state } from "../state.js";
import { acceptGhost, continueHere, endGhosts, hasGhosts, stepGhost, suggest } from "./cursor.js";
import { canEdit, draftStatus, forgetEdit, needsEditButton, rewriteAfterEdit, scoreBranch, startEditing } from "./document.js";
import { fillGap, findGap } from "./edits.js";

state.afterEdit = storage.get("afterEdit", "rescore");

export function EditBar() {
  useChanges("draft-edit", "ghosts", "current", "writing", "server", "selection", "reading", "steps");
  useEffect(() => {
    const onKey = (event) => {
      const isCommand = (event.ctrlKey || event.metaKey) && event.target.closest("#text");
      if (!isCommand || !["Enter", " "].includes(event.key)) return;
      event.preventDefault();
      if (event.key === "Enter") continueHere();
      else suggest();
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  const branch = currentBranch();
  if (!branch || branch.recorded || state.writing || state.reading) return null;
  const status = draftStatus();
  return html`<div class="edit-bar row small" role="toolbar" aria-label="Editing">
    ${hasGhosts() ? html`<${GhostButtons} />` : html`<${CaretButtons} />`}
    <span class="grow"></span>
    ${status === "edited" ? html`<${AfterEdit} branch=${branch} />` : html`<span class="quiet" role="status">${STATUS[status] ?? ""}</span>`}
  </div>`;
}

const STATUS = {
  typing: "", sending: "Tokenizing …", unsent: "Not sent: the server does not answer. Your words are kept and sent later.",
  refused: "Not sent, for the reason below. Your words are kept: change them to try again.",
};

/** Buttons do not take the focus, so that the caret stays. */
const keepFocus = (event) => event.preventDefault();

function Action({ id, title, act, children }) {
  return html`<button type="button" class="button tiny" id=${id} title=${title} onPointerDown=${keepFocus} onMouseDown=${keepFocus}
    disabled=${!state.server.ready} onClick=${act}>${children}</button>`;
}

function CaretButtons() {
  const toggle = () => {
    if (!state.editing) return startEditing();
    state.editing = false;
    changed("steps", "draft-edit");
    return document.activeElement.blur();
  };
  return html`${needsEditButton() && html`<button type="button" class="button tiny" id="edit" aria-pressed=${state.editing} disabled=${!canEdit()}
      onClick=${toggle}>Edit</button>`}
    <${Action} id="continue-here" title="Generate from the caret; the text after it stays in another branch (Ctrl+Enter)" act=${continueHere}>Continue here<//>
    <${Action} id="suggest" title="Show continuations at the caret, to step through and accept (Ctrl+Space)" act=${suggest}>Suggest<//>
    ${findGap(currentBranch()) && html`<${Action} id="fill-gap" title="Propose words for ___, ranked by the text before and after it" act=${fillGap}>Fill ___<//>`}`;
}

function GhostButtons() {
  return html`<${Action} id="ghost-previous" title="Previous continuation (↑)" act=${() => stepGhost(-1)}>↑<//>
    <${Action} id="ghost-next" title="Next continuation (↓)" act=${() => stepGhost(1)}>↓<//>
    <${Action} id="accept-word" title="Accept the next word (Ctrl+→ or →)" act=${() => acceptGhost("word")}>Word<//>
    <${Action} id="accept-line" title="Accept the line (Enter)" act=${() => acceptGhost("line")}>Line<//>
    <${Action} id="accept-all" title="Accept all (Tab)" act=${() => acceptGhost("all")}>All<//>
    <${Action} id="drop-ghosts" title="Drop them (Escape)" act=${endGhosts}>×<//>`;
}

/** What happens to the text after an edit. */
function AfterEdit({ branch }) {
  const set = (choice) => {
    state.afterEdit = choice;
    storage.set("afterEdit", choice);
    changed("draft-edit");
    if (choice === "rescore") scoreBranch(branch);
  };
  return html`<span class="quiet">Text after the edit:</span>
    <div class="segments" role="group" aria-label="Text after the edit">
      <button type="button" aria-pressed=${state.afterEdit === "rescore"} title="Keep the words; compute their probabilities again"
        onPointerDown=${keepFocus} onClick=${() => set("rescore")}>Rescore</button>
      <button type="button" aria-pressed=${state.afterEdit === "keep"} title="Keep the words without probabilities"
        onPointerDown=${keepFocus} onClick=${() => set("keep")}>Keep</button></div>
    <${Action} id="rewrite-rest" title="Drop the text after the edit and generate it again" act=${() => rewriteAfterEdit(resumeWriting)}>Rewrite<//>
    <button type="button" class="button plain tiny" aria-label="Close" onClick=${forgetEdit}>×</button>`;
}
