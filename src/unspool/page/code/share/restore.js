// What was read from a file is put on the page: branches the server has written again, or the recorded
// ones, which can be read and played but not gone on with.

import { jump, pushUndo, useSettings } from "../actions.js";
import { adopt, changed, state } from "../state.js";

let recordings = 0;

/** Show the session; `results` as `replay` gives them, or null: all of it only as recorded. */
export async function restore(session, results) {
  const before = state.current;
  const ids = new Map();
  for (const { branch, told } of results ?? session.branches.map((each) => ({ branch: each, told: null }))) {
    const found = told ? { ...told, recorded: false } : recorded(branch);
    const parent = ids.get(branch.parent) ?? null;
    const kept = adopt({ ...found, parent, forked_at: parent === null ? null : branch.forked_at });
    Object.assign(kept, { runs: branch.runs, retracted: branch.retracted, added: new Set(branch.added) });
    ids.set(branch.id, kept.id);
  }
  const { mode, tint, draft, system, settings, selected, panel } = session.view;
  Object.assign(state, { mode, tint, draft, system, view: "write", settings: {} });
  if (["step", "inside", "map", "costs", "settings"].includes(panel)) state.panel = panel;
  useSettings(settings);
  changed("mode", "tint", "draft", "system", "panel", "view", "branches");
  const shown = ids.get(session.current) ?? [...ids.values()].at(-1) ?? null;
  await jump(shown, selected);
  pushUndo({ label: "load a session", undo: () => jump(before), redo: () => jump(shown, selected) });
}

/** A branch of the file as the server would tell it. */
function recorded(branch) {
  recordings += 1;
  const { steps, since, ...rest } = branch;
  return {
    ...rest,
    id: `recorded-${recordings}-${Date.now().toString(36)}`,
    recorded: true,
    writing: false,
    length: steps.length,
    prompt_tokens: branch.prompt.tokens.length,
    preview: steps.slice(branch.forked_at ?? 0).map((step) => step.text).join("").slice(0, 80),
    text: steps.map((step) => step.text).join(""),
    logprob: steps.reduce((sum, step) => sum + (step.logprob ?? 0), 0),
    settings: { ...branch.settings, seed: branch.seed },
    notes: [], error: null, last: null,
    usage: {
      prompt_tokens: branch.prompt.tokens.length,
      completion_tokens: steps.length,
      first_token_seconds: steps[0]?.seconds ?? 0,
      total_seconds: steps.reduce((sum, step) => sum + step.seconds, 0),
      reused_tokens: 0,
      total_tokens: branch.prompt.tokens.length + steps.length,
    },
    since: 0,
    steps: [...steps],
  };
}
