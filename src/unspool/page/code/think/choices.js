// What can be asked for: the policies with their options, and the judges that a server lets one name from afar.

const whole = (name, title, usual, least = 1) => ({ name, title, usual: String(usual), least });
const step = { name: "step", title: "A piece is a", usual: "sentence", among: ["sentence", "line", "paragraph", "tokens"] };
const piece = whole("tokens", "… of at most", 32);

/** By the names that the server knows; `isLong`: one text, which may be as long as the budget. */
export const POLICIES = {
  "best-of": { title: "Best of n", help: "Write n texts and keep the one that the judge likes best.", options: [whole("n", "Texts", 8)] },
  vote: { title: "Vote", help: "Write n texts; the answer wins that most of them give.", options: [whole("n", "Texts", 8)] },
  beam: { title: "Beam, step by step", help: "After each piece only the best of all texts go on, and each is continued in several ways.",
    options: [whole("keep", "Kept", 2), whole("width", "Ways each", 3), step, piece] },
  dvts: { title: "Diverse subtrees (DVTS)", help: "Searches that know nothing of each other, so that their texts stay different; the best of them wins.",
    options: [whole("subtrees", "Subtrees", 3), whole("width", "Ways each", 3), step, piece] },
  mcts: { title: "Monte Carlo tree search", help: "Go where it was good so far, or where little was tried; every piece is written to its end to be judged.",
    options: [whole("rounds", "Rounds", 8), whole("width", "Ways each", 2), step, piece] },
  restarts: { title: "Early restarts", help: "The first words decide much: several openings, and only the best is written to its end.",
    options: [whole("k", "Openings", 8), whole("tokens", "Tokens of each", 16), whole("keep", "Kept", 1)] },
  think: { title: "Budget forcing", isLong: true,
    help: "For models with think tags: “Wait” where the thinking ends too early, and the end tag where it goes on too long.",
    options: [whole("min_thinking", "Think at least", 0, 0), whole("max_thinking", "… and at most", "")] },
  compose: { title: "Compose", isLong: true, help: "An outline first, then each section with the outline in view, then one pass over the whole.",
    options: [whole("sections", "Sections", 3), whole("width", "Ways each", 1), whole("edits", "Words looked at again", 4, 0)] },
};

/** `needs`: what stands behind the name. Judges that run files are for the machine's own command line. */
export const JUDGES = {
  "": { title: "the usual one", help: "How likely the model finds the text, a token on average; in a vote each counts the same." },
  logprob: { title: "how likely it is", help: "Log-probability, a token on average." },
  certainty: { title: "how sure the writer was", help: "How far the model was from not knowing, at each token." },
  "regex:": { title: "a pattern is found", needs: "pattern", help: "1 if this regular expression is found in the text, else 0." },
  ask: { title: "the writer, asked yes or no", help: "The model reads question and text, and is asked whether it is right: P(yes)." },
  "ask:": { title: "another model, asked yes or no", needs: "model", help: "Another model reads question and text: P(yes)." },
  "reward:": { title: "a reward model", needs: "model", help: "The number that a reward model gives the text." },
  "process:": { title: "a process-reward model", needs: "model", help: "The worst step, by a process-reward model." },
  vote: { title: "the same answer", help: "The share of texts with the same answer: what is boxed, stands behind “answer is”, or is the last number." },
  "vote:": { title: "the same answer, by a pattern", needs: "pattern", help: "The share of texts in which this pattern finds the same." },
  "vote+": { title: "the same answer, weighed", needs: "weigher", help: "The same, each vote weighed by another judge." },
};
export const WEIGHERS = ["logprob", "certainty", "ask"];
