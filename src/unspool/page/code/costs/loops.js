// How much the end of a text says again what the text has said before.
//
//     const meter = new LoopMeter();
//     meter.push(token);  meter.cut(length);  meter.share();  meter.tail();
//
// A token repeats if it and the three before it have stood in this order earlier in the text. Each
// token is looked up once, so a long text costs no more a token than a short one.

const GRAM = 4; // fewer tokens in the same order come again in any text
export const WINDOW = 64; // tokens at the end that the meter looks at
const LEAST = 8; // tokens; before that there is nothing to say
const TRIED = 24; // earlier places tried for the tail, the nearest first
const REACH = 1024; // tokens a tail is followed back at most

export class LoopMeter {
  constructor() {
    this.tokens = [];
    this.repeats = []; // of each token, whether it repeats
    this.sums = [0]; // sums[i]: how many of the first i repeat
    this.ends = new Map(); // four tokens → where they have ended so far
  }

  push(token) {
    const at = this.tokens.push(token) - 1;
    let again = false;
    if (at >= GRAM - 1) {
      const gram = this.gramAt(at);
      const ends = this.ends.get(gram);
      again = ends !== undefined && ends.length > 0;
      if (ends) ends.push(at);
      else this.ends.set(gram, [at]);
    }
    this.repeats.push(again);
    this.sums.push(this.sums[at] + (again ? 1 : 0));
  }

  /** Forget all behind the first `length` tokens. */
  cut(length) {
    for (let at = this.tokens.length - 1; at >= Math.max(length, GRAM - 1); at--) {
      this.ends.get(this.gramAt(at)).pop();
    }
    this.tokens.length = this.repeats.length = length;
    this.sums.length = length + 1;
  }

  /** 0 to 1: how many of the last tokens repeat. */
  share() {
    const length = this.tokens.length;
    if (length < LEAST) return 0;
    const looked = Math.min(WINDOW, length);
    return (this.sums[length] - this.sums[length - looked]) / looked;
  }

  /**
   * The longest end of the text that has stood before: `{length, distance, times}`. `times` is how
   * often the last `distance` tokens come in a row, 1 if what stood before does not touch the end.
   */
  tail() {
    const last = this.tokens.length - 1;
    let best = { length: 0, distance: 0, times: 1 };
    if (!this.repeats[last]) return best;
    const ends = this.ends.get(this.gramAt(last));
    for (let i = ends.length - 2; i >= Math.max(0, ends.length - 1 - TRIED); i--) {
      const length = this.matched(last, ends[i]);
      if (length > best.length) best = { length, distance: last - ends[i], times: 1 };
    }
    best.times = Math.floor(best.length / best.distance) + 1;
    return best;
  }

  gramAt(at) {
    return this.tokens.slice(at - GRAM + 1, at + 1).join(" ");
  }

  /** How many tokens that end at these two places are the same. */
  matched(late, early) {
    let length = 0;
    while (length <= early && length < REACH && this.tokens[late - length] === this.tokens[early - length]) {
      length++;
    }
    return length;
  }
}
