// The text as Markdown: what was asked, what was written, and what is needed to write it again.

import { count, percent } from "../lib.js";
import { modelNow, textOf } from "../state.js";
import { runsOf, unusual } from "./settings.js";

const LEAST_LIKELY = 10;

/** Words that are to be read as they are, whatever they mean to Markdown. */
function escaped(text) {
  return text
    .replace(/\r\n?/g, "\n")
    .replace(/[\\`*_[\]<>&|~#$]/g, "\\$&")
    .split("\n")
    .map((line) => line
      .replace(/^(\s*)([+\-=]|\d+(?=[.)]))/, (_, space, sign) => (
        /\d/.test(sign) ? `${space}${sign}\\` : `${space}\\${sign}`))
      .replace(/^[ \t]+/, (space) => "\u00a0".repeat(space.replaceAll("\t", "    ").length)))
    .join("\n");
}

/** As paragraphs; a single line break stays one. */
const paragraphs = (text) =>
  text.trim().split(/\n{2,}/).map((part) => escaped(part).replaceAll("\n", "\\\n")).join("\n\n");

/** A token or a value in a cell of a table. */
export function cell(text) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\r", "␍").replaceAll("\t", "⇥").replaceAll("|", "\\|");
  const fence = "`".repeat(1 + Math.max(0, ...(shown.match(/`+/g) ?? []).map((run) => run.length)));
  const pad = /^`|`$|^ .* $/.test(shown) ? " " : "";
  return `${fence}${pad}${shown || " "}${pad}${fence}`;
}

const table = (head, rows) => [head, head.map(() => "---"), ...rows].map((row) => `| ${row.join(" | ")} |`).join("\n");

export function markdownOf(branch) {
  const { messages, text } = branch.prompt;
  const prompt = messages
    ? messages.map(({ role, content }) => `**${role}**\n\n${quote(paragraphs(String(content ?? "")))}`).join("\n\n")
    : quote(paragraphs(text));
  return [
    `# ${escaped(titleOf(branch))}`,
    "## Prompt", prompt,
    "## Text", paragraphs(textOf(branch)) || "*(nothing written yet)*",
    "## How it was written", settingsTable(branch),
    ...leastLikely(branch),
  ].join("\n\n") + "\n";
}

const quote = (text) => text.split("\n").map((line) => `> ${line}`.trimEnd()).join("\n");

function titleOf(branch) {
  const asked = branch.prompt.messages?.findLast((message) => message.role === "user")?.content;
  const words = (branch.name || String(asked ?? branch.prompt.text)).replace(/\s+/g, " ").trim();
  return words.length > 80 ? `${words.slice(0, 79)}…` : words || "A text";
}

function settingsTable(branch) {
  const model = modelNow();
  const fingerprint = model?.id === branch.model ? model.unspool.system_fingerprint : null;
  const runs = runsOf(branch).filter((run) => run.from === 0 || run.from < branch.steps.length);
  const said = (run) => {
    const found = Object.entries(unusual(run.settings)).map(([name, value]) => `${name} ${JSON.stringify(value)}`);
    return found.length ? found.map(cell).join(" ") : "as usual";
  };
  const rows = [["model", cell(branch.model)], ["seed", cell(String(branch.seed))], ["tokens", count(branch.steps.length)]];
  if (fingerprint) rows.splice(1, 0, ["fingerprint", cell(fingerprint)]);
  let before = null;
  for (const run of runs) {
    const now = said(run);
    if (now !== before) rows.push([run.from ? `settings from token ${count(run.from + 1)}` : "settings", now]);
    before = now;
  }
  const chosen = branch.steps.filter((step) => step.chosen);
  if (chosen.length) rows.push(["put in by hand", chosen.map((step) => cell(step.piece)).join(" ")]);
  return table(["what", "value"], rows);
}

function leastLikely(branch) {
  const found = branch.steps
    .filter((step) => step.logprob !== null)
    .sort((a, b) => a.logprob - b.logprob)
    .slice(0, LEAST_LIKELY)
    .filter((step) => step.rank > 0);
  if (!found.length) return [];
  const rows = found.map((step) => [
    count(step.index + 1), cell(step.piece), percent(Math.exp(step.logprob)), count(step.rank + 1),
    step.candidates.length ? cell(step.candidates[0].text) : "–",
  ]);
  return ["## The least likely tokens", table(["place", "token", "probability", "rank", "likeliest there"], rows)];
}
