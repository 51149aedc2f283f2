"""Judges: what they say, and that one which fails fails its logprobs text alone, in words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers.decoding_support import PROMPT, logits_after, pages_left
from helpers.search_support import WARM
from unspool.decoding.branches import mean_logprob
from unspool.decoding.search import verifiers as judging
from unspool.decoding.search.samples import samples, vote
from unspool.decoding.search.think import think
from unspool.decoding.search.verifiers import (
    CertaintyVerifier,
    LogprobVerifier,
    Verdict,
    VoteVerifier,
    as_verifier,
    checked,
    final_answer,
)
from unspool.errors import SettingsError, UnspoolError

ASKED = {"max_tokens": 5, "end": False, **WARM}


def broken_on(odd):
    """A judge that does something strange with every text whose first token is odd."""

    def judge(text):
        return odd(text) if text.tokens[0] % 2 else text.tokens[0]

    return judge


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (lambda text: 1 / 0, "the verifier raised ZeroDivisionError: division by zero"),
        (lambda text: "very good", "the verifier gave 'very good'; it must give a number"),
        (lambda text: math.inf, "the verifier gave inf; it must give a finite number"),
        (lambda text: None, "the verifier gave no score"),
        (lambda text: Verdict(1.0, answer=[]), "it must give a number"),
        (lambda text: Verdict(None, "did not compile"), "did not compile"),
    ],
)
def test_a_judge_that_fails_fails_its_text_alone(tiny_lm, odd, why):
    result = think(tiny_lm, PROMPT, n=8, judge=broken_on(odd), **ASKED)
    failed = [node for node in result.tree.root.children if node.score is None]
    others = [node for node in result.tree.root.children if node.score is not None]
    assert failed and others
    assert all(node.generation.tokens[0] % 2 and why in node.why for node in failed)
    assert result.best.tokens[0] == max(node.generation.tokens[0] for node in others)


@pytest.mark.parametrize("policy", ["best-of", "beam", "dvts", "mcts", "restarts"])
def test_where_all_fail_it_is_told(tiny_lm, policy):
    with pytest.raises(
        UnspoolError, match=r"failed on each of \d+ texts: the verifier raised KeyErr"
    ):
        think(tiny_lm, PROMPT, policy=policy, judge=lambda text: {}["score"], budget=150, **ASKED)
    assert pages_left(tiny_lm) == 0


class OfMany:
    """A verifier of several texts with a fault."""

    partial = True

    def __init__(self, fault) -> None:
        self.fault = fault

    def cost(self, texts):
        return 0

    def score(self, texts):
        return self.fault([Verdict(float(text.tokens[0])) for text in texts])


def test_one_text_does_not_spoil_the_others_of_its_batch(tiny_lm):
    def raises(verdicts):
        if any(verdict.score % 2 for verdict in verdicts):
            raise ValueError("odd")
        return verdicts

    result = think(tiny_lm, PROMPT, n=8, judge=OfMany(raises), **ASKED)
    nodes = result.tree.root.children
    assert {node.why for node in nodes} == {"", "the verifier raised ValueError: odd"}
    assert all((node.score is None) == bool(node.generation.tokens[0] % 2) for node in nodes)
    with pytest.raises(UnspoolError, match="the verifier gave 0 verdicts for 1 texts"):
        think(tiny_lm, PROMPT, n=3, judge=OfMany(lambda verdicts: []), **ASKED)
    with pytest.raises(UnspoolError, match="the verifier raised TypeError"):
        think(tiny_lm, PROMPT, n=3, judge=OfMany(lambda verdicts: None), **ASKED)


def test_an_unfinished_text_can_lose_its_children(tiny_lm):
    """A judge that knows no further: the best text so far is brought to its end all the same."""
    result = think(
        tiny_lm, PROMPT, policy="beam", keep=2, width=2, step="tokens", tokens=2, max_tokens=8,
        judge=lambda text: 1.0 if len(text.tokens) in (2, 8) else None, end=False, **WARM,
    )  # fmt: skip
    assert len(result.best.tokens) == 8


def test_certainty_is_the_distance_from_knowing_nothing(tiny_lm):
    (text,) = samples(tiny_lm, PROMPT, 1, max_tokens=4, end=False, **WARM)
    expected = []
    for length in range(4):
        logprobs = torch.log_softmax(logits_after([*PROMPT, *text.tokens[:length]]), -1)
        uniform = torch.full_like(logprobs, 1 / len(logprobs))
        expected.append(float((uniform * (uniform.log() - logprobs)).sum()))
    judge = CertaintyVerifier(tiny_lm)
    (verdict,) = judge.score([text])
    assert verdict.score == pytest.approx(sum(expected) / 4, rel=1e-4)
    assert judge.cost([text, text]) == 8 and judge.partial


def test_certainties_are_the_same_together_alone_and_in_pieces(tiny_lm, monkeypatch):
    texts = [samples(tiny_lm, PROMPT, 1, max_tokens=n, end=False, **WARM)[0] for n in (9, 2, 3, 5)]
    judge = CertaintyVerifier(tiny_lm)
    alone = [judge.score([text])[0].score for text in texts]
    for rows in (1000, 5, 2):
        monkeypatch.setattr(judging, "_MAX_LOGITS", rows * tiny_lm.vocab_size)
        together = [verdict.score for verdict in judge.score(texts)]
        assert together == pytest.approx(alone, rel=1e-4)
    empty = replace(texts[0], steps=[])
    assert [verdict.score is None for verdict in judge.score([empty, texts[1]])] == [True, False]


def test_logprob(tiny_lm):
    texts = samples(tiny_lm, PROMPT, 3, **ASKED)
    assert [v.score for v in LogprobVerifier().score(texts)] == [mean_logprob(t) for t in texts]
    assert LogprobVerifier().score([tiny_lm.prepare_generation(PROMPT)])[0].score is None


def test_votes_are_those_of_lm_vote(tiny_lm):
    def find(text):
        return None if text.tokens[0] % 5 == 0 else text.tokens[0] % 3

    counted = vote(tiny_lm, PROMPT, 12, extract=find, **ASKED)
    result = think(tiny_lm, PROMPT, policy="vote", n=12, extract=find, **ASKED)
    total = sum(counted.counts.values())
    assert result.answers == {a: n / total for a, n in counted.counts.items()}
    assert result.answer == counted.answer
    assert result.best.tokens == counted.winner.tokens
    silent = [node for node in result.tree.root.children if node.score is None]
    assert len(silent) == 12 - total and all("no answer" in node.why for node in silent)


def test_a_judge_gives_votes_their_weight(tiny_lm):
    def find(text):
        return text.tokens[0] % 3

    def weight(text):
        return float(text.tokens[1])

    texts = samples(tiny_lm, PROMPT, 9, **ASKED)
    expected = {answer: 0.0 for answer in range(3)}
    for text in texts:
        expected[find(text)] += weight(text) / sum(map(weight, texts))
    for verdict, text in zip(
        VoteVerifier(find, as_verifier(weight)).score(texts), texts, strict=True
    ):
        assert (verdict.answer, verdict.score) == (find(text), pytest.approx(expected[find(text)]))
    result = think(tiny_lm, PROMPT, policy="vote", n=9, extract=find, judge=weight, **ASKED)
    assert result.answer == max(expected, key=expected.get)
    # Log-probabilities are weights too: e^score, as they are below nought.
    by_logprob = VoteVerifier(find, LogprobVerifier()).score(texts)
    shares = {verdict.answer: verdict.score for verdict in by_logprob}
    assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) > 0


@pytest.mark.parametrize(
    ("output_text", "answer"),
    [
        ("so 3 + 4 = 7.\nThe answer is 7.", "7"),
        (r"thus \boxed{12} and not 13", "12"),
        ("#### 1,200", "1200"),
        ("Answer: **Paris**.", "Paris"),
        ("first 3, then 4.5 apples", "4.5"),
        ("no number\nat all\n\n", "at all"),
        ("", None),
    ],
)
def test_answers_are_found(output_text, answer):
    class Said:
        text = output_text

    assert final_answer(Said()) == answer


def test_what_can_be_a_judge():
    judge = LogprobVerifier()
    assert as_verifier(judge) is judge
    assert checked(True) == Verdict(1.0) and checked(0) == Verdict(0.0)
    with pytest.raises(SettingsError, match="judge must be"):
        as_verifier(5)
