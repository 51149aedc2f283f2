// Several samples of one prompt as a tree in which what they share is drawn once.
// Only numbers and words in here; `samples.js` draws them.

/**
 * Merge samples (lists of steps) by their tokens, `depth` tokens deep.
 *
 * A node is a run of tokens that all its samples share: `{from, steps, samples, children}`.
 * It has either no children, or at least two, the largest first.
 */
export function grow(samples, depth) {
  return grown(samples, depth, samples.map((_, index) => index), 0);
}

function grown(samples, depth, members, from) {
  const node = { from, steps: [], samples: members, children: [] };
  let at = from;
  for (; at < depth; at += 1) {
    const groups = parted(samples, members, at);
    if (groups.length > 1) {
      node.children = groups.map((group) => grown(samples, depth, group, at)).sort(larger);
      return node;
    }
    const step = samples[members[0]][at];
    if (!step) return node; // all of them ended here
    node.steps.push(step);
  }
  return node;
}

/** The members in groups that have the same token at this place; those that ended are a group too. */
function parted(samples, members, at) {
  const groups = new Map();
  for (const member of members) {
    const token = samples[member][at]?.token ?? null;
    if (!groups.has(token)) groups.set(token, []);
    groups.get(token).push(member);
  }
  return [...groups.values()];
}

function larger(one, other) {
  const chance = (node) => node.steps[0]?.logprob ?? -Infinity;
  return other.samples.length - one.samples.length || chance(other) - chance(one) || 0;
}

/** How deep a tree of texts that are still written may go, so that none looks ended that is not. */
export function depthOf(samples, running, most) {
  const lengths = samples.filter((_, index) => running[index]).map((steps) => steps.length);
  return Math.min(most, ...lengths, Math.max(0, ...samples.map((steps) => steps.length)));
}

/**
 * The place where the samples part first: each next token with how many took it, what the model
 * itself gave it and what was left of that after the settings. `unused` candidates that none
 * took stand behind them. Null where the samples stay together.
 */
export function firstSplit(tree, unused = 0) {
  if (tree.children.length === 0) return null;
  const rows = tree.children.map(({ steps: [step], samples }) => ({
    token: step?.token ?? null,
    text: step ? shown(step) : "",
    count: samples.length,
    model: step ? Math.exp(step.logprob) : null,
    after: step?.probability ?? null,
  }));
  const taken = new Set(rows.map((row) => row.token));
  const others = (tree.children.find((child) => child.steps.length)?.steps[0].candidates ?? [])
    .filter((candidate) => !taken.has(candidate.token) && candidate.probability > 0)
    .slice(0, unused)
    .map(({ token, text, logprob, probability }) => (
      { token, text, count: 0, model: Math.exp(logprob), after: probability }));
  return { at: tree.steps.length, rows: [...rows, ...others] };
}

/** How many different texts there are, as deep as the tree goes. */
export function distinct(tree) {
  return tree.children.length ? tree.children.reduce((sum, child) => sum + distinct(child), 0) : 1;
}

/** A step's words; the token that ends a text has none, so it is named. */
export const shown = (step) => step.text || step.piece || "";

/** The words of a run on one line. What a token only begins is told by the one that completes it. */
export function wordsOf(steps) {
  const last = steps.findLastIndex((step) => step.text);
  const text = steps.map((step, at) => {
    if (step.text || (at < last && step.bytes?.length)) return step.text;
    return step.finish_reason === "stop" ? " ∎" : shown(step);
  });
  return text.join("").replace(/\s*\n\s*/g, " ⏎ ").trim();
}

// -- where everything lies --------------------------------------------------------------------

const ROW = 28; // height that one sample takes
const BAND = 20; // thickness of one sample
const BEND = 66; // width in which a split opens; its probabilities stand there
const PAD = 8; // between a band's edge and its words
const LINE = 1.25; // height of a line of words, in their size
const TAIL = 150; // the least width for the words of a path that goes to its leaf
const LEAF = 34; // width for the leaves' numbers

/**
 * Lay a tree out from left to right. `measure(text, size)` gives the width of words.
 *
 * Gives `{width, height, bands, bends, leaves}`. A band is a run with its words in lines, a bend leads
 * from a band to one of its children or leaves, a leaf is a sample's end. Each knows its samples.
 */
export function layout(tree, { width, measure, stem = "" }) {
  const plan = { measure, bands: [], bends: [], leaves: [] };
  const begin = stem ? widthOf(stem, tree.samples.length, measure) : 0;
  const right = Math.max(width, needed(tree, plan, begin) + LEAF) - LEAF;
  if (stem) plan.bands.push({ ...bandOf(stem, tree.samples, 0, 0, begin, measure), hue: 0, isPrompt: true });
  place(tree, plan, { x: begin, top: 0, right, hue: 0 });
  const { bands, bends, leaves } = plan;
  return { width: right + LEAF, height: tree.samples.length * ROW, bands, bends, leaves };
}

