// All that can be taken along from the page: the session, a picture, the text, a program.

import { html, save, useChanges, useEffect, useRef, useState } from "../lib.js";
import { branchNow, state } from "../state.js";
import { ensureSteps } from "../actions.js";
import { CopyButton } from "./copy_button.js";
import { SessionPart } from "./session_part.js";
import { ProgramPart } from "./program_part.js";
import { markdownOf } from "./markdown.js";
import { pictureOf, pixels, svgText } from "./picture.js";
import { openPlayBar } from "./play_bar.js";
import { fileName } from "./session.js";

export function ShareDialog({ open, close }) {
  useChanges("current", "branches", "steps");
  const dialog = useRef();
  const busy = useRef(null); // a replay that Escape should end before it closes the dialog
  useEffect(() => {
    if (open && !dialog.current.open) dialog.current.showModal();
  }, [open]);
  const onCancel = (event) => {
    if (event.target !== dialog.current || !busy.current) return;
    event.preventDefault();
    busy.current();
  };
  const branch = branchNow();
  return html`<dialog ref=${dialog} class="dialog share" id="share-dialog" aria-labelledby="share-title"
      onClose=${(event) => event.target === dialog.current && close()} onCancel=${onCancel}>
    <form method="dialog" class="row spread"><h2 id="share-title">Share</h2>
      <button class="button tiny" aria-label="Close" title="Close (Escape)">✕</button></form>
    <${SessionPart} busy=${busy} close=${() => dialog.current.close()} />
    ${branch?.prompt
      ? html`<${PlayPart} branch=${branch} close=${() => dialog.current.close()} />
        <${PicturePart} branch=${branch} />
        <${TextPart} branch=${branch} />
        <${ProgramPart} branch=${branch} />`
      : html`<p class="quiet small">Write something first: then there is a text, a picture and a program to take along.</p>`}
  </dialog>`;
}

/** A part of the dialog: a title, one sentence, what can be done. */
function Part({ title, says, children }) {
  return html`<section class="share-part"><div><h3>${title}</h3><p class="quiet small">${says}</p></div>
    <div class="row">${children}</div></section>`;
}

const SPEEDS = [[0.25, "×¼"], [1, "×1"], [4, "×4"]];

function PlayPart({ branch, close }) {
  const start = (speed) => () => {
    close();
    openPlayBar(speed);
  };
  return html`<${Part} title="Play" says="The text comes once more as it came, token by token; nothing is computed.">
    ${SPEEDS.map(([speed, name]) => html`<button class="button" disabled=${!branch.steps.length || state.writing !== null}
      aria-label=${`Play at ${name} of the recorded speed`} onClick=${start(speed)}>${name}</button>`)}
  <//>`;
}

function PicturePart({ branch }) {
  const [fault, setFault] = useState(null);
  const take = (kind) => async () => {
    setFault(null);
    try {
      const picture = pictureOf(document.getElementById("view"));
      const file = kind === "svg" ? new Blob([svgText(picture)], { type: "image/svg+xml" }) : await pixels(picture);
      save(fileName(branch, kind), file);
    } catch (error) {
      setFault(error.message);
    }
  };
  return html`<${Part} title="Picture" says="What the page shows behind this window, to enlarge (SVG) or to paste (PNG).">
    <button class="button" id="save-svg" onClick=${take("svg")}>SVG</button>
    <button class="button" id="save-png" onClick=${take("png")}>PNG</button>
    ${fault && html`<p class="bad small" role="alert">${fault}</p>`}
  <//>`;
}

function TextPart({ branch }) {
  const text = async () => {
    await ensureSteps(branch.id);
    return markdownOf(branch);
  };
  const take = async () => save(fileName(branch, "md"), new Blob([await text()], { type: "text/markdown" }));
  return html`<${Part} title="Text" says="Markdown: the prompt, the text, all settings, and the least likely tokens.">
    <button class="button" id="save-markdown" onClick=${take}>Markdown</button>
    <${CopyButton} id="copy-markdown" text=${text} />
  <//>`;
}
