// How often each word came where the samples part first, beside the chance it had.

import { Piece, html, percent } from "../lib.js";
import { wordsOf } from "./wordtree.js";

export function FirstWords({ split, tree, number }) {
  if (!split) return null;
  const behind = tree.steps.length ? html`After “${wordsOf(tree.steps)}”` : "At the first token";
  const most = Math.max(...split.rows.map((row) => Math.max(row.count / number, row.after ?? 0)));
  const width = (share) => ({ width: `${(share / most) * 100}%` });
  return html`<section class="cmp-first" aria-label="Where the samples part first">
    <h3>${behind}</h3>
    <p class="quiet small">The bar is how many of the ${number} samples took a word, the line the chance it had after
      the settings. With more samples they come closer: that is all sampling does.</p>
    <table>
      <thead><tr><th scope="col">Word</th><th scope="col"><span class="visually-hidden">Bar</span></th>
        <th scope="col">Samples</th><th scope="col">After settings</th><th scope="col">Model</th></tr></thead>
      <tbody>${split.rows.map((row) => html`<tr key=${row.token} data-token=${row.token} data-count=${row.count}>
        <th scope="row"><${Piece} text=${row.text} /></th>
        <td aria-hidden="true"><div class="track"><span style=${width(row.count / number)} />
          ${row.after !== null && html`<i style=${{ left: width(row.after).width }} />`}</div></td>
        <td>${row.count} of ${number}</td>
        <td>${percent(row.after)}</td>
        <td>${percent(row.model)}</td>
      </tr>`)}</tbody>
    </table>
  </section>`;
}
