// The program for what is on screen, in three tongues.

import { html, useState } from "../lib.js";
import { CopyButton } from "./copy_button.js";
import { programs } from "./code.js";

const TONGUES = { curl: "curl", openai: "Python, openai", unspool: "Python, unspool" };

export function ProgramPart({ branch }) {
  const [tongue, setTongue] = useState("curl");
  const { code, note } = programs(branch)[tongue];
  const onKey = (event) => {
    const names = Object.keys(TONGUES);
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const next = names[(names.indexOf(tongue) + move + names.length) % names.length];
    setTongue(next);
    document.getElementById(`tongue-${next}`).focus();
  };
  return html`<section class="share-part wide">
    <div><h3>Program</h3><p class="quiet small">Gives the same text, token for token${
      tongue === "unspool" ? ", in a process of its own" : " from this server"}.</p></div>
    <div class="row spread">
      <div class="segments" role="tablist" aria-label="Program" onKeyDown=${onKey}>
        ${Object.entries(TONGUES).map(([name, title]) => html`<button role="tab" id=${`tongue-${name}`} aria-controls="program"
          aria-selected=${tongue === name} tabindex=${tongue === name ? 0 : -1} onClick=${() => setTongue(name)}>${title}</button>`)}
      </div>
      ${code !== null && html`<${CopyButton} id="copy-program" text=${() => code} />`}
    </div>
    <div id="program" role="tabpanel" aria-labelledby=${`tongue-${tongue}`}>
      ${note && html`<p class="small program-note">${note}</p>`}
      ${code !== null && html`<pre class="program mono small" tabindex="0" dir="ltr">${code}</pre>`}
    </div>
  </section>`;
}
