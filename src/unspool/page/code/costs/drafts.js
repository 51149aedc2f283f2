// Speculation: tokens guessed ahead, and how many of them the model would have written itself.

import { html, percent, plural } from "../lib.js";
import { state } from "../state.js";
import { Figures, Switch } from "./parts.js";
import { tallyOf } from "./tally.js";

/**
 * Tokens guessed and kept in the last writing, as the server counts them at its end. While it goes
 * on they are counted from the steps, where a rejected guess shows only at the token it missed.
 */
function draftsOf(branch) {
  const { last } = branch;
  if (state.writing?.branch !== branch.id && last?.drafted_tokens) {
    return { accepted: last.accepted_tokens, rejected: last.drafted_tokens - last.accepted_tokens };
  }
  const { drafts } = tallyOf(branch);
  const before = drafts[Math.min(branch.runs.at(-1)?.from ?? 0, drafts.length - 1)];
  const now = drafts.at(-1);
  return { accepted: now.accepted - before.accepted, rejected: now.rejected - before.rejected };
}

export function Drafts({ branch }) {
  const { accepted, rejected } = draftsOf(branch);
  const all = accepted + rejected;
  const note = branch.notes?.findLast((text) => text.startsWith("drafting stopped"));
  return html`<section class="cost" aria-labelledby="cost-drafts">
    <h3 id="cost-drafts">Speculation</h3>
    <${Switch} setting="speculate" on="lookup" off=${null} usual=${null}>Guess ahead<//>
    ${all > 0 && html`
      <${Figures} of=${[
        ["accepted", html`<span class="accepted">${accepted}</span>`, "accepted"],
        ["rejected", html`<span class="rejected">${rejected}</span>`, "rejected"],
        ["kept", percent(accepted / all), "kept"],
      ]} />
      <svg class="draft-bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img"
        aria-label="Of ${plural(all, "guessed token")}, ${accepted} were accepted and ${rejected} rejected.">
        <rect class="accepted" width=${(accepted / all) * 100} height="10" />
        <rect class="rejected" x=${(accepted / all) * 100} width=${(rejected / all) * 100} height="10" />
      </svg>`}
    ${note && html`<p class="quiet small">${note.charAt(0).toUpperCase() + note.slice(1)}.</p>`}
    <p class="quiet small">Where the text has been before, what came next is guessed, and the model checks all
      guesses in one run. A guess stays only if the model would have written the same: the text is the same with
      and without.${all === 0 ? " In the last writing nothing was guessed." : ""}</p>
  </section>`;
}
