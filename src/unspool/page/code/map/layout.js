// Where the branches of the map lie. Pure: lists in, places out, no page.
//
// Steps run to the right and every branch is a line in a lane. It begins where it leaves the line
// that holds its first tokens, and that line is always in a lane above. Late forks lie next to
// their parent and early ones below them, so a line that goes down never crosses another. Within
// that order each branch takes the first lane with room for its line and its label, so lanes are
// used again.

const BEND = 60; // steps up to which the scale is nearly even; behind it grows like a logarithm
const ENDS = [20, 30, 50, 75, 100, 150, 200, 300, 500, 750];

/** The number of steps at which the scale ends: a round one, so that it rarely changes. */
function scaleEnd(longest) {
  for (let unit = 1; ; unit *= 10) {
    const end = ENDS.find((candidate) => candidate * unit >= longest);
    if (end) return end * unit;
  }
}

/** From a number of steps to a place; long texts are pressed together at their ends. */
export function scale(longest, width) {
  const end = scaleEnd(longest);
  const whole = Math.log1p(end / BEND);
  const x = (steps) => (Math.log1p(Math.min(steps, end) / BEND) / whole) * width;
  return Object.assign(x, { end });
}

/** Round numbers of steps along a scale, with at least `apart` between them. */
export function ticks(x, apart) {
  const rounds = [0];
  for (let unit = 10; unit <= x.end; unit *= 10) rounds.push(unit, 2 * unit, 5 * unit);
  const kept = [];
  for (const steps of rounds.filter((round) => round <= x.end)) {
    if (!kept.length || x(steps) - x(kept.at(-1)) >= apart) kept.push(steps);
  }
  return kept.map((steps) => ({ steps, x: x(steps) }));
}

/** Whose line holds the step at which a branch begins; null: only the prompt is shared.
 *
 * Who forks a branch within what that one has from its own parent forks, in the picture, the parent.
 */
export function origin(branch, byId) {
  let from = byId.get(branch.parent);
  const at = branch.forked_at ?? 0;
  const passed = new Set([branch.id]);
  while (from && at <= (byId.has(from.parent) ? from.forked_at ?? 0 : 0)) {
    if (passed.has(from.id)) return null;
    passed.add(from.id);
    from = byId.get(from.parent);
  }
  return from && at > 0 ? from : null;
}

/** Trees of branches, one for each group (those with one prompt), the newest first.
 *
 * A branch is `{id, parent, forked_at, length, created, group, writing}`. An item of a tree is
 * `{id, branch, from, start, end, level, children}`; parents come before their children. `shown`
 * are the ids of those that get an item, and of all they come from; null: all.
 */
export function trees(branches, shown = null) {
  const byId = new Map(branches.map((branch) => [branch.id, branch]));
  const items = new Map();
  const drawn = shown ? branches.filter((branch) => shown.has(branch.id)) : [...branches];
  for (const branch of drawn.sort((a, b) => a.created - b.created)) {
    items.set(branch.id, { id: branch.id, branch, end: branch.length, children: [] });
  }
  const found = new Map();
  for (const item of items.values()) {
    const from = items.get(origin(item.branch, byId)?.id) ?? null;
    item.from = from?.id ?? null;
    // A parent that was taken back since is shorter than what it shared.
    item.start = from ? Math.min(item.branch.forked_at, from.end) : 0;
    item.end = Math.max(item.end, item.start);
    const { group } = item.branch;
    if (from) from.children.push(item);
    else if (found.has(group)) found.get(group).push(item);
    else found.set(group, [item]);
  }
  return [...found].reverse().map(([key, roots]) => ({ key, items: inOrder(roots, 1) }));
}

function inOrder(siblings, level) {
  siblings.sort((a, b) => b.start - a.start || a.branch.created - b.branch.created);
  return siblings.flatMap((item, place) => {
    Object.assign(item, { level, place: place + 1, siblings: siblings.length });
    return [item, ...inOrder(item.children, level + 1)];
  });
}

/** Lanes for the items of one tree; lane 0 is the prompt's.
 *
 * `x` turns steps into places, `width` is where the picture ends, `shortest` the least a line is
 * drawn with, `gap` what stays free behind it, and `labelWidth(item)` what its label wants. Gives
 * the number of lanes and sets `lane`, `x0`, `x1` and `room` (for the label) on each item.
 */
export function layOut(items, { x, width, shortest, gap, labelWidth }) {
  const lanes = [[{ low: -Infinity, high: Infinity }]];
  const placed = new Map();
  for (const item of items) {
    item.x0 = x(item.start);
    item.x1 = Math.max(x(item.end), item.x0 + shortest);
    // One that is being written grows: its lane is kept free for it.
    const high = item.branch.writing
      ? Infinity : Math.max(item.x1, item.x0 + labelWidth(item)) + gap;
    const above = placed.get(item.from)?.lane ?? 0;
    const free = (lane) => lane.every((taken) => high <= taken.low || taken.high < item.x0);
    let lane = above + 1;
    while (lane < lanes.length && !free(lanes[lane])) lane += 1;
    for (let passed = above + 1; passed < lane; passed += 1) {
      lanes[passed].push({ low: item.x0, high: item.x0 });
    }
    (lanes[lane] ??= []).push({ low: item.x0, high });
    item.lane = lane;
    placed.set(item.id, item);
  }
  for (const item of items) {
    const next = lanes[item.lane].map((taken) => taken.low).filter((low) => low > item.x0);
    item.room = Math.min(width, ...next.map((low) => low - gap / 2)) - item.x0;
  }
  return lanes.length;
}
