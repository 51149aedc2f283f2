// The eight steps: what each says, what it speaks of, and what it does. All of it is done for real.

import { reducedMotion } from "../lib.js";
import { branchNow, changed, on, promptLength, state } from "../state.js";
import { choose, jump, open, select, show, write } from "../actions.js";

const QUESTION = "Why do leaves change color in fall?";

/** The tour writes the same words for everyone, slowly enough to be seen. */
export const TOUR_SETTINGS = { seed: 7, max_tokens: 48 };
export const TOUR_SPEED = 15;

export const STEPS = [
  {
    title: "Ask something",
    says: "A language model does one thing: it goes on with a text. So we give it a beginning, a question.",
    target: ".composer",
    async act(tour) {
      toText();
      if (!tour.root) await type(QUESTION, tour);
    },
  },
  {
    title: "One token at a time",
    says: "The answer comes in small pieces, tokens: each is picked and put at the end, and then the next is weighed. "
      + "The warmer its color, the less it was expected.",
    target: "#text",
    async act(tour) {
      toText();
      if (tour.root) return jump(tour.root);
      state.draft = QUESTION;
      changed("draft");
      const before = state.current;
      write();
      await until(() => state.current !== before && branchNow()?.steps.length > 0, tour);
      tour.root = state.current;
    },
  },
  {
    title: "Every token was a choice",
    says: "At each place the model weighs all the tokens it knows. Filters drop the unlikely ones, and chance picks among the rest.",
    target: "#side-panel",
    async act(tour) {
      toText();
      if (state.current !== tour.root) await jump(tour.root);
      await until(() => branchNow().steps.length >= 12 || !state.writing, tour);
      tour.place = surprising(branchNow());
      select(tour.place);
      show("step");
    },
  },
  {
    title: "Take the pen",
    says: "We took the next likely token instead. What stood behind it is let go, and the model goes on from there.",
    target: "#text",
    async act(tour) {
      toText();
      if (tour.fork) return jump(tour.fork, tour.place);
      if (state.current !== tour.root) await jump(tour.root);
      const step = branchNow().steps[tour.place - promptLength(branchNow())];
      const other = step.candidates.find((candidate) => candidate.token !== step.token);
      choose(tour.place, { token: other.token });
      await until(() => state.current !== tour.root, tour);
      tour.fork = state.current;
    },
  },
  {
    title: "Nothing is lost",
    says: "What was let go stays as a branch. The map shows them all: jump, compare, name them.",
    target: "#side-panel",
    act() {
      toText();
      show("map");
    },
  },
  {
    title: "Look inside",
    says: "Before each token the model looks back at the words before it; the arcs show which ones counted. Never at what comes later.",
    target: "#text",
    async act(tour) {
      toText();
      await until(() => branchNow().steps.length >= 12 || !state.writing, tour);
      const branch = branchNow();
      select(promptLength(branch) + Math.min(10, branch.steps.length - 1));
      show("inside");
    },
  },
  {
    title: "What it costs",
    says: "A token takes about the same time wherever it stands, because what was read is kept. Turn the cache off here and see.",
    target: "#side-panel",
    act() {
      toText();
      show("costs");
    },
  },
  {
    title: "It reads no letters",
    says: "Any text is cut into tokens from a fixed list, and only their numbers go in. Now it is your turn.",
    target: ".tk-list",
    act() {
      open("tokens");
    },
  },
];

function toText() {
  if (state.view !== "write") open("write");
}

/** Letter by letter, as a person types. */
async function type(words, tour) {
  state.mode = "chat";
  changed("mode");
  const put = (text) => {
    state.draft = text;
    changed("draft");
  };
  if (!reducedMotion()) {
    for (let end = 1; end < words.length && !tour.isOver; end += 1) {
      put(words.slice(0, end));
      await new Promise((done) => { setTimeout(done, 22); });
    }
  }
  if (!tour.isOver) put(words);
}

/** The place of the token that the model expected least, among the first that had rivals. */
function surprising(branch) {
  const early = branch.steps.slice(1, 12).filter((step) => step.candidates.length > 1);
  const [least] = early.sort((a, b) => a.logprob - b.logprob);
  return promptLength(branch) + (least ?? branch.steps[0]).index;
}

/** Wait for something to happen on the page; gives up when the tour ends or something goes wrong. */
function until(holds, tour) {
  return new Promise((done, failed) => {
    const topics = ["steps", "current", "writing", "fault", "server", "tour"];
    const look = () => {
      if (tour.isOver || state.fault || !state.server.ready) failed(new Error("The tour cannot go on."));
      else if (holds()) done();
      else return;
      leave.forEach((stop) => stop());
    };
    const leave = topics.map((topic) => on(topic, look));
    look();
  });
}
