"""Gaps filled by ranking: scores are exact, borders are text's and not tokens'."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from helpers.decoding_support import pages_left
from helpers.word_model import save_worded
from unspool import SettingsError, UnspoolError, gap
from unspool.decoding.infill.causal import start_ids, text_ids, token_ends, tokens_within
from unspool.decoding.infill.result import GappedText

LEFT, RIGHT = "The scheduler plans rows, and the ", " builder makes a step of them."
WORDS = st.text(
    st.sampled_from("abctehr sn.,'\n-é🌿_"), min_size=0, max_size=12
)  # merges, halves of characters, spaces at every border


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_worded(tmp_path_factory.mktemp("worded"))
    return unspool.load(folder, backend="torch", memory=16 << 20)


def total(lm: Any, text: str, first: int) -> float:
    """Brute force: the log-probability of a whole text's tokens from a position on."""
    return math.fsum(p.logprob for p in lm.score(text_ids(lm, text)).positions[first:])


# -- the scores --------------------------------------------------------------------------------


def test_scores_are_those_of_the_whole_texts(worded):
    result = worded.fill(LEFT, gap(1, 3), RIGHT, reach=None)
    assert result.by == "ranking" and len(result.candidates) > 3
    for item in result.candidates:
        first = len(text_ids(worded, item.text)) - len(item.steps)
        assert item.score == pytest.approx(total(worded, item.text, first), abs=1e-3)
    shared = {len(text_ids(worded, item.text)) - len(item.steps) for item in result.candidates}
    assert len(shared) == 1 and shared.pop() > 5  # the prefix side was not judged again
    scores = [item.score for item in result.candidates]
    assert scores == sorted(scores, reverse=True)
    assert math.fsum(item.probability for item in result.candidates) == pytest.approx(1)
    assert result.text == result.chosen.text == LEFT + result.texts[0] + RIGHT


def test_the_best_of_given_choices_is_that_of_brute_force(worded):
    choices = ["batch", "page", "token", "", "page and the token", "tree\n"]
    result = worded.fill(LEFT, gap, RIGHT, choices=choices, reach=None)
    expected = sorted(choices, key=lambda word: -total(worded, LEFT + word + RIGHT, 1))
    assert [item.texts[0] for item in result.candidates] == expected


def test_how_far_the_right_side_is_weighed(worded):
    choices = ["batch", "page"]
    near = worded.fill(LEFT, gap, RIGHT, choices=choices, reach=2)
    for item in near.candidates:
        displayed = "".join(step.text for step in item.steps)
        assert (LEFT + item.texts[0] + RIGHT).find(displayed) > 0 and not displayed.endswith(
            "them."
        )
        assert item.text.endswith(RIGHT)


def test_the_left_side_is_computed_once(worded):
    words = "the page of the tree is " * 12
    worded.engine.call(worded.engine.tree.index.clear)
    before = worded.engine.steps
    worded.fill(words, gap, " and so on", choices=["one", "two", "three"])
    used = worded.engine.call(lambda: worded.engine.tree.index.pages)
    assert used * worded.engine.tree.page_size < 2 * len(text_ids(worded, words))
    assert worded.engine.steps > before
    assert pages_left(worded) == 0


def test_several_gaps(worded):
    result = worded.fill(
        "The ", gap(1, 2), " of the ", gap(1), " is a page.", candidates=6, reach=None
    )
    for item in result.candidates:
        assert item.text == f"The {item.texts[0]} of the {item.texts[1]} is a page."
        first = len(text_ids(worded, item.text)) - len(item.steps)
        assert item.score == pytest.approx(total(worded, item.text, first), abs=1e-3)
        for text, steps in zip(item.texts, item.gap_steps, strict=True):
            assert "".join(step.text for step in steps) == text


def test_more_than_the_likeliest_first_token_is_found(worded):
    """Ranking can take what greedy writing from the prefix would not."""
    greedy = worded.generate(text_ids(worded, LEFT.rstrip()), max_tokens=1, temperature=0).text
    result = worded.fill(LEFT.rstrip(), gap(1), RIGHT, reach=None)
    best = max(result.candidates, key=lambda item: item.score)
    assert best is result.candidates[0] and len(result.candidates) > 1
    assert best.score >= next(
        (item.score for item in result.candidates if item.texts[0] == greedy), -math.inf
    )


# -- borders -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(WORDS, WORDS, WORDS)
def test_texts_are_put_together_exactly(worded, prefix, inside, suffix):
    """However the vocabulary cuts it: the text is prefix + gap + suffix, and so are its steps."""
    try:
        result = worded.fill(prefix, gap, suffix, choices=[inside, "tree"], reach=None)
    except UnspoolError as error:
        assert "adjacent" in str(error)
        return
    for item in result.candidates:
        assert item.text == prefix + item.texts[0] + suffix
        assert "".join(step.text for step in item.gap_steps[0]) == item.texts[0]
        first = len(text_ids(worded, item.text)) - len(item.steps) + (not suffix)
        judged = item.steps[:-1] if not suffix else item.steps
        scored = math.fsum(step.logprob for step in judged)
        assert scored == pytest.approx(total(worded, item.text, first), abs=2e-3)


