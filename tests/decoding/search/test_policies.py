"""Each policy against what it would do by hand, or against looking at everything."""

from __future__ import annotations

import math
from itertools import product

import pytest

from helpers.decoding_support import PROMPT
from helpers.search_support import WARM, levels
from unspool.decoding.branches import mean_logprob
from unspool.decoding.search.policies import MctsNode, SelectionRule
from unspool.decoding.search.samples import best_of, samples
from unspool.decoding.search.think import stream_think, think
from unspool.decoding.search.tree import SearchNode

# A vocabulary of three tokens, all about equally likely.
FEW = {**WARM, "logit_bias": {token: 500.0 for token in (4, 5, 6)}, "temperature": 20.0}


def every_text(length: int) -> list[list[int]]:
    return [list(text) for text in product((4, 5, 6), repeat=length)]


def oddness(text) -> float:
    """A score that differs from text to text."""
    return sum(token * 7**place for place, token in enumerate(text.tokens)) % 101


def test_best_of_is_that_of_lm_best_of(tiny_lm):
    expected = best_of(tiny_lm, PROMPT, 6, max_tokens=8, **WARM)
    result = think(tiny_lm, PROMPT, n=6, max_tokens=8, **WARM)
    assert result.best.tokens == expected.best.tokens
    assert result.score == expected.scores[0] == mean_logprob(result.best)
    judged = think(tiny_lm, PROMPT, n=6, judge=oddness, max_tokens=8, **WARM)
    texts = samples(tiny_lm, PROMPT, 6, max_tokens=8, **WARM)
    assert judged.score == max(map(oddness, texts))


def test_of_equally_good_texts_the_likeliest_wins(tiny_lm):
    result = think(tiny_lm, PROMPT, n=6, judge=lambda text: True, max_tokens=8, **WARM)
    texts = [node.generation for node in result.tree.root.children]
    assert result.best is max(texts, key=mean_logprob) and result.score == 1.0


def test_a_beam_that_keeps_everything_finds_the_best_of_all(tiny_lm):
    """27 texts of three tokens; enough samples of each token to see them all."""
    result = think(
        tiny_lm, PROMPT, policy="beam", keep=27, width=12, step="tokens", tokens=1, max_tokens=3,
        judge=oddness, budget=None, end=False, **FEW,
    )  # fmt: skip
    assert [len(row) for row in levels(result.tree.root)] == [3, 9, 27]
    scores = {
        tuple(text): sum(token * 7**place for place, token in enumerate(text)) % 101
        for text in every_text(3)
    }
    assert tuple(result.best.tokens) == max(scores, key=scores.get)


def test_a_beam_keeps_the_best_of_each_level(tiny_lm):
    result = think(
        tiny_lm, PROMPT, policy="beam", keep=2, width=3, step="tokens", tokens=2, max_tokens=8,
        judge=oddness, budget=None, end=False, **WARM,
    )  # fmt: skip
    rows = levels(result.tree.root)
    assert [len(row) for row in rows] == [6, 6, 6, 6]
    for row, below in zip(rows, [*rows[1:], None], strict=True):
        order = sorted(row, key=lambda node: -node.score)
        parents = {node.parent for node in below} if below else {result.tree.leaf}
        assert parents <= set(order[:2])
        assert all(node.pruned for node in order[2:])
    assert result.score == max(node.score for node in rows[-1])


@pytest.mark.parametrize(("step", "ends"), [("sentence", ".!?\n"), ("line", "\n")])
def test_a_piece_ends_where_a_sentence_or_a_line_does(worded_lm, step, ends):
    result = think(
        worded_lm, "The scheduler plans rows.", policy="beam", keep=2, width=2, step=step,
        tokens=40, max_tokens=120, budget=None, **WARM,
    )  # fmt: skip
    gone_on_with = [node for node in result.tree.root.walk() if node.parent and node.children]
    assert gone_on_with
    for node in gone_on_with:
        output = [step.text for step in node.steps]
        before = "".join(output[:-1]).lstrip()
        assert not any(end in before for end in ends)
        assert len(output) == 40 or any(end in (before + output[-1]).lstrip() for end in ends)


def test_subtrees_are_independent(tiny_lm):
    """Each subtree is an independent greedy search."""
    stream = stream_think(
        tiny_lm, PROMPT, policy="dvts", subtrees=3, width=2, step="tokens", tokens=2, max_tokens=6,
        judge=oddness, budget=None, end=False, **WARM,
    )  # fmt: skip
    for _ in stream:
        pass
    rows = levels(stream.result.tree.root)
    assert [len(row) for row in rows] == [6, 6, 6]
    going = [stream.result.tree.root] * 3
    for row in rows:
        by_subtree = [row[number : number + 2] for number in range(0, 6, 2)]
        assert all(
            child.parent is text
            for text, mine in zip(going, by_subtree, strict=True)
            for child in mine
        )
        # Its best child is continued, even where it is worse than a loser of another subtree.
        going = [max(mine, key=lambda node: node.score) for mine in by_subtree]
        assert not any(loser.children for mine in by_subtree for loser in {*mine} - {*going})
    assert stream.result.score == max(node.score for node in going)
    # The draws are those of samples 0, 1, 2, ... through the whole search.
    numbers = [node.generation.request.limits.sample for row in rows for node in row]
    assert numbers == list(range(18))


