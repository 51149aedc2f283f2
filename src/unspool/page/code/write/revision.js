// Revising: doubtful words and what would fit better, as tracked changes. In the text the old words are struck
// through and the new ones stand behind them; the list below takes them or leaves them, one by one or all.

import { api } from "../api.js";
import { html, percent, plural, useChanges, useEffect, useRef } from "../lib.js";
import { branchNow, changed, state } from "../state.js";
import { clearFault, setFault } from "../actions.js";
import { noRevision, replaceParts } from "./replacing.js";

const PLACES = 16; // words looked at

/** Ask for proposals; they come one by one. */
export async function revise() {
  const branch = branchNow();
  if (!branch || state.writing) return;
  state.revision?.control?.abort();
  clearFault();
  const revision = {
    branch: branch.id, proposals: [], current: null, looked: 0, looking: true, control: new AbortController(),
  };
  state.revision = revision;
  changed("revision");
  try {
    const body = { places: PLACES, stream: true };
    const options = { signal: revision.control.signal };
    for await (const { event, data } of api.stream(`/v1/tree/${branch.id}/revise`, body, options)) {
      revision.looked = data.looked;
      if (event === "proposal") {
        revision.proposals.push(data);
        revision.proposals.sort((one, other) => one.first - other.first);
      }
      changed("revision");
    }
  } catch (error) {
    if (error.name !== "AbortError") setFault(error);
  }
  revision.looking = false;
  changed("revision");
}

/** No more proposals; those that are there stay. */
const enough = () => state.revision?.control.abort();

function close() {
  enough();
  noRevision();
  document.getElementById("text")?.focus({ preventScroll: true });
}

/** Make some of the changes; the others stay open, and move with the text. */
async function accept(taken) {
  const was = state.revision;
  const branch = state.branches.get(was.branch);
  enough();
  const rest = was.proposals.filter((change) => !taken.includes(change));
  const after = (fork) => {
    const longer = fork.steps.length - branch.steps.length;
    const moved = rest.map((change) => (
      change.first < taken[0].last ? change : { ...change, first: change.first + longer, last: change.last + longer }));
    state.revision = rest.length ? { ...was, branch: fork.id, proposals: moved, current: null, looking: false } : null;
  };
  const label = taken.length === 1 ? `change “${taken[0].old}” to “${taken[0].new}”` : plural(taken.length, "change");
  await replaceParts(branch, taken, { label, after, before: () => { state.revision = { ...was, looking: false }; } });
}

function reject(taken) {
  const { revision } = state;
  revision.proposals = revision.proposals.filter((change) => !taken.includes(change));
  if (!revision.proposals.length && !revision.looking) close();
  else changed("revision");
}

export function RevisionPanel() {
  useChanges("revision", "writing");
  const list = useRef();
  const { revision } = state;
  useEffect(() => {
    list.current?.querySelector(".current-change")?.scrollIntoView({ block: "nearest" });
  }, [revision?.current]);
  if (!revision) return null;
  const { proposals, looking, looked } = revision;
  const busy = state.writing !== null;
  const said = looking ? `Looking at doubtful words … ${looked} of up to ${PLACES}`
    : proposals.length ? `${plural(proposals.length, "proposal")}, after ${plural(looked, "word")} looked at`
      : `Nothing fits better: ${plural(looked, "doubtful word")} looked at.`;
  return html`<section class="revision panel" aria-label="Revision">
    <div class="row"><h2>Revision</h2> <span class="grow quiet small" role="status">${said}</span>
      ${looking ? html`<button class="button tiny" onClick=${enough}>Enough</button>`
        : proposals.length > 1 && html`<button class="button tiny" disabled=${busy} onClick=${() => accept(proposals)}>Accept all</button>
          <button class="button tiny" onClick=${() => reject(proposals)}>Reject all</button>`}
      <button class="button plain tiny" aria-label="Close the revision" onClick=${close}>×</button></div>
    <ul class="revision-list" ref=${list}>${proposals.map((change) => html`<${Change} key=${`${change.first} ${change.old}`} change=${change} busy=${busy} />`)}</ul>
  </section>`;
}

function Change({ change, busy }) {
  const words = `“${change.old}” to “${change.new}”`;
  const look = () => {
    state.revision.current = change;
    changed("revision");
  };
  return html`<li class=${change === state.revision.current ? "current-change" : ""} onPointerEnter=${look} onFocusIn=${look}>
    <span class="grow"><del>${change.old}</del> <ins>${change.new}</ins></span>
    <span class="quiet small" title="Among the words that were weighed here">${percent(change.probability)}</span>
    <button class="button tiny" disabled=${busy} aria-label=${`Accept ${words}`} onClick=${() => accept([change])}>Accept</button>
    <button class="button tiny" aria-label=${`Reject ${words}`} onClick=${() => reject([change])}>Reject</button></li>`;
}