@settings(max_examples=20, deadline=None)
@given(WORDS, WORDS)
def test_drafts_continue_the_text_across_the_border(worded, prefix, suffix):
    result = worded.fill(prefix, gap(0, 3), suffix, candidates=5, drafts=2)
    texts = [item.texts[0] for item in result.candidates]
    assert len({*texts}) == len(texts)
    for item in result.candidates:
        assert item.text == prefix + item.texts[0] + suffix
        ids = text_ids(worded, item.text)
        inside = len(prefix.encode()), len((prefix + item.texts[0]).encode())
        assert len(tokens_within(token_ends(worded, ids, item.text), *inside)) <= 3


@given(WORDS)
def test_where_tokens_end(worded, text):
    ids = text_ids(worded, text)
    ends = token_ends(worded, ids, text)
    assert ends[-1] == len(text.encode())
    pieces = [text.encode()[a:b] for a, b in itertools.pairwise([0, *ends])]
    assert pieces == [worded.engine.token_bytes(token) for token in ids]


def test_a_token_that_reaches_over_the_border_counts(worded):
    text = "and the page"
    ids = text_ids(worded, text)
    ends = token_ends(worded, ids, text)
    spaced = tokens_within(ends, 3, 4)  # the space alone belongs to the next token
    assert len(spaced) == 1 and worded.engine.token_bytes(ids[spaced.start]).startswith(b" ")
    assert len(tokens_within(ends, 3, 3)) == 0
    assert start_ids(worded) == ids[:1]


# -- lengths, and what is asked for -------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_gap_of_known_length_has_so_many_tokens(worded, length):
    result = worded.fill(LEFT, gap(length), RIGHT, candidates=8)
    assert {len(item.gap_steps[0]) for item in result.candidates} == {length}


def test_same_seed_same_candidates(worded):
    def sample_texts(seed: int) -> list[str]:
        options = {"temperature": 1.5, "seed": seed, "top_k": 0}
        result = worded.fill(LEFT, gap(3, 6), RIGHT, candidates=6, **options)
        return [item.texts[0] for item in result.candidates]

    assert sample_texts(1) == sample_texts(1) != sample_texts(2)


def test_steps_tell_candidates(worded):
    item = worded.fill(LEFT, gap(1), RIGHT, candidates=3, top=4).chosen
    assert all(len(step.candidates) == 4 and step.rank is not None for step in item.steps)
    assert item.gap_steps[0][0].candidates


def test_marks_in_one_text(worded):
    item = worded.fill("The ___ of the tree", choices=["page"])
    assert item.text == "The page of the tree"
    parts = GappedText.parse(["a", gap(2), "b", "c", gap])
    assert parts.texts == ("a", "bc", "") and [g.most for g in parts.gaps] == [2, 16]
    assert parts.filled(["1", "2"]) == "a1bc2"
    assert repr(gap) == "gap" and repr(gap(2)) == "gap(2)" and repr(gap(1, 3)) == "gap(1, 3)"


def test_results_can_be_chosen_and_shown(worded):
    result = worded.fill(LEFT, gap, RIGHT, choices=["<page>", "tree"])
    other = result.choose(1)
    assert other.text == result.candidates[1].text != result.text == str(result)
    assert "&lt;page&gt;" in result._repr_html_() and "<page>" not in result._repr_html_()
    assert result.to_dict()["candidates"][0]["texts"] == list(result.texts)
    assert "Filling by ranking" in repr(result)
    with pytest.raises(SettingsError, match="from 0 to 1"):
        result.choose(2)


@pytest.mark.parametrize(
    ("parts", "options", "words"),
    [
        (["no gap here"], {}, "three underscores"),
        (["a", "b"], {}, "nothing to fill"),
        ([gap, gap], {}, "adjacent"),
        (["a", 3, gap], {}, "a text or a gap"),
        (["a", gap, "b"], {"by": "magic"}, "masked, fim"),
        (["a", gap, "b"], {"by": "fim"}, "no FIM tokens"),
        (["a", gap, "b"], {"by": "masked"}, "no mask token"),
        (["a", gap, "b"], {"regex": "x+"}, "regex cannot be used"),
        (["a", gap, "b"], {"max_tokens": 3}, "not with max_tokens"),
        (["a", gap, "b"], {"candidates": 0}, ">= 1"),
        (["a", gap, "b"], {"temprature": 1}, "temperature"),
        (["a", gap, "b"], {"choices": []}, "at least one"),
        (["a ___ b ___"], {"choices": ["x"]}, "one gap"),
        (["word " * 2000, gap, "b"], {}, "context"),
    ],
)
def test_what_cannot_be_is_refused(worded, parts, options, words):
    with pytest.raises(UnspoolError, match=words):
        worded.fill(*parts, **options)
    assert pages_left(worded) == 0


@pytest.mark.parametrize("length", [(3, 1), (0,), (-1, 2), (1, 10_000), ("2",), (True,)])
def test_a_gap_that_cannot_be(length):
    with pytest.raises(SettingsError):
        gap(*length)
