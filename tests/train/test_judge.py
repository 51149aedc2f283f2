"""Bits per byte: by hand, by `score`, with a sliding context; likelihoods alone and in a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import unspool
from helpers import small_model as small
from unspool.errors import SettingsError
from unspool.train.evaluation.bits_per_byte import bits_per_byte, score_continuations, windows

TEXT = "The people of the United States, and their union in 1999. " * 5


@pytest.fixture(scope="module", params=["torch", "native"])
def lm(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("judged")
    small.save_model(folder, max_position_embeddings=256)
    with unspool.load(folder, backend=request.param, memory=32 << 20) as result:
        yield result


def logprob(lm: Any, before: list[int], token: int) -> float:
    """By hand: all logits behind these tokens, and a softmax."""
    with lm.open_branch(before) as branch:
        logits = np.asarray(lm.engine.extend(branch)[-1], dtype=np.float64)
    return float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))


def test_equal_to_score_and_to_a_sum_by_hand(lm: Any):
    text = TEXT[:120]
    ids = [lm.tokenizer.eos_id, *lm.tokenizer.encode(text)]
    result = bits_per_byte(lm, [text], progress=False)
    by_score = lm.score(ids)
    assert result.nats == pytest.approx(-by_score.total, rel=1e-4)
    by_hand = -sum(logprob(lm, ids[:n], ids[n]) for n in range(1, len(ids)))
    assert result.nats == pytest.approx(by_hand, rel=1e-4)
    assert (result.bytes, result.tokens, result.documents) == (120, len(ids) - 1, 1)
    assert result.bits_per_byte == pytest.approx(by_hand / math.log(2) / 120, rel=1e-4)
    assert result.perplexity == pytest.approx(math.exp(by_hand / (len(ids) - 1)), rel=1e-3)


def test_a_sliding_context(lm: Any):
    """Each token once, behind as many tokens as its window has: summed up one by one."""
    ids = [lm.tokenizer.eos_id, *lm.tokenizer.encode(TEXT[:150])]
    width, stride = 32, 12
    result = bits_per_byte(lm, [TEXT[:150]], context=width, stride=stride, progress=False)
    expected, done = 0.0, 1
    while done < len(ids):
        end = min(len(ids), done + (width if done == 1 else stride))
        start = max(0, end - 1 - width)
        expected -= sum(logprob(lm, ids[start:n], ids[n]) for n in range(done, end))
        done = end
    assert result.nats == pytest.approx(expected, rel=1e-4)
    assert result.tokens == len(ids) - 1


def test_documents_are_judged_apart(lm: Any):
    texts = ["The union.", "", "They've done it already!"]
    full = bits_per_byte(lm, texts, progress=False)
    parts = [bits_per_byte(lm, [text], progress=False) for text in texts if text]
    assert full.nats == pytest.approx(sum(part.nats for part in parts), rel=1e-5)
    assert full.documents == 2
    assert full.bytes == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize(
    ("length", "width", "stride"), [(2, 8, 4), (50, 8, 3), (50, 8, 8), (9, 8, 1)]
)
def test_windows_judge_every_token_once(length: int, width: int, stride: int):
    ids = list(range(length))
    result = windows(ids, width, stride)
    assert [token for _, target in result for token in target] == ids[1:]
    for number, (context, target) in enumerate(result):
        assert context[-1] + 1 == target[0]
        assert len(context) + len(target) - 1 <= width
        assert len(target) <= (width if number == 0 else stride)
    assert all(len(c) + len(t) - 1 == width for c, t in result[1:])


def test_many_likelihoods_are_those_of_each_alone(lm: Any):
    rng = np.random.default_rng(0)
    question = rng.integers(4, 290, 40).tolist()
    answers = [rng.integers(4, 290, int(n)).tolist() for n in (1, 3, 9)]
    pairs = [(question, answer) for answer in answers]
    pairs += [(rng.integers(4, 290, int(n)).tolist(), [7, 8]) for n in rng.integers(1, 90, 40)]
    best = int(np.argmax(np.asarray(_last_logits(lm, question))))
    pairs += [(question, [best]), (question, [])]
    result = score_continuations(lm, pairs)
    for (context, target), first in zip(pairs, result, strict=True):
        expected = [logprob(lm, [*context, *target[:n]], token) for n, token in enumerate(target)]
        assert first.logprobs == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert result[-2].greedy
    assert not all(first.greedy for first in result)
    assert result[-1].logprobs == ()


def _last_logits(lm: Any, tokens: list[int]) -> Any:
    with lm.open_branch(tokens) as branch:
        return lm.engine.extend(branch)[-1]


def test_long_continuations_come_in_pieces(lm: Any, monkeypatch: pytest.MonkeyPatch):
    ids = np.random.default_rng(1).integers(4, 290, 120).tolist()
    full = score_continuations(lm, [(ids[:2], ids[2:])])[0]
    monkeypatch.setattr("unspool.train.evaluation.bits_per_byte._MAX_LOGIT_ROWS", 16)
    pieces = score_continuations(lm, [(ids[:2], ids[2:]), (ids[:5], ids[5:9])])[0]
    assert pieces.logprobs == pytest.approx(full.logprobs, rel=1e-3, abs=1e-4)


def test_what_cannot_be_judged(lm: Any):
    with pytest.raises(SettingsError, match="no text to evaluate"):
        bits_per_byte(lm, ["", ""])
    with pytest.raises(SettingsError, match="got 99"):
        bits_per_byte(lm, ["a"], context=32, stride=99)
    with pytest.raises(SettingsError, match="at least one context token"):
        score_continuations(lm, [([], [1])])
    with pytest.raises(SettingsError, match="the model's context of 256"):
        score_continuations(lm, [([1], [2] * 300)])


def test_a_context_that_is_too_long_is_cut_at_its_beginning(lm: Any):
    ids = np.random.default_rng(2).integers(4, 290, 300).tolist()
    result = score_continuations(lm, [(ids[:290], ids[290:292])])[0]
    assert result.logprobs[1] == pytest.approx(logprob(lm, ids[35:291], ids[291]), rel=1e-3)
