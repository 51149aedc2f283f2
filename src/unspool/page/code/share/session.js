// A session as a file: every branch with all its steps, and what the page showed of them.

import { modelNow, samePrompt, sharedSteps, state } from "../state.js";

export const VERSION = 1;

/** What the file holds; branches that were not fetched yet must be fetched before. */
export function packed() {
  const model = modelNow();
  return {
    unspool_session: VERSION,
    saved: new Date().toISOString(),
    model: { id: state.model, system_fingerprint: model?.unspool.system_fingerprint ?? null },
    current: state.current,
    view: {
      mode: state.mode,
      tint: state.tint,
      selected: state.selected,
      panel: state.panel,
      draft: state.draft,
      system: state.system,
      settings: state.settings,
    },
    branches: parentsFirst([...state.branches.values()]).map(packedBranch),
  };
}

/** Parents before their children, and otherwise in the order of their birth. */
function parentsFirst(branches) {
  const known = new Map(branches.map((branch) => [branch.id, branch]));
  const found = new Set();
  const put = (branch) => {
    if (found.has(branch)) return;
    const parent = known.get(branch.parent);
    if (parent) put(parent);
    found.add(branch);
  };
  [...branches].sort((a, b) => a.created - b.created).forEach(put);
  return [...found];
}

function packedBranch(branch) {
  const parent = state.branches.get(branch.parent);
  const since = shared(branch, parent);
  return {
    id: branch.id,
    name: branch.name,
    parent: parent ? branch.parent : null,
    forked_at: parent ? branch.forked_at : null,
    created: branch.created,
    model: branch.model,
    prompt: samePrompt(branch, parent) ? null : branch.prompt, // null: the parent's
    seed: branch.seed,
    settings: branch.settings,
    finish_reason: branch.finish_reason,
    runs: branch.runs,
    since,
    steps: branch.steps.slice(since),
    retracted: branch.retracted,
    added: [...(branch.added ?? [])],
  };
}

/** How many steps need not be told again, because they stand in the parent. */
function shared(branch, parent) {
  const at = branch.forked_at ?? 0;
  if (!samePrompt(branch, parent) || parent.steps.length < at) return 0;
  return sharedSteps(parent.steps, branch.steps) >= at ? at : 0;
}

/** A file's name from what it is about: unspool-2026-11-15-leaves.json */
export function fileName(branch, ending) {
  const day = new Date();
  const two = (number) => String(number).padStart(2, "0");
  const date = `${day.getFullYear()}-${two(day.getMonth() + 1)}-${two(day.getDate())}`;
  return ["unspool", date, topic(branch)].filter(Boolean).join("-") + `.${ending}`;
}

/** The longest of the first words a person wrote, which is mostly what a text is about. */
function topic(branch) {
  const asked = branch?.prompt?.messages?.findLast((message) => message.role === "user")?.content;
  const words = String(asked ?? branch?.prompt?.text ?? "").toLowerCase().match(/[a-z0-9]{4,24}/g) ?? [];
  const first = words.slice(0, 8).filter((word) => !SMALL_WORDS.has(word));
  return first[0] ?? words[0] ?? "";
}

const SMALL_WORDS = new Set(
  ("about after also been does from have into just more most over some that their them then there these "
    + "they this were what when where which while will with would write tell your").split(" "),
);
