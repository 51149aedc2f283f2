// Exports of the current text: programs that generate it again (curl, Python), and Markdown.

import { api } from "../api.js";
import { count, percent } from "../lib.js";
import { changesBetween, nonDefault, piecesOf, runsOf } from "./session.js";
import { currentModel, textOf } from "../state.js";
import { interventionName } from "../steer/changes.js";

const DEFAULT_MODEL = "SmolLM2-135M-Instruct.Q4_1"; // of unspool.load()
const OPENAI_KNOWS = { temperature: [0, 2], top_p: [0, 1] };
const BESIDE = ["stop", "logit_bias"]; // top-level fields of OpenAI's API; the others go under "unspool"

/** `{curl, openai, unspool}`: each `{code, note}`; code is null if it is not possible. */
export function programs(branch) {
  if (branch.settings.interventions?.length) {
    const note = "This text was generated with changes inside the model. A session file keeps them and generates it again.";
    return { curl: { code: null, note }, openai: { code: null, note }, unspool: { code: null, note } };
  }
  const pieces = piecesOf(branch);
  const isPlain = pieces.length < 2 && pieces.every((piece) => piece.kind === "written" && piece.reached === piece.to);
  const first = pieces[0]?.run ?? { settings: branch.settings, seed: branch.seed };
  const request = { branch, pieces, first, most: branch.steps.length || branch.settings.max_tokens || 200 };
  if (isPlain) return { curl: curlOnce(request), openai: openaiOnce(request), unspool: unspoolProgram(request) };
  const why = pieces.some((piece) => piece.kind === "chosen")
    ? "Some tokens of this text were chosen by hand. "
    : "This text was generated with several settings. ";
  return {
    curl: { ...curlTree(request), note: `${why}The program generates it piece by piece.` },
    openai: { code: null, note: `${why}OpenAI's API does not support that; use curl or unspool.` },
    unspool: { ...unspoolProgram(request), note: `${why}The program generates it piece by piece.` },
  };
}

// -- a shell -----------------------------------------------------------------------------------

/** A text quoted for a shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const key = () => (api.key ? ' -H "authorization: Bearer $KEY"' : "");
const keyNote = () => (api.key ? "KEY is your API key for this server." : "");

function requestOf({ branch, first, most }) {
  const { messages, text } = branch.prompt;
  const body = {
    model: branch.model, ...(messages ? { messages } : { prompt: text }), seed: first.seed, max_tokens: most,
  };
  const extra = {};
  for (const [name, value] of Object.entries(nonDefault(first.settings))) {
    const [low, high] = OPENAI_KNOWS[name] ?? [1, 0];
    if (BESIDE.includes(name) || (value >= low && value <= high)) body[name] = value;
    else extra[name] = value;
  }
  if (Object.keys(extra).length) body.unspool = extra;
  return { path: messages ? "/v1/chat/completions" : "/v1/completions", body: body };
}

function curlOnce(request) {
  const { path, body } = requestOf(request);
  const code = `curl -s ${location.origin}${path} \\
  -H 'content-type: application/json'${key()} \\
  -d ${quoted(JSON.stringify(body, null, 2))}`;
  return { code, note: keyNote() };
}

function curlTree({ branch, pieces, first }) {
  const { messages, text } = branch.prompt;
  const begin = {
    model: branch.model, ...(messages ? { messages } : { prompt: text }), seed: first.seed, ...nonDefault(first.settings),
  };
  const asks = (path, body) => `curl -s -o /dev/null "$tree/$branch${path}" -H "$json"${key()} -d ${quoted(JSON.stringify(body))}`;
  const lines = [
    `tree=${location.origin}/v1/tree json='content-type: application/json'`,
    `branch=$(curl -s $tree -H "$json"${key()} -d ${quoted(JSON.stringify(begin))} |`,
    "  grep -o 'branch-[0-9a-f]*' | head -n 1)",
  ];
  let before = first.settings;
  for (const piece of pieces) {
    if (piece.kind === "chosen") {
      lines.push(asks("/append", { tokens: idsOf(branch, piece) }));
      continue;
    }
    lines.push(asks("/resume", { ...changesBetween(before, piece.run.settings), max_tokens: piece.reached - piece.from }));
    if (piece.reached > piece.to) lines.push(asks("/rewind", { to: piece.to }));
    before = piece.run.settings;
  }
  lines.push(`curl -s "$tree/$branch?steps=false&prompt=false"${key()}`);
  return { code: lines.join("\n") };
}

const idsOf = (branch, { from, to }) => branch.steps.slice(from, to).map((step) => step.token);

// -- Python ------------------------------------------------------------------------------------

/** A value as a Python literal. */
function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item)}`).join(", ")}}`;
}

const keywordArguments = (options) => Object.entries(options).map(([name, value]) => (
  name === "logit_bias" ? `logit_bias=${byToken(value)}` : `${name}=${python(value)}`));

/** A dict with token ids as numbers. */
const byToken = (biases) => `{${Object.entries(biases).map(([token, amount]) => `${token}: ${amount}`).join(", ")}}`;

function openaiOnce(request) {
  const { path, body } = requestOf(request);
  const { unspool, ...options } = body;
  const lines = keywordArguments(options);
  if (unspool) lines.push(`extra_body=${python({ unspool })}`);
  const isChat = path.includes("chat");
  const code = `${api.key ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${python(`${location.origin}/v1`)}, api_key=${api.key ? 'os.environ["KEY"]' : '"none"'})
answer = client.${isChat ? "chat.completions" : "completions"}.create(
    ${lines.join(",\n    ")},
)
print(answer.choices[0].${isChat ? "message.content" : "text"})`;
  return { code, note: keyNote() };
}

