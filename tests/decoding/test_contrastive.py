"""Contrastive search is the formula of its paper, with hidden states as transformers has them."""

from __future__ import annotations

import pytest
import torch

from decoding.support import PROMPT, oracle, pages_left
from unspool.decoding.contrastive import contrastive_search
from unspool.errors import SettingsError


@torch.inference_mode()
def brute_force(prompt: list[int], k: int, alpha: float, length: int) -> list[int]:
    """The formula, every text computed afresh."""
    tokens = list(prompt)
    for _ in range(length):
        chances, best = oracle()(torch.tensor([tokens])).logits[0, -1].softmax(-1).topk(k)
        values = []
        for chance, token in zip(chances, best, strict=True):
            read = oracle()(torch.tensor([[*tokens, int(token)]]), output_hidden_states=True)
            hidden = torch.nn.functional.normalize(read.hidden_states[-1][0], dim=-1)
            alike = (hidden[:-1] @ hidden[-1]).max()
            values.append(float((1 - alpha) * chance - alpha * alike))
        tokens.append(int(best[values.index(max(values))]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("k", "alpha"), [(4, 0.6), (5, 0.05), (3, 0.3), (8, 1.0)])
def test_equal_to_the_formula(tiny_lm, k, alpha):
    found = contrastive_search(tiny_lm, PROMPT, k=k, alpha=alpha, max_tokens=12, end=False)
    assert found.tokens == brute_force(PROMPT, k, alpha, 12)
    assert any(step.rank > 0 for step in found.steps)  # the penalty did something


def test_a_prompt_of_several_pieces(tiny_lm):
    prompt = [(number * 37) % 250 + 3 for number in range(100)]
    found = contrastive_search(tiny_lm, prompt, k=4, alpha=0.5, max_tokens=6, end=False)
    assert found.tokens == brute_force(prompt, 4, 0.5, 6)


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"k": 1}])
def test_without_a_penalty_or_a_choice_it_is_greedy(tiny_lm, options):
    greedy = tiny_lm.generate(PROMPT, max_tokens=15, temperature=0)
    found = contrastive_search(tiny_lm, PROMPT, max_tokens=15, **options)
    assert found.tokens == greedy.tokens
    assert found.logprob == pytest.approx(greedy.logprob, rel=1e-5)


def test_steps_and_going_on(tiny_lm):
    found = contrastive_search(tiny_lm, PROMPT, max_tokens=10, end=False, top=3)
    judged = tiny_lm.score([*PROMPT, *found.tokens]).positions[len(PROMPT) :]
    for step, expected in zip(found.steps, judged, strict=True):
        assert step.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert (step.rank, len(step.candidates)) == (expected.rank, 3)
    more = found.rewind(5).resume(max_tokens=3)
    assert more.tokens[:5] == found.tokens[:5] and len(more.tokens) == 8


def test_one_batch_a_token(tiny_lm):
    before = tiny_lm.engine.steps
    contrastive_search(tiny_lm, PROMPT, k=4, max_tokens=7, end=False)
    assert tiny_lm.engine.steps - before == 8


def test_ends_and_edges(tiny_lm, monkeypatch):
    plain = contrastive_search(tiny_lm, PROMPT, max_tokens=10, end=False)
    monkeypatch.setattr(tiny_lm, "end_ids", frozenset(plain.tokens[4:5]))
    ended = contrastive_search(tiny_lm, PROMPT, max_tokens=10)
    assert ended.finish_reason == "stop" and ended.tokens[-1] == plain.tokens[4]
    assert contrastive_search(tiny_lm, PROMPT, max_tokens=0).finish_reason == "length"
    full = [*PROMPT * 6, *range(12)]
    found = contrastive_search(tiny_lm, full, max_tokens=9, end=False)
    assert (len(found.tokens), found.finish_reason) == (2, "context")
    for options in ({"k": 0}, {"alpha": 1.5}, {"max_tokens": -2}):
        with pytest.raises(SettingsError):
            contrastive_search(tiny_lm, PROMPT, **options)


def test_no_page_is_lost(tiny_lm, monkeypatch):
    contrastive_search(tiny_lm, PROMPT, max_tokens=20)
    assert pages_left(tiny_lm) == 0

    def fails(*_: object) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr("unspool.decoding.contrastive._vectors", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        contrastive_search(tiny_lm, PROMPT, max_tokens=20)
    assert pages_left(tiny_lm) == 0
