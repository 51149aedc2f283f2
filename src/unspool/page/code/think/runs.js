// A search: what is asked for, the tree as the server tells of it, and texts of it that a person opened.
// It outlives the view: a person may look elsewhere.

import { adoptEvent, CANDIDATES, connect, promptBody } from "../actions.js";
import { ApiFault, api } from "../api.js";
import { keep, letGo } from "../own_texts.js";
import { changed, state } from "../state.js";
import { JUDGES, POLICIES, WEIGHERS } from "./choices.js";

const EXAMPLE = "Why do leaves change color in fall?";

/** Topic "think". */
export const thinking = {
  prompt: null, // null: what stands in the composer, or else the example
  policy: "best-of",
  options: {}, // of each policy, what a person changed: {"best-of": {n: "4"}}
  judge: "",
  pattern: "", // what stands behind the judge's name, one for each kind
  model: null,
  weigher: WEIGHERS[0],
  budget: "1000",
  length: "100",
  temperature: "0.8",
  seed: "7",
  fault: null,
  asked: null, // what the search that is shown was asked for
  start: null,
  nodes: [], // by number; 0 is the prompt
  spent: null,
  winner: null,
  done: null,
  running: false,
  stopped: false,
  began: 0,
  seconds: 0,
  open: null, // the number of the text that is looked at
  opened: new Map(), // number: {id, fault}: the branch of each text that was looked at
  hides: false, // whether pruned texts are left out of the picture
};
let control = null;

export const told = () => changed("think");
export const promptNow = () => thinking.prompt ?? (state.draft || EXAMPLE);
export const optionNow = ({ name, usual }) => thinking.options[thinking.policy]?.[name] ?? usual;
export const judgeModels = () => state.models.filter(({ id }) => id !== state.model);
export const judgeModel = () => thinking.model ?? judgeModels()[0]?.id ?? "";

export function change(values) {
  Object.assign(thinking, values);
  told();
}

export function setOption(name, value) {
  const { policy, options } = thinking;
  change({ options: { ...options, [policy]: { ...options[policy], [name]: value } }, fault: null });
}

// -- asking -----------------------------------------------------------------------------------

function wholeNumber(title, value, least, param) {
  const found = Number(value);
  if (value.trim() !== "" && Number.isInteger(found) && found >= least) return found;
  throw new ApiFault(400, `${title} was “${value}”; it must be a whole number of ${least} or more.`, { param });
}

function judgeName() {
  const { judge, pattern, weigher } = thinking;
  const rest = { pattern, weigher, model: judgeModel() }[JUDGES[judge].needs];
  if (rest === "") throw new ApiFault(400, `Say which ${JUDGES[judge].needs} it is.`, { param: JUDGES[judge].needs });
  return judge + (rest ?? "") || null;
}

/** The request, or an ApiFault that says which field is wrong. */
function question() {
  const { policy, length, seed, temperature } = thinking;
  if (!promptNow().trim()) throw new ApiFault(400, "Write a question first.", { param: "prompt" });
  const budget = wholeNumber("The budget", thinking.budget, 1, "budget");
  const think = { policy, judge: judgeName(), budget };
  for (const option of POLICIES[policy].options) {
    const value = optionNow(option);
    if (option.among) think[option.name] = value;
    else if (value.trim() || option.usual) think[option.name] = wholeNumber(`“${option.title}”`, value, option.least, option.name);
  }
  const heat = Number(temperature.replace(",", "."));
  if (!(heat >= 0) || !temperature.trim()) {
    throw new ApiFault(400, `The temperature was “${temperature}”; it must be a number of 0 or more.`, { param: "temperature" });
  }
  return {
    ...promptBody(promptNow()), model: state.model, temperature: heat, think, stream: true,
    max_tokens: POLICIES[policy].isLong ? budget : wholeNumber("The length", length, 1, "length"),
    ...(seed.trim() ? { seed: wholeNumber("The seed", seed, 0, "seed") } : {}),
  };
}

export async function search() {
  if (thinking.running) return;
  thinking.fault = null;
  try {
    thinking.asked = question();
    letGo([...thinking.opened.values()].map(({ id }) => id));
    Object.assign(thinking, {
      start: null, nodes: [], spent: null, winner: null, done: null, running: true, stopped: false, began: performance.now(),
      open: null, opened: new Map(),
    });
    told();
    control = new AbortController();
    for await (const { event, data } of api.stream("/v1/think", thinking.asked, { signal: control.signal })) {
      happened[event]?.(data);
      thinking.seconds = (performance.now() - thinking.began) / 1000;
      told();
    }
    if (thinking.winner !== null && thinking.open === null) openNode(thinking.winner);
  } catch (error) {
    if (error.name === "AbortError") thinking.stopped = true;
    else {
      thinking.fault = { message: error.message, param: error.param ?? null };
      if (error.gone) connect();
      if (!(error instanceof ApiFault)) throw error;
    }
  } finally {
    thinking.running = false;
    told();
  }
}

/** The server ends a search that nobody listens to, and gives back all that it held. */
export function stop() {
  control?.abort();
}

// -- the tree, event by event -----------------------------------------------------------------

const happened = {
  start(data) {
    thinking.start = data;
    thinking.nodes = [{ number: 0, parent: null, children: [], text: "", tokens: [], finished: false }];
  },
  grown(data) {
    const { node: number, parent, text, tokens, logprob, finished } = data;
    thinking.nodes[number] = { number, parent, children: [], text, tokens, logprob, finished };
    thinking.nodes[parent].children.push(number);
    // The bar need not wait until the whole wave is written.
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

/** From the prompt to a text: all that it consists of. */
export function pathTo(number) {
  const path = [];
  for (let node = thinking.nodes[number]; node; node = thinking.nodes[node.parent]) path.unshift(node);
  return path;
}

/** Pruned itself, or a part of what was. */
export const isLost = (number) => pathTo(number).some(({ pruned }) => pruned);
export const tokensOf = (number) => pathTo(number).flatMap(({ tokens }) => tokens);

// -- looking at a text ------------------------------------------------------------------------

/** Look at a text, token by token: as a branch of the tree, which a person can go on with. */
export async function openNode(number) {
  change({ open: number });
  const known = thinking.opened.get(number);
  if (known && !known.fault) return;
  const text = { id: null, fault: null };
  thinking.opened.set(number, text);
  told();
  try {
    const { think, stream, max_tokens, ...asked } = thinking.asked;
    const { seed, model } = thinking.start;
    const tokens = tokensOf(number);
    const made = await api.post("/v1/tree", { ...asked, model, seed, top: CANDIDATES, name: number ? `Text ${number} of a search` : null });
    const id = keep(made, { temperature: asked.temperature });
    if (tokens.length) adoptEvent("branch", { data: await api.post(`/v1/tree/${id}/append`, { tokens }) });
    state.branches.get(id).kept = new Set(tokens.keys()); // the model's own words, not a person's
    text.id = id;
  } catch (error) {
    text.fault = error.message;
    if (!(error instanceof ApiFault)) throw error;
  }
  told();
}