function unspoolProgram({ branch, pieces, first, most }) {
  const { messages, text } = branch.prompt;
  const [begin, ...others] = pieces[0]?.kind === "chosen" ? [null, ...pieces] : pieces;
  const options = { seed: first.seed, max_tokens: begin ? begin.reached : pieces.length ? 0 : most, ...nonDefault(first.settings) };
  const lines = [
    "import unspool",
    "",
    branch.model === DEFAULT_MODEL ? "lm = unspool.load()" : `lm = unspool.load(${python(branch.model)})  # its path or repo id`,
    `text = lm.${messages ? "chat" : "generate"}(`,
    `    ${[python(messages ?? text), ...keywordArguments(options)].join(",\n    ")},`,
    ")",
  ];
  if (begin && begin.reached > begin.to) lines.push(`text = text.rewind(${begin.to})`);
  let before = first.settings;
  for (const piece of others) {
    if (piece.kind === "chosen") {
      lines.push(`text = text.choose(${python(idsOf(branch, piece))})  # ${comment(branch, piece)}`);
      continue;
    }
    const changes = changesBetween(before, piece.run.settings);
    lines.push(`text = text.resume(${keywordArguments({ max_tokens: piece.reached - piece.from, ...changes }).join(", ")})`);
    if (piece.reached > piece.to) lines.push(`text = text.rewind(${piece.to})`);
    before = piece.run.settings;
  }
  lines.push("print(text)");
  return { code: lines.join("\n"), note: "" };
}

/** The text of a piece as a one-line comment. */
const comment = (branch, piece) =>
  JSON.stringify(branch.steps.slice(piece.from, piece.to).map((step) => step.piece).join("").slice(0, 60))
    .replace(/[\u0085\u2028\u2029]/g, "?");

// -- Markdown -----------------------------------------------------------------------------------

const LEAST_LIKELY = 10;

/** Escape characters that have a meaning in Markdown. */
function escapeMarkdown(text) {
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

/** Text as paragraphs; single line breaks are kept. */
const paragraphs = (text) =>
  text.trim().split(/\n{2,}/).map((part) => escapeMarkdown(part).replaceAll("\n", "\\\n")).join("\n\n");

/** A token or value as code in a table cell. */
function cell(text) {
  const visible = text.replaceAll("\n", "⏎").replaceAll("\r", "␍").replaceAll("\t", "⇥").replaceAll("|", "\\|");
  const fence = "`".repeat(1 + Math.max(0, ...(visible.match(/`+/g) ?? []).map((run) => run.length)));
  const pad = /^`|`$|^ .* $/.test(visible) ? " " : "";
  return `${fence}${pad}${visible || " "}${pad}${fence}`;
}

const table = (head, rows) => [head, head.map(() => "---"), ...rows].map((row) => `| ${row.join(" | ")} |`).join("\n");

export function markdownOf(branch) {
  const { messages, text } = branch.prompt;
  const prompt = messages
    ? messages.map(({ role, content }) => `**${role}**\n\n${quote(paragraphs(String(content ?? "")))}`).join("\n\n")
    : quote(paragraphs(text));
  return [
    `# ${escapeMarkdown(titleOf(branch))}`,
    "## Prompt", prompt,
    "## Text", paragraphs(textOf(branch)) || "*(empty)*",
    "## Settings", settingsTable(branch),
    ...leastLikely(branch),
  ].join("\n\n") + "\n";
}

const quote = (text) => text.split("\n").map((line) => `> ${line}`.trimEnd()).join("\n");

function titleOf(branch) {
  const question = branch.prompt.messages?.findLast((message) => message.role === "user")?.content;
  const words = (branch.name || String(question ?? branch.prompt.text)).replace(/\s+/g, " ").trim();
  return words.length > 80 ? `${words.slice(0, 79)}…` : words || "A text";
}

function settingsTable(branch) {
  const model = currentModel();
  const fingerprint = model?.id === branch.model ? model.unspool.system_fingerprint : null;
  const runs = runsOf(branch).filter((run) => run.from === 0 || run.from < branch.steps.length);
  const settingsText = (run) => {
    const settings = Object.entries(nonDefault(run.settings)).map(([name, value]) => `${name} ${
      name === "interventions" ? value.map(interventionName).join("; ") : JSON.stringify(value)}`);
    return settings.length ? settings.map(cell).join(" ") : "default";
  };
  const rows = [["model", cell(branch.model)], ["seed", cell(String(branch.seed))], ["tokens", count(branch.steps.length)]];
  if (fingerprint) rows.splice(1, 0, ["fingerprint", cell(fingerprint)]);
  let before = null;
  for (const run of runs) {
    const now = settingsText(run);
    if (now !== before) rows.push([run.from ? `settings from token ${count(run.from + 1)}` : "settings", now]);
    before = now;
  }
  const chosenSteps = branch.steps.filter((step) => step.chosen);
  if (chosenSteps.length) rows.push(["chosen by hand", chosenSteps.map((step) => cell(step.piece)).join(" ")]);
  return table(["what", "value"], rows);
}

function leastLikely(branch) {
  const steps = branch.steps
    .filter((step) => step.logprob !== null)
    .sort((a, b) => a.logprob - b.logprob)
    .slice(0, LEAST_LIKELY)
    .filter((step) => step.rank > 0);
  if (!steps.length) return [];
  const rows = steps.map((step) => [
    count(step.index + 1), cell(step.piece), percent(Math.exp(step.logprob)), count(step.rank + 1),
    step.candidates.length ? cell(step.candidates[0].text) : "–",
  ]);
  return ["## The least likely tokens", table(["position", "token", "probability", "rank", "most likely"], rows)];
}
