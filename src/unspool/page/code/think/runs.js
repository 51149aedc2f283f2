// The state of the Search view: search policies and judges, the request, and the search tree as events report it.

import { addBranch, applyEvent, CANDIDATES, connect, dropUnused } from "../actions.js";
import { api, ApiError } from "../api.js";
import { readPrompt } from "../compare/prompt.js";
import { changed, state } from "../state.js";

const integerOption = (name, title, defaultValue, least = 1) => ({ name, title, defaultValue: String(defaultValue), least });
const stepOption = { name: "step", title: "A piece is a", defaultValue: "sentence", among: ["sentence", "line", "paragraph", "tokens"] };
const pieceOption = integerOption("tokens", "… of at most", 32);

/** By their names on the server; `isLong`: one text that may use the whole budget. */
export const POLICIES = {
  "best-of": { title: "Best of n", help: "Sample n texts and keep the one with the highest score.", options: [integerOption("n", "Texts", 8)] },
  vote: { title: "Vote", help: "Sample n texts; the most frequent answer wins (self-consistency).", options: [integerOption("n", "Texts", 8)] },
  beam: { title: "Beam search", help: "After each piece only the best texts are kept, and each is continued in several ways.",
    options: [integerOption("keep", "Beams", 2), integerOption("width", "Continuations each", 3), stepOption, pieceOption] },
  dvts: { title: "Diverse subtrees (DVTS)", help: "Independent beam searches, so that their texts stay different; the best text wins.",
    options: [integerOption("subtrees", "Subtrees", 3), integerOption("width", "Continuations each", 3), stepOption, pieceOption] },
  mcts: { title: "Monte Carlo tree search", help: "Expand texts with high scores or few visits; a rollout to the end scores each piece.",
    options: [integerOption("rounds", "Rounds", 8), integerOption("width", "Continuations each", 2), stepOption, pieceOption] },
  restarts: { title: "Early restarts", help: "Sample several openings and finish only the best ones.",
    options: [integerOption("k", "Openings", 8), integerOption("tokens", "Tokens each", 16), integerOption("keep", "Finished", 1)] },
  think: { title: "Budget forcing", isLong: true,
    help: "For reasoning models: append “Wait” if the reasoning ends too early, and its end tag if it is too long.",
    options: [integerOption("min_thinking", "Min reasoning tokens", 0, 0), integerOption("max_thinking", "Max reasoning tokens", "")] },
  compose: { title: "Compose", isLong: true, help: "An outline first, then each section with the outline in the prompt, then one revision.",
    options: [integerOption("sections", "Sections", 3), integerOption("width", "Samples each", 1), integerOption("edits", "Words to revise", 4, 0)] },
};

/** `needs`: the argument after the name. Judges that run files are available on the command line only. */
export const JUDGES = {
  "": { title: "automatic", help: "Mean log probability per token; in a vote each text counts the same." },
  logprob: { title: "log probability", help: "Mean log probability per token." },
  certainty: { title: "self-certainty", help: "Distance of the model's distribution from uniform, averaged over the tokens." },
  "regex:": { title: "regular expression", needs: "pattern", help: "1 if the regular expression matches the text, else 0." },
  ask: { title: "the same model, yes or no", help: "The model is asked whether the answer is right: P(yes)." },
  "ask:": { title: "another model, yes or no", needs: "model", help: "Another model is asked whether the answer is right: P(yes)." },
  "reward:": { title: "reward model", needs: "model", help: "The score of a reward model." },
  "process:": { title: "process reward model", needs: "model", help: "The lowest step score of a process reward model." },
  vote: { title: "majority vote", help: "Share of texts with the same answer: boxed, after “answer is”, or the last number." },
  "vote:": { title: "majority vote, by pattern", needs: "pattern", help: "Share of texts in which this pattern matches the same text." },
  "vote+": { title: "weighted vote", needs: "weigher", help: "Votes weighted by another verifier." },
};
export const WEIGHERS = ["logprob", "certainty", "ask"];

/** A score with two decimals and a minus sign. */
export function scoreText(score) {
  if (score == null) return "–";
  const text = Number.isInteger(score) ? String(score) : Math.abs(score) >= 100 ? score.toFixed(0) : score.toFixed(2);
  return text.replace("-", "−");
}

// -- state: it outlives the view ------------------------------------------------------------------

/** Topic "think". */
export const thinking = {
  policy: "best-of",
  options: {}, // changed options by policy: {"best-of": {n: "4"}}
  judge: "",
  pattern: "", // argument of the judge, one for each kind
  model: null,
  weigher: WEIGHERS[0],
  budget: "1000",
  temperature: "0.8",
  seed: "7",
  fault: null,
  request: null, // of the shown search
  start: null,
  nodes: [], // by number; 0 is the prompt
  spent: null,
  winner: null,
  done: null,
  running: false,
  stopped: false,
  began: 0,
  seconds: 0,
  open: null, // number of the selected node
  opened: new Map(), // number: {id, fault}: branches of nodes that were opened
  hides: false, // whether pruned nodes are hidden
};
let control = null;

const notify = () => changed("think");
export const optionValue = ({ name, defaultValue }) => thinking.options[thinking.policy]?.[name] ?? defaultValue;
export const judgeModels = () => state.models.filter(({ id }) => id !== state.model);
export const judgeModel = () => thinking.model ?? judgeModels()[0]?.id ?? "";

export function setThinking(values) {
  Object.assign(thinking, values);
  notify();
}

export function setOption(name, value) {
  const { policy, options } = thinking;
  setThinking({ options: { ...options, [policy]: { ...options[policy], [name]: value } }, fault: null });
}

