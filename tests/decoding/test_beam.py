"""Beam search gives the texts and scores of transformers; diverse beams those of the formula."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import unspool
from helpers.decoding_support import PROMPT, as_byte, logits_after, oracle, pages_left
from unspool.decoding.search.beam import beam_search
from unspool.errors import SettingsError, UnspoolError


def of_transformers(beams: int, results: int, end_ids: list[int], **options: Any):
    """Token lists without padding, and scores."""
    result = oracle().generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        num_beams=beams,
        num_return_sequences=results,
        do_sample=False,
        eos_token_id=end_ids or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    texts = []
    for row in result.sequences[:, len(PROMPT) :].tolist():
        ends = [place for place, token in enumerate(row) if token in end_ids]
        texts.append(row[: ends[0] + 1] if ends else row)
    return texts, result.sequences_scores.tolist()


# End tokens that this model does write, so that texts end early, late, and at different lengths.
ENDS = {"none": [], "some": [2, 20, 21, 22, 23, 24], "many": list(range(100, 160))}


@pytest.mark.parametrize(
    ("ends", "early_stopping", "length_penalty"),
    [
        ("none", False, 1.0), ("none", True, 0.0), ("none", "never", 2.5),
        ("some", False, -1.0), ("some", True, 1.0), ("some", "never", 0.0),
        ("many", False, 2.5), ("many", True, -1.0), ("many", "never", 1.0),
    ],
)  # fmt: skip
def test_equal_to_transformers(tiny_lm, monkeypatch, ends, early_stopping, length_penalty):
    monkeypatch.setattr(tiny_lm, "end_ids", frozenset(ENDS[ends]))
    texts, scores = of_transformers(
        4, 3, ENDS[ends],
        early_stopping=early_stopping, length_penalty=length_penalty, max_new_tokens=14,
    )  # fmt: skip
    result = beam_search(
        tiny_lm, PROMPT, beams=4, results=3, max_tokens=14,
        early_stopping=early_stopping, length_penalty=length_penalty,
    )  # fmt: skip
    assert [text.tokens for text in result.generations] == texts
    assert result.scores == pytest.approx(scores, rel=1e-5)


@pytest.mark.parametrize(("beams", "length"), [(1, 10), (2, 30), (12, 5)])
def test_equal_at_other_sizes(tiny_lm, monkeypatch, beams, length):
    ends = ENDS["some"]
    monkeypatch.setattr(tiny_lm, "end_ids", frozenset(ends))
    if beams == 1:  # which transformers calls greedy search
        expected = oracle().generate(
            torch.tensor([PROMPT]), max_new_tokens=length, do_sample=False, eos_token_id=ends
        )
        result = beam_search(tiny_lm, PROMPT, beams=1, max_tokens=length)
        assert result.best.tokens == expected[0, len(PROMPT) :].tolist()
        return
    texts, scores = of_transformers(beams, beams, ends, max_new_tokens=length)
    result = beam_search(tiny_lm, PROMPT, beams=beams, results=beams, max_tokens=length)
    assert [text.tokens for text in result.generations] == texts
    assert result.scores == pytest.approx(scores, rel=1e-5)


def test_the_comparison_covers_ended_and_unended_texts(tiny_lm, monkeypatch):
    reasons = set()
    for ends in ENDS.values():
        monkeypatch.setattr(tiny_lm, "end_ids", frozenset(ends))
        result = beam_search(tiny_lm, PROMPT, beams=4, results=4, max_tokens=14)
        reasons |= {(text.finish_reason, len(text.tokens)) for text in result.generations}
    assert ("length", 14) in reasons
    assert len({length for reason, length in reasons if reason == "stop"}) > 1


def brute_force_groups(beams: int, groups: int, penalty: float, length: int) -> list[Any]:
    """The formula without any sharing: every text computed afresh at every step."""
    size = beams // groups
    running = [[(0.0, [])] for _ in range(groups)]
    for _ in range(length):
        used: Counter[int] = Counter()
        for group in range(groups):
            options = []
            for score, tokens in running[group]:
                logprobs = logits_after([*PROMPT, *tokens]).double().log_softmax(-1)
                for token, logprob in enumerate(logprobs.tolist()):
                    total = score + logprob - penalty * used[token]
                    options.append((total, [*tokens, token]))
            running[group] = sorted(options, key=lambda option: -option[0])[:size]
            used.update(tokens[-1] for _, tokens in running[group])
    ended = [(score / length, tokens) for group in running for score, tokens in group]
    return sorted(ended, key=lambda option: -option[0])


@pytest.mark.parametrize(
    ("beams", "groups", "penalty", "length"), [(6, 2, 0.5, 5), (3, 3, 20.0, 4), (4, 1, 9.0, 3)]
)
def test_diverse_beams_follow_the_formula(tiny_lm, monkeypatch, beams, groups, penalty, length):
    monkeypatch.setattr(tiny_lm, "end_ids", frozenset())
    expected = brute_force_groups(beams, groups, penalty, length)
    result = beam_search(
        tiny_lm, PROMPT, beams=beams, groups=groups, diversity_penalty=penalty,
        results=beams, max_tokens=length,
    )  # fmt: skip
    assert [text.tokens for text in result.generations] == [tokens for _, tokens in expected]
    assert result.scores == pytest.approx([score for score, _ in expected], rel=1e-5)


def test_steps_are_the_models_own(tiny_lm):
    result = beam_search(tiny_lm, PROMPT, beams=3, max_tokens=9, top=4)
    judged = tiny_lm.score([*PROMPT, *result.best.tokens]).positions[len(PROMPT) :]
    for step, expected in zip(result.best.steps, judged, strict=True):
        assert step.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert (step.rank, step.token) == (expected.rank, expected.token)
        assert step.entropy == pytest.approx(expected.entropy, abs=1e-4)
        assert len(step.candidates) == 4
    assert [step.position for step in result.best.steps] == list(range(19, 28))
    assert result.scores[0] == pytest.approx(result.best.logprob / 9)


def test_a_result_can_be_gone_on_with(tiny_lm):
    best = beam_search(tiny_lm, PROMPT, beams=3, max_tokens=6).best
    extra = best.rewind(4).resume(max_tokens=6)
    greedy = tiny_lm.generate([*PROMPT, *best.tokens[:4]], max_tokens=6, temperature=0)
    assert extra.tokens == [*best.tokens[:4], *greedy.tokens]


def test_one_batch_a_step(tiny_lm):
    before = tiny_lm.engine.steps
    beam_search(tiny_lm, [*PROMPT, 13], beams=6, groups=2, max_tokens=10, end=False)
    assert tiny_lm.engine.steps - before == 10  # the prompt, and nine tokens; the tenth is not read


def test_no_room(tiny_lm):
    assert beam_search(tiny_lm, PROMPT, max_tokens=0).best.finish_reason == "length"
    full = [*PROMPT * 6, *range(14)]
    assert beam_search(tiny_lm, full, max_tokens=5).best.finish_reason == "context"
    nearly = beam_search(tiny_lm, full[:-2], max_tokens=5, end=False)
    assert (len(nearly.best.tokens), nearly.best.finish_reason) == (2, "context")


@pytest.mark.parametrize(
    "options",
    [
        {"beams": 0}, {"beams": 2.5}, {"beams": 4, "groups": 3}, {"beams": 2, "results": 3},
        {"early_stopping": "sometimes"}, {"max_tokens": -1}, {"top": -1},
    ],
)  # fmt: skip
def test_impossible_settings(tiny_lm, options):
    with pytest.raises(SettingsError):
        beam_search(tiny_lm, PROMPT, **options)
    assert pages_left(tiny_lm) == 0


def test_no_page_is_lost(tiny_lm, monkeypatch):
    beam_search(tiny_lm, PROMPT, beams=5, max_tokens=12)
    assert pages_left(tiny_lm) == 0
    calls = iter(range(100))
    top_next_tokens = unspool.decoding.search.beam.top_next_tokens
    fault = RuntimeError("in the middle")

    def fails(*arguments: Any) -> Any:
        if next(calls) == 3:
            raise fault
        return top_next_tokens(*arguments)

    monkeypatch.setattr("unspool.decoding.search.beam.top_next_tokens", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        beam_search(tiny_lm, PROMPT, beams=5, max_tokens=12)
    assert pages_left(tiny_lm) == 0


def test_too_little_memory(tiny_lm):
    """Beams that do not fit together fail with the numbers, and leave nothing behind."""
    page = tiny_lm.engine.backend.page_bytes
    small = unspool.load(tiny_lm.path, backend="torch", memory=6 * page)
    with pytest.raises(UnspoolError, match="memory"):
        beam_search(small, PROMPT, beams=8, groups=4, diversity_penalty=50.0, max_tokens=60)
    assert pages_left(small) == 0
    assert len(small.generate(PROMPT, max_tokens=20, end=False).tokens) == 20
    small.close()


def test_stop_strings_end_a_beam(tiny_lm, monkeypatch):
    monkeypatch.setattr(tiny_lm.engine, "token_bytes", as_byte)
    free = beam_search(tiny_lm, PROMPT, beams=3, max_tokens=8, end=False).best
    stop = as_byte(free.tokens[3]).decode("utf-8", "replace")
    result = beam_search(
        tiny_lm, PROMPT, beams=3, results=3, max_tokens=8, end=False, stop=stop, length_penalty=0
    )
    stopped = [text for text in result.generations if text.finish_reason == "stop"]
    assert stopped
    for text in result.generations:
        written = b"".join(map(as_byte, text.tokens)).decode("utf-8", "replace")
        assert text.text == written.split(stop)[0]
