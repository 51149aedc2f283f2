// The Think view: a search for a better text, watched as it grows.

import { html, useChanges, useEffect, useState } from "../lib.js";
import { connect } from "../actions.js";
import { Popover } from "../compare/popover.js";
import { TintChoice } from "../write/controls.js";
import { Asking } from "./asking.js";
import { NodeCard } from "./node.js";
import { change, isLost, thinking } from "./runs.js";
import { Outcome, Spending, Votes } from "./standing.js";
import { SearchTree } from "./tree.js";

export function ThinkView() {
  useChanges("think", "models", "mode", "branches");
  useEffect(() => { connect(); }, []);
  const [picked, setPicked] = useState(null);
  const close = (back) => {
    if (back && picked?.element.isConnected) picked.element.focus();
    setPicked(null);
  };
  useEffect(() => setPicked(null), [thinking.open]);
  return html`<section class="think stack" aria-label="Think">
    <h2>Think</h2>
    <p class="quiet small">Spend more at writing time: a policy tries several ways to go on, a judge scores them, and a budget says how many
      tokens that may cost. Judges that run files are for the command line: <code>unspool think --judge python:FILE.py</code>.</p>
    <${Asking} />
    <${Outcome} />
    ${thinking.start && html`<${Spending} />
      <div class="row"><${TintChoice} /><${Hiding} /></div>
      <div class="think-columns"><${SearchTree} /><div class="stack think-side"><${NodeCard} pick=${setPicked} /><${Votes} /></div></div>`}
    ${picked && html`<${Popover} picked=${picked} close=${close} />`}
  </section>`;
}

function Hiding() {
  if (!thinking.nodes.some(({ number }) => isLost(number))) return null;
  return html`<label class="small"><input type="checkbox" id="think-hides" checked=${thinking.hides}
    onChange=${(event) => change({ hides: event.target.checked })} /> Hide what was pruned</label>`;
}
