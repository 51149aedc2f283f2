// Programs that give the text on screen once more: for a shell, and for Python.

import { api } from "../api.js";
import { changesBetween, piecesOf, unusual } from "./settings.js";

const DEFAULT_MODEL = "SmolLM2-135M-Instruct.Q4_1"; // what unspool.load() loads
const OPENAI_KNOWS = { temperature: [0, 2], top_p: [0, 1] };
const BESIDE = ["stop", "logit_bias"]; // these stand beside the prompt in OpenAI's API, the rest under "unspool"

/** `{curl, openai, unspool}`: each `{code, note}`; code is null where there is no way. */
export function programs(branch) {
  const pieces = piecesOf(branch);
  const isPlain = pieces.length < 2 && pieces.every((piece) => piece.kind === "written" && piece.reached === piece.to);
  const first = pieces[0]?.run ?? { settings: branch.settings, seed: branch.seed };
  const asked = { branch, pieces, first, most: branch.steps.length || branch.settings.max_tokens || 200 };
  if (isPlain) return { curl: curlOnce(asked), openai: openaiOnce(asked), unspool: unspoolProgram(asked) };
  const why = pieces.some((piece) => piece.kind === "chosen")
    ? "Some words here were put in by hand. "
    : "This text was written with more than one kind of settings. ";
  return {
    curl: { ...curlTree(asked), note: `${why}So each stretch is asked for by itself.` },
    openai: { code: null, note: `${why}OpenAI's API has no way to ask for that; curl and unspool do.` },
    unspool: { ...unspoolProgram(asked), note: `${why}So each stretch is asked for by itself.` },
  };
}

// -- a shell -----------------------------------------------------------------------------------

/** A text as one word of a shell. */
export const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const key = () => (api.key ? ' -H "authorization: Bearer $KEY"' : "");
const keyNote = () => (api.key ? "KEY is your key of this server." : "");

function requestOf({ branch, first, most }) {
  const { messages, text } = branch.prompt;
  const found = {
    model: branch.model, ...(messages ? { messages } : { prompt: text }), seed: first.seed, max_tokens: most,
  };
  const own = {};
  for (const [name, value] of Object.entries(unusual(first.settings))) {
    const [low, high] = OPENAI_KNOWS[name] ?? [1, 0];
    if (BESIDE.includes(name) || (value >= low && value <= high)) found[name] = value;
    else own[name] = value;
  }
  if (Object.keys(own).length) found.unspool = own;
  return { path: messages ? "/v1/chat/completions" : "/v1/completions", body: found };
}

function curlOnce(asked) {
  const { path, body } = requestOf(asked);
  const code = `curl -s ${location.origin}${path} \\
  -H 'content-type: application/json'${key()} \\
  -d ${quoted(JSON.stringify(body, null, 2))}`;
  return { code, note: keyNote() };
}

function curlTree({ branch, pieces, first }) {
  const { messages, text } = branch.prompt;
  const begin = {
    model: branch.model, ...(messages ? { messages } : { prompt: text }), seed: first.seed, ...unusual(first.settings),
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

/** A value as Python writes it. */
function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`).join(", ")}}`;
}

const given = (options) => Object.entries(options).map(([name, value]) => (
  name === "logit_bias" ? `logit_bias=${byToken(value)}` : `${name}=${python(value)}`));

/** In Python, ids of tokens are numbers. */
const byToken = (biases) => `{${Object.entries(biases).map(([token, amount]) => `${token}: ${amount}`).join(", ")}}`;

function openaiOnce(asked) {
  const { path, body } = requestOf(asked);
  const { unspool, ...rest } = body;
  const lines = given(rest);
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
  const [begin, ...more] = pieces[0]?.kind === "chosen" ? [null, ...pieces] : pieces;
  const options = { seed: first.seed, max_tokens: begin ? begin.reached : pieces.length ? 0 : most, ...unusual(first.settings) };
  const lines = [
    "import unspool",
    "",
    branch.model === DEFAULT_MODEL ? "lm = unspool.load()" : `lm = unspool.load(${python(branch.model)})  # its path or repo id`,
    `text = lm.${messages ? "chat" : "generate"}(`,
    `    ${[python(messages ?? text), ...given(options)].join(",\n    ")},`,
    ")",
  ];
  if (begin && begin.reached > begin.to) lines.push(`text = text.rewind(${begin.to})`);
  let before = first.settings;
  for (const piece of more) {
    if (piece.kind === "chosen") {
      lines.push(`text = text.choose(${python(idsOf(branch, piece))})  # ${comment(branch, piece)}`);
      continue;
    }
    const changes = changesBetween(before, piece.run.settings);
    lines.push(`text = text.resume(${given({ max_tokens: piece.reached - piece.from, ...changes }).join(", ")})`);
    if (piece.reached > piece.to) lines.push(`text = text.rewind(${piece.to})`);
    before = piece.run.settings;
  }
  lines.push("print(text)");
  return { code: lines.join("\n"), note: "" };
}

/** The words, so that a reader of the program knows them; a comment must stay in its line. */
const comment = (branch, piece) =>
  JSON.stringify(branch.steps.slice(piece.from, piece.to).map((step) => step.piece).join("").slice(0, 60))
    .replace(/[\u0085\u2028\u2029]/g, "?");
