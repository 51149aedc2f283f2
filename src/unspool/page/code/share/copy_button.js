// A button that copies, and says so.

import { clipboard, html, useState } from "../lib.js";

/** `text` gives what is to be copied. */
export function CopyButton({ id, text }) {
  const [said, setSaid] = useState("Copy");
  const copy = async () => {
    setSaid((await clipboard(await text())) ? "Copied" : "Not allowed here");
    setTimeout(() => setSaid("Copy"), 2000);
  };
  return html`<button class="button" id=${id} onClick=${copy}><span aria-live="polite">${said}</span></button>`;
}
