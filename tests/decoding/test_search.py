"""Tree search: expand, score, prune; the whole tree is kept."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from helpers.decoding_support import PROMPT, as_byte, pages_left
from helpers.search_support import WARM, levels
from unspool.decoding.branches import mean_logprob
from unspool.decoding.search.samples import tree_search
from unspool.errors import SettingsError, UnspoolError


def test_the_shape_of_the_tree(tiny_lm):
    result = tree_search(tiny_lm, PROMPT, width=4, tokens=3, keep=2, depth=3, end=False, **WARM)
    rows = levels(result.root)
    assert [len(row) for row in rows] == [4, 8, 8]
    for row in rows:
        remaining = [node.score for node in row if not node.pruned]
        assert len(remaining) == 2
        assert min(remaining) >= max(node.score for node in row if node.pruned)
        assert all(not node.children for node in row if node.pruned)
    assert result.leaf in rows[-1]
    assert result.leaf.score == max(node.score for node in rows[-1])
    assert [node.generation.tokens for node in result.best_path] == [
        result.best.tokens[:length] for length in (0, 3, 6, 9)
    ]


def test_scores_are_mean_logprobs_and_steps_are_whole(tiny_lm):
    result = tree_search(tiny_lm, PROMPT, width=3, tokens=4, keep=2, depth=2, end=False, **WARM)
    for node in result.root.walk():
        if node.parent is not None:
            assert node.score == mean_logprob(node.generation)
            assert len(node.steps) == 4
    expected = tiny_lm.score([*PROMPT, *result.best.tokens]).logprobs[len(PROMPT) :]
    assert [step.logprob for step in result.best.steps] == pytest.approx(expected, abs=1e-4)
    assert [step.position for step in result.best.steps] == list(range(19, 27))


def test_same_seed_same_tree(tiny_lm):
    first, second = (
        str(tree_search(tiny_lm, PROMPT, width=3, tokens=2, keep=2, depth=2, **WARM))
        for _ in range(2)
    )
    assert first == second


def test_equal_continuations_are_one(tiny_lm):
    result = tree_search(tiny_lm, PROMPT, width=5, tokens=3, depth=2, temperature=0, end=False)
    assert [len(row) for row in levels(result.root)] == [1, 1]
    greedy = tiny_lm.generate(PROMPT, max_tokens=6, temperature=0, end=False)
    assert result.best.tokens == greedy.tokens


def test_a_scorer_steers(tiny_lm):
    def evens(generation) -> float:
        return sum(token % 2 == 0 for token in generation.tokens)

    result = tree_search(
        tiny_lm, PROMPT, width=8, tokens=1, keep=3, depth=5, scorer=evens, end=False, **WARM
    )
    assert evens(result.best) == 5


def test_an_expander_proposes(tiny_lm):
    def continuations_of(generation) -> list[list[int]]:
        return [[10], [20, 21, 22], []]

    result = tree_search(tiny_lm, PROMPT, expand=continuations_of, keep=8, depth=3)
    rows = levels(result.root)
    assert [len(row) for row in rows] == [2, 4, 8]
    for node in rows[-1]:
        tokens = node.generation.tokens
        expected = tiny_lm.score([*PROMPT, *tokens]).positions[len(PROMPT) :]
        for step, position in zip(node.generation.steps, expected, strict=True):
            assert step.chosen and step.rank == position.rank
            assert step.logprob == pytest.approx(position.logprob, abs=1e-4)
            assert step.entropy == pytest.approx(position.entropy, abs=1e-4)
    assert result.leaf.score == max(node.score for node in rows[-1])


def test_an_exhaustive_search_finds_the_best_text(tiny_lm):
    """With all of a few tokens proposed and nothing pruned, the search is an enumeration."""
    few = [4, 5, 6]
    result = tree_search(
        tiny_lm, PROMPT, expand=lambda g: [[token] for token in few], keep=99, depth=3
    )
    every = [[a, b, c] for a in few for b in few for c in few]
    totals = {
        tuple(text): sum(tiny_lm.score([*PROMPT, *text]).logprobs[len(PROMPT) :]) for text in every
    }
    assert tuple(result.best.tokens) == max(totals, key=lambda text: totals[text])


def test_texts_that_end_are_leaves(tiny_lm, monkeypatch):
    monkeypatch.setattr(tiny_lm, "end_ids", frozenset(range(0, 259, 3)))
    result = tree_search(tiny_lm, PROMPT, width=6, tokens=2, keep=4, depth=6, **WARM)
    ended = [node for node in result.root.walk() if node.finished]
    assert ended and all(not node.children for node in ended)
    proposed = tree_search(tiny_lm, PROMPT, expand=lambda g: [[4, 6, 8, 10]], depth=3)
    assert proposed.best.tokens == [4, 6] and proposed.best.finish_reason == "stop"


def test_the_context_ends_a_search(tiny_lm):
    full = [*PROMPT * 6, *range(10)]
    result = tree_search(tiny_lm, full, width=2, tokens=3, depth=5, end=False, **WARM)
    assert len(result.best.tokens) == 4 and result.best.finish_reason == "context"


def test_nothing_proposed(tiny_lm):
    result = tree_search(tiny_lm, PROMPT, expand=lambda g: [])
    assert result.best.tokens == [] and result.leaf is result.root


def test_it_can_be_printed(tiny_lm):
    result = tree_search(tiny_lm, PROMPT, width=3, tokens=2, keep=2, depth=2, end=False, **WARM)
    lines = str(result).splitlines()
    assert len(lines) == 1 + 3 + 6
    assert lines[0] == "prompt of 19 tokens"
    assert sum("(pruned)" in line for line in lines) == 1 + 4
    assert sum("(best)" in line for line in lines) == 1
    best = next(line for line in lines if "(best)" in line)
    assert f"{result.leaf.score:.3f} {result.best.tokens[2:]}" in best
    console = Console(width=200, file=StringIO())
    console.print(result.rich())
    displayed = console.file.getvalue()
    assert all(result.label(node) in displayed for node in result.root.walk())


def test_faults(tiny_lm):
    for options in ({"width": 0}, {"tokens": 0}, {"keep": 0}, {"depth": 0}, {"deepth": 3}):
        with pytest.raises(SettingsError):
            tree_search(tiny_lm, PROMPT, **options)
    with pytest.raises(UnspoolError, match="scorer raised ZeroDivisionError"):
        tree_search(tiny_lm, PROMPT, scorer=lambda g: 1 / 0, tokens=3)
    with pytest.raises(UnspoolError, match="expand raised KeyError"):
        tree_search(tiny_lm, PROMPT, expand=lambda g: {}["nothing"])
    with pytest.raises(UnspoolError, match="vocabulary"):
        tree_search(tiny_lm, PROMPT, expand=lambda g: [[3], [999]])
    with pytest.raises(UnspoolError, match="context"):
        tree_search(tiny_lm, PROMPT, expand=lambda g: [[3] * 200])
    assert pages_left(tiny_lm) == 0


def test_pieces_join_to_the_right_text(tiny_lm, monkeypatch):
    """Pieces end within characters and within stop strings; the whole text has to come out."""
    monkeypatch.setattr(tiny_lm.engine, "token_bytes", as_byte)
    result = tree_search(
        tiny_lm, PROMPT, width=6, tokens=2, keep=6, depth=4, end=False, stop=["\ufffd@"], **WARM
    )
    assert any(byte > 127 for node in result.root.walk() for byte in node.generation.tokens)
    for node in result.root.walk():
        if not node.finished:
            written = b"".join(map(as_byte, node.generation.tokens))
            assert node.generation.text == written.decode("utf-8", "replace")
    euro = ["€".encode()[:2], "€".encode()[2:]]
    pieces = tree_search(tiny_lm, PROMPT, expand=lambda g: [euro[len(g.tokens) > 0]], depth=2)
    assert pieces.best.text == "€"
    stopped = tree_search(tiny_lm, PROMPT, expand=lambda g: [b"ab"], depth=3, stop=["baba"], keep=1)
    assert (stopped.best.text, stopped.best.finish_reason) == ("a", "stop")
    assert bytes(stopped.best.tokens) == b"ababa"  # the end of the stop string, and no further


def test_words_are_proposed(lm):
    prompt, words = "The capital of France is", [" Rome", " Paris", " London"]
    likeliest = max(words, key=lambda word: lm.score(prompt + word).logprobs[-1])
    result = tree_search(lm, prompt, expand=lambda g: words, depth=1)
    assert result.best.text == likeliest
    assert f"{likeliest!r} (best)" in str(result)