def test_the_bounds_by_hand():
    root = MctsNode(SearchNode(None), visits=10)
    child = MctsNode(SearchNode(None), root, prior=0.25, visits=4, total=2.0)
    scale = {"lowest": 0.0, "highest": 2.0}  # a mean of 0.5 scales to a quarter
    uct = SelectionRule("uct", 1.4, **scale).bound(child)
    assert uct == pytest.approx(0.25 + 1.4 * math.sqrt(math.log(10) / 4))
    puct = SelectionRule("puct", 1.4, **scale).bound(child)
    assert puct == pytest.approx(0.25 + 1.4 * 0.25 * math.sqrt(10) / 5)
    assert (
        SelectionRule("uct", 0.0, lowest=0.5, highest=0.5).bound(child) == 0.5
    )  # all equal so far
    assert (
        SelectionRule("uct", 1.4).bound(MctsNode(SearchNode(None), root)) == math.inf
    )  # never visited


class Reference:
    """MCTS once more, from what a search told: which text was to be expanded in each round."""

    def __init__(self, rule: str, explore: float) -> None:
        self.rule, self.explore = rule, explore
        self.visits: dict[SearchNode, int] = {}
        self.totals: dict[SearchNode, float] = {}
        self.children: dict[SearchNode, list[SearchNode]] = {}
        self.scores: list[float] = []

    def bound(self, parent: SearchNode, child: SearchNode) -> float:
        low, high = min(self.scores), max(self.scores)
        q = self.totals[child] / self.visits[child]
        q = (q - low) / (high - low) if high > low else 0.5
        if self.rule == "uct":
            extra = math.sqrt(math.log(self.visits[parent]) / self.visits[child])
        else:

            def chance(node: SearchNode) -> float:
                return math.exp(sum(s.logprob for s in node.steps) / len(node.steps))

            prior = chance(child) / sum(map(chance, self.children[parent]))
            extra = prior * math.sqrt(self.visits[parent]) / (1 + self.visits[child])
        return q + self.explore * extra

    def next(self, root: SearchNode) -> SearchNode:
        node = root
        while node in self.children:
            node = max(self.children[node], key=lambda child: self.bound(node, child))
        return node

    def expanded(self, node: SearchNode, ends: dict[SearchNode, float]) -> None:
        self.children[node] = list(ends)
        self.scores += ends.values()
        for child, score in ends.items():
            above: SearchNode | None = child
            while above is not None:
                self.visits[above] = self.visits.get(above, 0) + 1
                self.totals[above] = self.totals.get(above, 0.0) + score
                above = above.parent


@pytest.mark.parametrize(("rule", "explore"), [("uct", 1.4), ("puct", 1.4), ("uct", 0.1)])
def test_each_round_goes_where_the_rule_says(tiny_lm, rule, explore):
    rounds, width = 7, 2
    result = think(
        tiny_lm, PROMPT, policy="mcts", rule=rule, explore=explore, width=width, rounds=rounds,
        step="tokens", tokens=2, max_tokens=20, judge=oddness, budget=None, end=False, **WARM,
    )  # fmt: skip
    nodes = sorted(result.tree.root.walk(), key=lambda node: node.number)[1:]
    assert len(nodes) == rounds * 2 * width  # pieces, and a rollout of each
    reference = Reference(rule, explore)
    for number in range(0, len(nodes), 2 * width):
        pieces, rollouts = nodes[number : number + width], nodes[number + width :][:width]
        assert [rollout.parent for rollout in rollouts] == pieces
        assert {piece.parent for piece in pieces} == {reference.next(result.tree.root)}
        ends = {end.parent: oddness(end.generation) for end in rollouts}
        reference.expanded(pieces[0].parent, ends)
    assert result.score == max(reference.scores)
    assert reference.visits[result.tree.root] == rounds * width


def test_a_tree_that_is_looked_through_is_left(tiny_lm):
    """Three texts of one token: once another look finds nothing new, the search is over."""
    result = think(
        tiny_lm, PROMPT, policy="mcts", width=12, step="tokens", tokens=1, max_tokens=1,
        judge=oddness, budget=5_000, end=False, **FEW,
    )  # fmt: skip
    assert sorted(node.generation.tokens for node in result.tree.root.children) == [[4], [5], [6]]
    assert result.best.tokens == [6] and result.spent.written == 24


def test_a_text_without_other_continuations_does_not_end_the_search(tiny_lm):
    """Nearly all of 27 texts are found: exhausted nodes are left for others."""
    result = think(
        tiny_lm, PROMPT, policy="mcts", width=6, step="tokens", tokens=1, max_tokens=3, rounds=50,
        judge=oddness, budget=20_000, end=False, **FEW,
    )  # fmt: skip
    ends = {tuple(n.generation.tokens) for n in result.tree.root.walk() if n.score is not None}
    assert len(ends) > 20 and result.score == max(
        sum(token * 7**place for place, token in enumerate(end)) % 101 for end in ends
    )


def test_the_best_opening_goes_on_alone(tiny_lm):
    result = think(
        tiny_lm, PROMPT, policy="restarts", k=6, tokens=3, max_tokens=9, judge=oddness,
        budget=None, end=False, **WARM,
    )  # fmt: skip
    openings = result.tree.root.children
    texts = samples(tiny_lm, PROMPT, 6, max_tokens=3, end=False, **WARM)
    assert [node.generation.tokens for node in openings] == [text.tokens for text in texts]
    best = max(openings, key=lambda node: node.score)
    assert [node for node in openings if node.children] == [best]
    assert result.best.tokens[:3] == best.generation.tokens and len(result.best.tokens) == 9
    assert result.spent.written == 6 * 3 + 6


def test_several_openings_may_go_on(tiny_lm):
    result = think(
        tiny_lm, PROMPT, policy="restarts", k=5, keep=3, tokens=2, max_tokens=6, judge=oddness,
        budget=None, end=False, **WARM,
    )  # fmt: skip
    openings = sorted(result.tree.root.children, key=lambda node: -node.score)
    assert all(node.children for node in openings[:3])
    assert not any(node.children for node in openings[3:])
    ends = [child for node in openings for child in node.children]
    assert result.score == max(node.score for node in ends)
