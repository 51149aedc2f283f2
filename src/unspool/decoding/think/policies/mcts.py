"""Monte Carlo tree search: go where it was good so far, or where nobody has been much.

A round: from the prompt down, the child with the highest bound is taken until one is reached that
has no children yet. It is continued by `width` pieces, each of these is written to its end (a
rollout), and what the judge says of those whole texts counts for all that leads to them. The best
whole text ever seen wins. Nothing is random but the texts' own draws.

With Q(c) the mean score of what was seen below child c (between the worst, 0, and the best, 1, seen
anywhere), N visits, and P(c) the share of c's probability among its siblings:

    uct     Q(c) + explore * sqrt(ln N(parent) / N(c))              (Kocsis & Szepesvari 2006)
    puct    Q(c) + explore * P(c) * sqrt(N(parent)) / (1 + N(c))    (Silver et al. 2017)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from unspool.decoding.search_tree import Node
from unspool.decoding.think.policies.pieces import Pieces
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import whole
from unspool.errors import SettingsError

RULES = ("uct", "puct")


@dataclass(eq=False, slots=True)
class Place:
    """A text of the tree, and what was seen below it."""

    node: Node
    parent: Place | None = None
    prior: float = 1.0  # its share among its siblings
    visits: int = 0
    total: float = 0.0  # of the scores seen
    children: list[Place] = field(default_factory=list)
    closed: bool = False  # nothing new can be found below

    def up(self) -> Iterator[Place]:
        """This place and all above it."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.parent

    def add(self, nodes: Sequence[Node]) -> list[Place]:
        """More children, and the share that each has now in the probability of all."""
        added = [Place(node, self) for node in nodes]
        self.children += added
        self.closed = False
        total = math.fsum(map(_likelihood, self.children)) or 1.0
        for child in self.children:
            child.prior = _likelihood(child) / total
        return added

    def see(self, score: float) -> None:
        """A whole text below this place has this score."""
        for place in self.up():
            place.visits += 1
            place.total += score

    def close(self) -> None:
        """Nothing more can be found here, nor above if that was the last child."""
        self.closed = True
        for place in self.up():
            if place.children and all(child.closed for child in place.children):
                place.closed = True


@dataclass(slots=True)
class Bounds:
    """The rule by which a child is chosen."""

    rule: str
    explore: float
    least: float = math.inf  # of all scores seen
    most: float = -math.inf

    def saw(self, score: float) -> None:
        self.least, self.most = min(self.least, score), max(self.most, score)

    def of(self, child: Place) -> float:
        """How promising a child is."""
        assert child.parent is not None
        if not child.visits:
            return math.inf
        spread = self.most - self.least
        mean = child.total / child.visits
        value = (mean - self.least) / spread if spread > 0 else 0.5
        above = child.parent.visits
        if self.rule == "uct":
            return value + self.explore * math.sqrt(math.log(above) / child.visits)
        return value + self.explore * child.prior * math.sqrt(above) / (1 + child.visits)

    def descend(self, root: Place) -> Place:
        """The place to be looked at next: the most promising one without children."""
        place = root
        while place.children:
            open_ones = [child for child in place.children if not child.closed]
            place = max(open_ones, key=self.of)  # of equals the first
        return place


def mcts(
    search: Search,
    *,
    width: int = 4,
    step: str = "line",
    tokens: int = 32,
    rule: str = "puct",
    explore: float = 1.4,
    rounds: int = 1000,
) -> Moves[None]:
    """At most so many `rounds`, as many as the budget has room for; `width` pieces in each, which
    are a `step` (sentence, line, paragraph, tokens) of at most so many tokens."""
    if rule not in RULES:
        raise SettingsError(f"rule is {rule!r}; it may be {' or '.join(RULES)}")
    if not isinstance(explore, int | float) or not 0 <= explore < math.inf:
        raise SettingsError(f"explore is {explore!r}; it may be a number from 0 up")
    pieces, bounds, root = Pieces(search, step, tokens), Bounds(rule, explore), Place(search.root)
    whole_texts: list[Node] = []
    for _ in range(whole("rounds", rounds)):
        # Where all below is known, other beginnings are looked for.
        place = root if root.closed else bounds.descend(root)
        written = search.budget.spent.written
        grown = yield from pieces.grow([place.node], whole("width", width))
        if not grown and (place is root or search.budget.spent.written == written):
            break  # nothing new is found, or the budget is spent
        if not grown:
            place.close()
            continue
        children = place.add(grown)
        going = [node for node in grown if search.left(node)]
        rollouts = yield from search.sample(going)
        ends = {node: node for node in grown if not search.left(node)}
        ends |= {rollout.parent: rollout for rollout in rollouts if rollout.parent}
        yield from search.judge(list(ends.values()))
        whole_texts += ends.values()
        for child in children:
            text = ends.get(child.node)
            if text is not None and text.score is not None:
                bounds.saw(text.score)
                child.see(text.score)
            if text is None or text.score is None or text is child.node:
                child.close()  # no budget to go on, nothing that can be judged, or its end
    yield from search.win(whole_texts)


def _likelihood(place: Place) -> float:
    """Of a piece, a token on average, so that a short one has no advantage."""
    steps = place.node.steps
    return math.exp(math.fsum(step.logprob for step in steps) / len(steps))