// -- the request ------------------------------------------------------------------------------

function parseInteger(title, value, least, param) {
  const number = Number(value);
  if (value.trim() !== "" && Number.isInteger(number) && number >= least) return number;
  throw new ApiError(400, `${title} must be an integer >= ${least}, got “${value}”.`, { param });
}

function judgeName() {
  const { judge, pattern, weigher } = thinking;
  const argument = { pattern, weigher, model: judgeModel() }[JUDGES[judge].needs];
  if (argument === "") throw new ApiError(400, `This verifier needs a ${JUDGES[judge].needs}.`, { param: JUDGES[judge].needs });
  return judge + (argument ?? "") || null;
}

/** The request; throws an ApiError for an invalid field. */
function buildRequest(prompt) {
  const { policy, seed, temperature } = thinking;
  const budget = parseInteger("Budget", thinking.budget, 1, "budget");
  const think = { policy, judge: judgeName(), budget };
  for (const option of POLICIES[policy].options) {
    const value = optionValue(option);
    if (option.among) think[option.name] = value;
    else if (value.trim() || option.defaultValue) think[option.name] = parseInteger(`“${option.title}”`, value, option.least, option.name);
  }
  const heat = Number(temperature.replace(",", "."));
  if (!(heat >= 0) || !temperature.trim()) {
    throw new ApiError(400, `Temperature must be >= 0, got “${temperature}”.`, { param: "temperature" });
  }
  return {
    ...prompt, model: state.model, temperature: heat, think, stream: true,
    ...(POLICIES[policy].isLong ? { max_tokens: budget } : {}),
    ...(seed.trim() ? { seed: parseInteger("Seed", seed, 0, "seed") } : {}),
  };
}

export async function search() {
  const prompt = thinking.running ? null : readPrompt();
  if (!prompt) return;
  thinking.fault = null;
  try {
    thinking.request = buildRequest(prompt);
    dropUnused([...thinking.opened.values()].map(({ id }) => id));
    Object.assign(thinking, {
      start: null, nodes: [], spent: null, winner: null, done: null, running: true, stopped: false, began: performance.now(),
      open: null, opened: new Map(),
    });
    notify();
    control = new AbortController();
    for await (const { event, data } of api.stream("/v1/think", thinking.request, { signal: control.signal })) {
      EVENT_HANDLERS[event]?.(data);
      thinking.seconds = (performance.now() - thinking.began) / 1000;
      notify();
    }
    if (thinking.winner !== null && thinking.open === null) openNode(thinking.winner);
  } catch (error) {
    if (error.name === "AbortError") thinking.stopped = true;
    else {
      thinking.fault = { message: error.message, param: error.param ?? null };
      if (error.isOffline) connect();
      if (!(error instanceof ApiError)) throw error;
    }
  } finally {
    thinking.running = false;
    notify();
  }
}

/** Closing the stream cancels the search on the server, which releases its memory. */
export function stop() {
  control?.abort();
}

// -- events -----------------------------------------------------------------------------------

const EVENT_HANDLERS = {
  start(data) {
    thinking.start = data;
    thinking.nodes = [{ number: 0, parent: null, children: [], text: "", tokens: [], finished: false }];
  },
  grown(data) {
    const { node: number, parent, text, tokens, logprob, finished } = data;
    thinking.nodes[number] = { number, parent, children: [], text, tokens, logprob, finished };
    thinking.nodes[parent].children.push(number);
    // Update the budget meter before the server reports the totals.
    if (thinking.spent) thinking.spent.growing += tokens.length;
  },
  judged({ node, score, why, answer }) {
    Object.assign(thinking.nodes[node], { score, why, answer });
  },
  pruned({ node }) {
    thinking.nodes[node].pruned = true;
  },
  spending({ prompt, written, judged, limit }) {
    thinking.spent = { prompt, written, judged, limit, growing: 0 };
  },
  won({ node }) {
    thinking.winner = node;
  },
  done(data) {
    thinking.done = data;
  },
};

/** The nodes from the prompt to a node. */
export function pathTo(number) {
  const path = [];
  for (let node = thinking.nodes[number]; node; node = thinking.nodes[node.parent]) path.unshift(node);
  return path;
}

/** Whether a node or one of its ancestors was pruned. */
export const isPruned = (number) => pathTo(number).some(({ pruned }) => pruned);
export const tokensOf = (number) => pathTo(number).flatMap(({ tokens }) => tokens);

// -- opening a node ---------------------------------------------------------------------------

/** Select a node and create a branch with its text, which the user can continue. */
export async function openNode(number) {
  setThinking({ open: number });
  const existing = thinking.opened.get(number);
  if (existing && !existing.fault) return;
  const text = { id: null, fault: null };
  thinking.opened.set(number, text);
  notify();
  try {
    const { think, stream, max_tokens, ...prompt } = thinking.request;
    const { seed, model } = thinking.start;
    const tokens = tokensOf(number);
    const created = await api.post("/v1/tree", { ...prompt, model, seed, top: CANDIDATES, name: number ? `Text ${number} of a search` : null });
    const id = addBranch(created, { temperature: prompt.temperature });
    if (tokens.length) applyEvent("branch", { data: await api.post(`/v1/tree/${id}/append`, { tokens }) });
    state.branches.get(id).unchanged = new Set(tokens.keys()); // sampled by the model, not chosen by the user
    text.id = id;
  } catch (error) {
    text.fault = error.message;
    if (!(error instanceof ApiError)) throw error;
  }
  notify();
}
