"""Monte Carlo tree search over pieces of text.

A round descends from the prompt to a leaf, always to the child with the highest bound. The leaf is
continued by `width` pieces, each piece is completed (a rollout), and the scores of the complete
texts are added to all ancestors. The best complete text wins. Only the sampling is random.

With Q(c) the mean score below child c (scaled so that the lowest score is 0 and the highest 1),
N the number of visits, and P(c) c's share of the probability among its siblings:

    uct     Q(c) + explore * sqrt(ln N(parent) / N(c))              (Kocsis & Szepesvari 2006)
    puct    Q(c) + explore * P(c) * sqrt(N(parent)) / (1 + N(c))    (Silver et al. 2017)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from unspool.decoding.search_tree import SearchNode
from unspool.decoding.think.policies.pieces import Pieces
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import check_int
from unspool.errors import SettingsError

RULES = ("uct", "puct")


@dataclass(eq=False, slots=True)
class MctsNode:
    """Statistics of one node of the tree."""

    node: SearchNode
    parent: MctsNode | None = None
    prior: float = 1.0  # share of the probability among its siblings
    visits: int = 0
    total: float = 0.0  # sum of scores
    children: list[MctsNode] = field(default_factory=list)
    closed: bool = False  # fully explored

    def ancestors(self) -> Iterator[MctsNode]:
        """Iterate over this node and its ancestors."""
        current: MctsNode | None = self
        while current is not None:
            yield current
            current = current.parent

    def add(self, nodes: Sequence[SearchNode]) -> list[MctsNode]:
        """Add children and recompute the priors of all children."""
        added = [MctsNode(node, self) for node in nodes]
        self.children += added
        self.closed = False
        total = math.fsum(map(_likelihood, self.children)) or 1.0
        for child in self.children:
            child.prior = _likelihood(child) / total
        return added

    def add_score(self, score: float) -> None:
        """Add the score of a complete text to this node and its ancestors."""
        for current in self.ancestors():
            current.visits += 1
            current.total += score

    def close(self) -> None:
        """Mark as fully explored, and ancestors whose children all are."""
        self.closed = True
        for current in self.ancestors():
            if current.children and all(child.closed for child in current.children):
                current.closed = True


@dataclass(slots=True)
class SelectionRule:
    """The selection rule."""

    rule: str
    explore: float
    lowest: float = math.inf  # lowest score so far
    highest: float = -math.inf

    def observe(self, score: float) -> None:
        self.lowest, self.highest = min(self.lowest, score), max(self.highest, score)

    def bound(self, child: MctsNode) -> float:
        """Upper confidence bound of a child."""
        assert child.parent is not None
        if not child.visits:
            return math.inf
        spread = self.highest - self.lowest
        mean = child.total / child.visits
        value = (mean - self.lowest) / spread if spread > 0 else 0.5
        parent_visits = child.parent.visits
        if self.rule == "uct":
            return value + self.explore * math.sqrt(math.log(parent_visits) / child.visits)
        return value + self.explore * child.prior * math.sqrt(parent_visits) / (1 + child.visits)

    def descend(self, root: MctsNode) -> MctsNode:
        """Select the leaf with the highest bounds from the root down."""
        current = root
        while current.children:
            open_children = [child for child in current.children if not child.closed]
            current = max(open_children, key=self.bound)  # ties: the first
        return current


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
    """Run up to `rounds` rounds, as many as the budget allows, each with `width` pieces: a `step`
    (sentence, line, paragraph, tokens) of at most `tokens` tokens."""
    if rule not in RULES:
        raise SettingsError(f"rule must be {' or '.join(RULES)}, got {rule!r}")
    if not isinstance(explore, int | float) or not 0 <= explore < math.inf:
        raise SettingsError(f"explore must be a number >= 0, got {explore!r}")
    pieces, bounds, root = (
        Pieces(search, step, tokens),
        SelectionRule(rule, explore),
        MctsNode(search.root),
    )
    complete_texts: list[SearchNode] = []
    for _ in range(check_int("rounds", rounds)):
        # Where everything is explored, sample new openings.
        leaf = root if root.closed else bounds.descend(root)
        written = search.budget.spent.written
        grown = yield from pieces.grow([leaf.node], check_int("width", width))
        if not grown and (leaf is root or search.budget.spent.written == written):
            break  # no new text, or the budget is spent
        if not grown:
            leaf.close()
            continue
        children = leaf.add(grown)
        unfinished = [node for node in grown if search.remaining(node)]
        rollouts = yield from search.sample(unfinished)
        finished_texts = {node: node for node in grown if not search.remaining(node)}
        finished_texts |= {rollout.parent: rollout for rollout in rollouts if rollout.parent}
        yield from search.score(list(finished_texts.values()))
        complete_texts += finished_texts.values()
        for child in children:
            text = finished_texts.get(child.node)
            if text is not None and text.score is not None:
                bounds.observe(text.score)
                child.add_score(text.score)
            if text is None or text.score is None or text is child.node:
                child.close()  # no budget left, not scored, or already complete
    yield from search.select_best(complete_texts)


def _likelihood(current: MctsNode) -> float:
    """Mean token probability of a piece, so that short pieces have no advantage."""
    steps = current.node.steps
    return math.exp(math.fsum(step.logprob for step in steps) / len(steps))
