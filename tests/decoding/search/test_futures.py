"""Futures: all likely continuations with exact probabilities, against plain logits."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from unspool.decoding.search.futures import FutureGrowth, FutureNode
from unspool.errors import SettingsError
from unspool.sampling import Chain, RowInput

PROMPT = "The sky is"


def logits_after(lm: Any, tokens: list[int]) -> Any:
    with lm.open_branch(tokens) as branch:
        return np.asarray(lm.engine.extend(branch)[-1:], np.float64)


def model_law(lm: Any, tokens: list[int]) -> Any:
    logits = logits_after(lm, tokens)[0]
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def check_tree(lm: Any, ids: list[int], root: FutureNode, mass: float, law: Any) -> None:
    """Every probability is that of the law, and nothing that is likely enough is missing."""
    for node in root.walk():
        if node.other_probability is None:
            assert not node.children
            continue
        expected = law([*ids, *node.tokens])
        listed = [child.token for child in node.children]
        assert len(set(listed)) == len(listed)
        for child in node.children:
            assert child.probability == pytest.approx(expected[child.token], rel=1e-4)
            assert child.mass == pytest.approx(node.mass * child.probability, rel=1e-9)
            assert child.mass >= mass and child.depth == node.depth + 1
        total = math.fsum(child.probability for child in node.children) + node.other_probability
        assert total == pytest.approx(1.0, abs=1e-9)
        others = np.delete(expected, listed)
        assert node.other_probability == pytest.approx(others.sum(), abs=1e-4)
        assert others.max(initial=0.0) * node.mass < mass * (1 + 1e-3)
        probabilities = [child.probability for child in node.children]
        assert probabilities == sorted(probabilities, reverse=True)


def test_probabilities_are_those_of_the_logits(lm: Any) -> None:
    result = lm.futures(PROMPT, mass=0.02, depth=4, nodes=300)
    ids = list(lm.prompt_ids(PROMPT))
    check_tree(lm, ids, result.root, 0.02, lambda tokens: model_law(lm, tokens))
    nodes = list(result.root.walk())
    grown = [node for node in nodes if node.other_probability is not None]
    assert all(node.depth < 4 and not node.finished for node in grown)
    # Only nodes that may not be extended are leaves without a known rest.
    assert all(n.depth == 4 or n.finished for n in nodes if n.other_probability is None)
    # What is known of all the mass: the leaves, and what is left out on the way.
    leaves = sum(node.mass for node in nodes if node.other_probability is None)
    left_out = sum(n.mass * (n.other_probability or 0) for n in grown)
    assert leaves + left_out == pytest.approx(1.0, abs=1e-9)
    assert [mass for mass, _ in result.leaves] == sorted(
        (m for m, _ in result.leaves), reverse=True
    )


def test_the_sampling_stages_have_their_own_law(lm: Any) -> None:
    settings = {"temperature": 0.7, "top_k": 6, "repetition_penalty": 1.3, "min_p": 0.02}
    result = lm.futures(PROMPT, mass=0.01, depth=3, sampled=True, **settings)
    ids = list(lm.prompt_ids(PROMPT))
    chain = Chain(result.start.request.settings)

    def law(tokens: list[int]) -> Any:
        pick = chain.pick(
            logits_after(lm, tokens).astype(np.float32), [RowInput(tokens, len(ids))], top=50
        )[0]
        expected = np.zeros(lm.config.vocab_size)
        for candidate in pick.candidates:
            expected[candidate.token] = candidate.probability
        return expected

    check_tree(lm, ids, result.root, 0.01, law)
    assert all(len(node.children) <= 6 for node in result.root.walk())
    greedy = lm.futures(PROMPT, depth=4, sampled=True, temperature=0)
    (leaf,) = greedy.leaves
    assert leaf[0] == 1.0
    path = next(node for node in greedy.root.walk() if node.other_probability is None)
    assert path.tokens == lm.generate(PROMPT, temperature=0, max_tokens=4).tokens


def test_the_largest_mass_first_and_the_limits(lm: Any) -> None:
    growth = FutureGrowth(lm, PROMPT, mass=0.0, depth=6, nodes=120, width=5)
    order = [node.number for node in growth.grow()]
    nodes = {node.number: node for node in growth.root.walk()}
    assert len(nodes) == 120 == growth.num_nodes and not growth.is_complete
    assert order[0] == 0
    # What is known and larger comes first, but for the batch that is computed together.
    for number in order:
        later = [nodes[other] for other in order[order.index(number) + 1 :]]
        waiting = [other for other in later if other.number < number]
        batch = 16
        assert sum(other.mass > nodes[number].mass for other in waiting) < batch
    small = FutureGrowth(lm, PROMPT, mass=0.2, depth=2, nodes=500, width=50)
    list(small.grow())
    assert small.is_complete
    stopped = FutureGrowth(lm, PROMPT, mass=0.0, depth=50, nodes=20_000, width=50, seconds=0.2)
    list(stopped.grow())
    assert not stopped.is_complete and 0 < stopped.num_nodes < 20_000


def test_a_generation_continues_and_its_futures_open(lm: Any) -> None:
    text = lm.generate(PROMPT, max_tokens=8, seed=3)
    result = lm.futures(text, at=3, mass=0.05, depth=3)
    assert result.start.tokens == text.tokens[:3] and text.tokens == text.fork().tokens
    check_tree(
        lm, [*text.prompt, *text.tokens[:3]], result.root, 0.05, lambda ids: model_law(lm, ids)
    )
    node = max((n for n in result.root.walk() if n.depth == 3), key=lambda n: n.mass)
    opened = result.open(node)
    assert opened.tokens == [*text.tokens[:3], *node.tokens]
    assert result.open(result.root).tokens == text.tokens[:3]
    logprob = sum(step.logprob for step in opened.steps[3:])
    assert math.exp(logprob) == pytest.approx(node.mass, rel=1e-3)
    from_end = lm.futures(text, mass=0.3, depth=1)
    assert from_end.start.tokens == text.tokens
    assert "%" in str(result) and "<pre" in result._repr_html_()


def test_characters_of_several_tokens_are_shown_whole(lm: Any) -> None:
    """A path through the tokens of an emoji: bytes in ⟨⟩, and the character at the last of them."""
    emoji = lm.tokenizer.encode("\U0001f98a")
    assert len(emoji) > 1
    bias = dict.fromkeys(emoji[:1], math.inf)
    result = lm.futures(PROMPT, mass=0.5, depth=1, sampled=True, logit_bias=bias, temperature=1.0)
    (child,) = result.root.children
    assert child.token == emoji[0] and child.text.startswith("⟨") and child.partial_utf8
    nodes = list(lm.futures([*lm.prompt_ids(PROMPT), *emoji[:-1]], mass=0.0, depth=1,
                         nodes=1000, width=1000).root.children)  # fmt: skip
    ends = [node for node in nodes if node.token == emoji[-1]]
    assert all(node.text == "\U0001f98a" for node in ends)


def test_nothing_stays_open(lm: Any) -> None:
    tree = lm.engine.tree
    before = len(tree.branches) if hasattr(tree, "branches") else None
    growth = FutureGrowth(lm, PROMPT, mass=0.0, depth=20, nodes=400, width=8)
    items: Any = growth.grow()
    for _ in range(30):
        next(items)
    items.close()
    if before is not None:
        assert len(tree.branches) == before


BAD: list[tuple[dict[str, Any], str]] = [
    ({"mass": 2}, "mass"), ({"depth": 0}, "depth"), ({"nodes": True}, "nodes"),
    ({"width": 10**9}, "width"), ({"at": 1}, "at counts"),
    ({"sampled": True, "mirostat_tau": 5.0}, "mirostat"),
    ({"sampled": True, "regex": "a+"}, "grammar"), ({"sampled": True, "guard": "loop"}, "guard"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), BAD)
def test_mistakes_are_named(lm: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        lm.futures(PROMPT, **options)


def test_options_belong_to_the_text(lm: Any) -> None:
    with pytest.raises(SettingsError, match="temperature is an option of the text"):
        lm.futures(lm.generate(PROMPT, max_tokens=2), temperature=1.0)
    masses = [mass for mass, _ in lm.futures(PROMPT, mass=0.05, depth=2).leaves]
    assert all(before >= after for before, after in pairwise(masses))
