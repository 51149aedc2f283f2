// Parts that come when they are first shown: the page opens with what writing needs.

import { html, useEffect, useState } from "./lib.js";

const loaded = new Map();

export function Lazy({ file, name, quiet = false, ...rest }) {
  const [part, setPart] = useState(() => loaded.get(file) ?? null);
  const [fails, setFails] = useState(false);
  useEffect(() => {
    if (part) return;
    import(file).then(
      (module) => {
        loaded.set(file, module[name]);
        setPart(() => module[name]);
      },
      (error) => {
        console.error(error);
        setFails(true);
      },
    );
  }, []);
  if (part) return html`<${part} ...${rest} />`;
  if (fails && !quiet) return html`<p class="bad">This part could not be loaded. Is the server still running?</p>`;
  return null;
}