const sizeOf = (many) => Math.min(20, 13 + 1.8 * Math.sqrt(many - 1));

function needed(node, { measure }, x) {
  const many = node.samples.length;
  const own = x + widthOf(wordsOf(node.steps), many, measure);
  if (node.children.length === 0) return own + (many > 1 ? BEND : 0);
  return Math.max(...node.children.map((child) => needed(child, { measure }, own + BEND)));
}

/** Narrow where many samples leave room for several lines; a path alone is cut off instead. */
function widthOf(words, many, measure) {
  if (!words) return 0;
  const size = sizeOf(many);
  const room = many === 1 ? Math.min(measure(words, size), TAIL)
    : narrowest(words, size, linesIn(many, size), measure);
  return room + 2 * PAD + 2;
}

const linesIn = (many, size) => Math.max(1, Math.floor((many * BAND) / (size * LINE)));

function narrowest(words, size, lines, measure) {
  const single = Math.max(...words.split(" ").map((word) => measure(word, size)));
  let room = Math.max(single, measure(words, size) / lines);
  while (wrapped(words, size, room, measure).length > lines) room *= 1.06;
  return room;
}

function wrapped(words, size, room, measure) {
  const lines = [];
  for (const word of words.split(" ")) {
    const longer = lines.length ? `${lines[lines.length - 1]} ${word}` : word;
    if (lines.length && measure(longer, size) <= room + 0.5) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

function cutTo(words, size, room, measure) {
  if (measure(words, size) <= room) return words;
  let [fits, fails] = [0, words.length];
  while (fails - fits > 1) {
    const half = (fits + fails) >> 1;
    if (measure(`${words.slice(0, half)}…`, size) <= room) fits = half;
    else fails = half;
  }
  return `${words.slice(0, fits).toWellFormed().trimEnd()}…`;
}

/** A run of words as a band, in as many lines as its width asks for. */
function bandOf(words, samples, x, top, width, measure) {
  const many = samples.length;
  const size = sizeOf(many);
  const height = many * BAND;
  const y = top + (many * (ROW - BAND)) / 2;
  const room = width - 2 * PAD;
  const lines = words === "" ? []
    : many === 1 ? [cutTo(words, size, room, measure)] : wrapped(words, size, room, measure);
  const first = y + height / 2 - ((lines.length - 1) * size * LINE) / 2;
  return {
    samples, x, y, width, height, size,
    lines: lines.map((text, index) => ({ text, x: x + PAD, y: first + index * size * LINE })),
  };
}

function place(node, plan, { x, top, right, hue }) {
  const many = node.samples.length;
  const alone = many === 1; // a path that parts no more goes straight to its leaf
  const words = wordsOf(node.steps);
  const width = alone ? right - x : widthOf(words, many, plan.measure);
  if (width > 0) plan.bands.push({ ...bandOf(words, node.samples, x, top, width, plan.measure), hue });

  if (alone) {
    plan.leaves.push({ sample: node.samples[0], x: right, y: top + ROW / 2, hue });
    return;
  }
  let below = top;
  let from = top + (many * (ROW - BAND)) / 2;
  const begin = x + width;
  if (node.children.length === 0) {
    for (const sample of node.samples) { // the same to the end, and a leaf each
      const middle = below + ROW / 2;
      plan.bends.push({
        samples: [sample], path: bend(begin, from, right, middle - 1.5, BAND, 3), hue, step: null,
      });
      plan.leaves.push({ sample, x: right, y: middle, hue });
      below += ROW;
      from += BAND;
    }
    return;
  }
  node.children.forEach((child, index) => {
    const count = child.samples.length;
    const thick = count * BAND;
    const to = below + (count * (ROW - BAND)) / 2;
    const next = hue || 1 + (index % 6); // colors part with the first split
    plan.bends.push({
      samples: child.samples, path: bend(begin, from, begin + BEND, to, thick, thick), hue: next,
      step: child.steps[0] ?? null, x: begin + BEND - 5, y: to + thick / 2,
    });
    place(child, plan, { x: begin + BEND, top: below, right, hue: next });
    below += count * ROW;
    from += thick;
  });
}

/** A ribbon from (x0, y0) to (x1, y1), which are its upper corners. */
function bend(x0, y0, x1, y1, thick0, thick1) {
  const half = (x0 + x1) / 2;
  const at = (...numbers) => numbers.map((number) => Math.round(number * 10) / 10).join(" ");
  return `M${at(x0, y0)}C${at(half, y0, half, y1, x1, y1)}V${at(y1 + thick1)}`
    + `C${at(half, y1 + thick1, half, y0 + thick0, x0, y0 + thick0)}Z`;
}
