"""Samples share the prompt and a batch, are each what they would be alone, and release it all."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from helpers.decoding_support import PROMPT, pages_left
from unspool.decoding.branches import HeldBranches, mean_logprob
from unspool.decoding.search.samples import best_of, samples, vote
from unspool.decoding.search.verifiers import answer_finder, tally
from unspool.engine.generation import Generation
from unspool.engine.request import Limits, Request
from unspool.engine.scheduler import EngineTask
from unspool.errors import ContextError, SettingsError, UnspoolError
from unspool.sampling import SamplingSettings

WARM = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 11}


def test_each_is_what_it_would_be_alone(tiny_lm):
    result = samples(tiny_lm, PROMPT, 5, max_tokens=12, **WARM)
    for number, text in enumerate(result):
        alone = tiny_lm.generate(PROMPT, max_tokens=12, sample=number, **WARM)
        assert text.tokens == alone.tokens
    assert len({tuple(text.tokens) for text in result}) == 5
    again = samples(tiny_lm, PROMPT, 2, max_tokens=12, sample=3, **WARM)
    assert [text.tokens for text in again] == [text.tokens for text in result[3:]]


def test_without_a_seed_all_share_a_fresh_one(tiny_lm):
    result = samples(tiny_lm, PROMPT, 3, max_tokens=4, temperature=2.0)
    assert len({text.seed for text in result}) == 1
    assert result[0].seed != samples(tiny_lm, PROMPT, 1, max_tokens=1)[0].seed


def test_the_prompt_is_computed_once_and_the_rest_in_one_batch(tiny_lm):
    pages_left(tiny_lm)  # nothing is known
    before = tiny_lm.engine.steps
    result = samples(tiny_lm, PROMPT, 6, max_tokens=10, end=False, **WARM)
    assert [text.usage.reused_tokens for text in result] == [len(PROMPT) - 1] * 6
    # The prompt, and ten tokens; a batch more where the engine began before all were handed in.
    assert 11 <= tiny_lm.engine.steps - before <= 11 + 5


def test_best_of_goes_by_mean_logprob(tiny_lm):
    result = best_of(tiny_lm, PROMPT, 6, max_tokens=8, **WARM)
    plain = samples(tiny_lm, PROMPT, 6, max_tokens=8, **WARM)
    assert list(result.scores) == sorted(map(mean_logprob, plain), reverse=True)
    assert result.best.tokens == max(plain, key=mean_logprob).tokens
    assert result.best.rewind(3).resume().tokens == result.best.tokens  # same seed, same sample


def test_best_of_goes_by_a_scorer(tiny_lm):
    result = best_of(tiny_lm, PROMPT, 6, scorer=lambda g: g.tokens[0], max_tokens=3, **WARM)
    assert list(result.scores) == sorted(result.scores, reverse=True)
    assert result.scores[0] == result.best.tokens[0]


@pytest.mark.parametrize("scorer", [lambda g: 1 / 0, lambda g: None])
def test_a_scorer_that_fails_fails_alone(tiny_lm, scorer):
    other, steps = tiny_lm.begin(PROMPT, max_tokens=20, end=False, seed=1)
    with pytest.raises(UnspoolError, match="failed on each of 3 texts: the verifier"):
        best_of(tiny_lm, PROMPT, 3, scorer=scorer, max_tokens=4)
    assert len(list(other.extend(steps))) == 20
    assert pages_left(tiny_lm) == 0


def test_vote(tiny_lm):
    result = vote(tiny_lm, PROMPT, 12, extract=lambda g: g.tokens[0] % 3, max_tokens=4, **WARM)
    assert sum(result.counts.values()) == 12
    assert result.counts[result.answer] == max(result.counts.values())
    assert next(iter(result.counts)) == result.answer
    supporters = [g for g in result.generations if g.tokens[0] % 3 == result.answer]
    assert result.winner is max(supporters, key=mean_logprob)


def test_a_tie_goes_to_the_likeliest_text(tiny_lm):
    result = vote(tiny_lm, PROMPT, 5, extract=lambda g: tuple(g.tokens), max_tokens=6, **WARM)
    assert set(result.counts.values()) == {1}
    assert result.winner is max(result.generations, key=mean_logprob)


def test_texts_without_an_answer_do_not_vote(tiny_lm):
    result = vote(tiny_lm, PROMPT, 3, extract=lambda g: None, max_tokens=2)
    assert (result.answer, result.winner, result.counts) == (None, None, {})
    assert len(result.generations) == 3
    assert vote(tiny_lm, PROMPT, 2, extract=r"(\d+)", max_tokens=2).answer is None


@pytest.mark.parametrize("extract", ["answer (is", 5])
def test_a_pattern_is_checked_before_anything_runs(tiny_lm, extract):
    before = tiny_lm.engine.steps
    with pytest.raises(SettingsError, match="extract"):
        vote(tiny_lm, PROMPT, 3, extract=extract)
    assert tiny_lm.engine.steps == before


@pytest.mark.parametrize("extract", [lambda g: g.tokens, lambda g: g.nothing])
def test_an_extract_that_fails(tiny_lm, extract):
    with pytest.raises(UnspoolError, match="extract raised"):
        vote(tiny_lm, PROMPT, 2, extract=extract, max_tokens=2)


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_impossible_numbers(tiny_lm, n):
    with pytest.raises(SettingsError, match="n must be"):
        samples(tiny_lm, PROMPT, n)


def test_faults_leave_nothing_behind(tiny_lm):
    with pytest.raises(SettingsError):
        samples(tiny_lm, PROMPT, 3, max_tokens=-1)
    with pytest.raises(SettingsError, match="temperture"):
        samples(tiny_lm, PROMPT, 3, temperture=1)
    with pytest.raises(ContextError):
        samples(tiny_lm, PROMPT * 10, 3)
    assert samples(tiny_lm, [5], 2, max_tokens=0)[0].finish_reason == "length"
    assert pages_left(tiny_lm) == 0


@pytest.mark.parametrize(
    ("pattern", "texts", "counts"),
    [
        (r"answer is (\d+)", ["answer is 4", "so the answer is 4.", "4"], {"4": 2}),
        (r"\d+", ["2 and 2 make 4", "5", "none"], {"4": 1, "5": 1}),
        (re.compile(r"(yes|no)", re.I), ["No. Yes", "Yes", "no"], {"Yes": 2, "no": 1}),
        (r"a(b)?", ["a", "ab", "xab "], {"b": 2}),
    ],
)
def test_a_patterns_last_match_counts(tiny_lm, pattern, texts, counts):
    written = tiny_lm.generate(PROMPT, max_tokens=1, end=False).steps[0]
    request = Request(prompt=(1,), settings=SamplingSettings(), limits=Limits(context=9))
    inputs = [Generation(request, [replace(written, text=t)]) for t in texts]
    find = answer_finder(pattern)
    votes = tally(inputs, [find(text) for text in inputs])
    assert votes == counts
    assert votes[next(iter(votes))] == max(counts.values())


def test_move_forks_and_prunes(tiny_lm):
    engine = tiny_lm.engine
    with HeldBranches(engine) as open_branches:
        root = open_branches.open(PROMPT)
        first = engine.extend(root)
        item, two, three = open_branches.move([root, root, root])
        assert item is root and len({item, two, three}) == 3
        assert two.pages == item.pages  # shared until one side writes
        engine.extend_all([(item, [1]), (two, [2]), (three, [3])])
        two, four = open_branches.move([two, two])
        assert item.closed and three.closed and not two.closed and not four.closed
        assert four.tokens == [*PROMPT, 2]
        engine.rewind(four, len(PROMPT))
        assert engine.extend(four) == pytest.approx(first, abs=1e-4)
    assert two.closed and four.closed
    assert pages_left(tiny_lm) == 0


class Waited(EngineTask):
    """A waiter that ignores errors."""

    def complete(self): ...

    def fail(self, error): ...


def test_a_branch_that_is_still_being_computed(tiny_lm):
    """As after an interrupt, or an error in another branch of the same batch."""
    engine = tiny_lm.engine
    open_branches = HeldBranches(engine)
    branch = open_branches.open(PROMPT)

    def begin_and_leave() -> None:
        engine.scheduler.add(Waited(branch))
        open_branches.__exit__(None, None, None)

    engine.call(begin_and_leave)
    tiny_lm.generate(PROMPT, max_tokens=2)  # some batches go by
    assert pages_left(tiny_lm) == 0
