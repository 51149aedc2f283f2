// All that can be taken along from the page: the session, a picture, the text, a program.

import { ensureSteps } from "../actions.js";
import { clipboard, html, save, Tabs, useChanges, useEffect, useRef, useState } from "../lib.js";
import { branchNow, state } from "../state.js";
import { programs } from "./code.js";
import { markdownOf } from "./markdown.js";
import { pictureOf, pixels, svgText } from "./picture.js";
import { openPlayBar, SPEEDS } from "./play.js";
import { fileName } from "./session.js";
import { SessionPart } from "./session_part.js";

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

/** `text` gives what is to be copied. */
function CopyButton({ id, text }) {
  const [said, setSaid] = useState("Copy");
  const copy = async () => {
    setSaid((await clipboard(await text())) ? "Copied" : "Not allowed here");
    setTimeout(() => setSaid("Copy"), 2000);
  };
  return html`<button class="button" id=${id} onClick=${copy}><span aria-live="polite">${said}</span></button>`;
}

const TONGUES = { curl: "curl", openai: "Python, openai", unspool: "Python, unspool" };

function ProgramPart({ branch }) {
  const [tongue, setTongue] = useState("curl");
  const { code, note } = programs(branch)[tongue];
  return html`<section class="share-part wide">
    <div><h3>Program</h3><p class="quiet small">Gives the same text, token for token${
      tongue === "unspool" ? ", in a process of its own" : " from this server"}.</p></div>
    <div class="row spread">
      <${Tabs} label="Program" prefix="tongue" controls="program" tabs=${TONGUES} now=${tongue} pick=${setTongue} />
      ${code !== null && html`<${CopyButton} id="copy-program" text=${() => code} />`}
    </div>
    <div id="program" role="tabpanel" aria-labelledby=${`tongue-${tongue}`}>
      ${note && html`<p class="small program-note">${note}</p>`}
      ${code !== null && html`<pre class="program mono small" tabindex="0" dir="ltr">${code}</pre>`}
    </div>
  </section>`;
}
