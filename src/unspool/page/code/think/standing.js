// How the search stands: what was spent of the budget, what came of it, and the votes.

import { count, duration, html, plural } from "../lib.js";
import { isLost, thinking, tokensOf } from "./runs.js";
import { scored } from "./words.js";

const KINDS = { prompt: "prompt", written: "written", judged: "read to judge" };

/** What was spent of the budget, and on what. */
export function Spending() {
  const { spent, running, start } = thinking;
  if (!start) return null;
  const { growing = 0, ...told } = spent ?? { prompt: 0, written: 0, judged: 0 };
  const limit = told.limit ?? start.budget;
  // What grew since the server last told is at the most what it will tell.
  const parts = { prompt: told.prompt, written: told.written + growing, judged: told.judged };
  const total = Math.min(limit, Object.values(parts).reduce((sum, part) => sum + part, 0));
  return html`<div class="think-spending">
    <div class="track" role="meter" aria-label="Tokens computed" aria-valuemin="0" aria-valuemax=${limit} aria-valuenow=${total}
      aria-valuetext=${`${total} of ${plural(limit, "token")}`}>
      ${Object.entries(parts).map(([kind, part]) => html`<span key=${kind} class=${`think-${kind}`} style=${{ width: `${(part / limit) * 100}%` }} />`)}</div>
    <p class="small" data-number="spent"><b>${count(total)}</b> of ${plural(limit, "token")}${running ? " so far" : ""}:
      ${Object.entries(KINDS).map(([kind, name]) => html` <span class="think-key"><i class=${`think-${kind}`} aria-hidden="true" /> ${parts[kind]} ${name}</span>`)}</p>
  </div>`;
}

/** The search in a sentence. */
export function Outcome() {
  const { nodes, winner, done, running, stopped, seconds, start } = thinking;
  if (!start) return html`<p role="status">${running ? "The search begins …" : ""}</p>`;
  const texts = plural(nodes.length - 1, "piece");
  const pruned = nodes.filter(({ number }) => isLost(number)).length;
  if (running || winner === null) {
    const said = running ? "Searching" : stopped ? "Stopped; the server has given everything back" : "Not finished";
    return html`<p role="status">${said}: ${texts} of text so far, ${pruned} pruned.</p>`;
  }
  const { score } = nodes[winner];
  const { length } = tokensOf(winner);
  const total = done?.spent.total;
  return html`<p role="status">Text ${winner} won${score == null ? "" : ` with ${scored(score)}`}, of ${texts} of text (${pruned} pruned), in ${
    duration(done?.seconds ?? seconds)}.${total && length ? ` ${(total / length).toFixed(1)} tokens were computed for each of its ${length}.` : ""}</p>`;
}

/** What the texts answer, where they vote. */
export function Votes() {
  const votes = new Map();
  for (const { answer, score } of thinking.nodes) {
    if (answer == null || score == null) continue;
    const known = votes.get(String(answer)) ?? { count: 0, score: -Infinity };
    votes.set(String(answer), { count: known.count + 1, score: Math.max(known.score, score) });
  }
  if (!votes.size) return null;
  const most = Math.max(...[...votes.values()].map(({ score }) => score), 1e-9);
  const won = String(thinking.nodes[thinking.winner]?.answer);
  const rows = [...votes].sort(([, one], [, other]) => other.score - one.score).sort(([one], [other]) => (other === won) - (one === won));
  return html`<section aria-label="Votes" class="think-votes"><h3>Votes</h3><div class="bars">${rows.map(([answer, { count, score }]) => html`
    <span key=${answer} dir="auto">${answer}</span><div class="track" aria-hidden="true"><span style=${{ width: `${Math.max(0, score / most) * 100}%` }} /></div>
    <span class="small">${scored(score)}, ${plural(count, "text")}</span>`)}</div></section>`;
}
