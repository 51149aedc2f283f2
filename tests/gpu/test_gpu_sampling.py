"""What a step on a GPU picks: the chain's token from the step's own logits, for any settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.cuda_support import backend, check_picks, cuda_model, pick_rows
from helpers.paged_texts import Library, RandomCheckpoint, batch_of, config
from unspool.backends.step import Backend
from unspool.sampling import SamplingSettings


def settings(chance: np.random.Generator) -> SamplingSettings:
    return SamplingSettings(
        temperature=float(chance.choice([0.0, 0.3, 0.8, 1.0, 1.7])),
        top_k=int(chance.choice([0, 1, 5, 40, 3000])),
        top_p=float(chance.choice([0.1, 0.5, 0.95, 1.0])),
        min_p=float(chance.choice([0.0, 0.01, 0.1])),
        seed=int(chance.integers(0, 2**62)),
    )


@pytest.fixture(scope="module", params=[(259, "float32"), (50_000, "bfloat16")], ids=str)
def running(request: pytest.FixtureRequest, device: str) -> Backend:
    vocabulary, dtype = request.param
    shape = config(vocab_size=vocabulary, width=128, layers=1)
    return backend(cuda_model(RandomCheckpoint(shape), dtype=dtype, device=device), 128, 2048)


@pytest.mark.parametrize("rows", [1, 3, 40, 256])
@pytest.mark.parametrize("seed", range(3))
def test_lines_are_picked_as_by_the_chain(running: Backend, rows: int, seed: int):
    chance = np.random.default_rng(seed)
    library = Library(2048, running.vocab_size, seed)
    texts = [library.text(30) for _ in range(rows)]
    running.launch(batch_of([(text, 20) for text in texts])).result()
    for text in texts:
        text.read = 20
    batch = batch_of([(text, 1) for text in texts])
    settings_list = [settings(chance) for _ in texts]
    check_picks(running, _sampled(batch, settings_list, [21] * rows))


def test_prompts_are_picked_as_by_the_chain(running: Backend):
    chance = np.random.default_rng(5)
    library = Library(2048, running.vocab_size, 5)
    lengths = [40, 1, 90, 17, 25]
    batch = batch_of([(library.text(length), length) for length in lengths])
    settings_list = [settings(chance) for _ in lengths]
    check_picks(running, _sampled(batch, settings_list, lengths))


def test_a_token_may_be_what_the_step_before_picked(running: Backend):
    """Two steps in flight, the second on the picks of the first."""
    results_ = []
    for ahead in (False, True):
        library = Library(2048, running.vocab_size, 7)
        texts = [library.text(40) for _ in range(5)]
        prompt = batch_of([(text, 24) for text in texts])
        settings_list = [settings(np.random.default_rng(n)) for n in range(5)]
        flight = running.launch(_sampled(prompt, settings_list, [24] * 5))
        first = None if ahead else flight.result().tokens.tolist()
        for number, text in enumerate(texts):
            text.read = 24
            text.tokens[24] = -1 - number if first is None else first[number]
        second = running.launch(
            _sampled(batch_of([(t, 1) for t in texts]), settings_list, [25] * 5)
        )
        if not ahead:
            second.result()
        for number, text in enumerate(texts):
            text.read = 25
            text.tokens[25] = -1 - number if ahead else second.result().tokens[number]
        third = running.launch(_sampled(batch_of([(t, 1) for t in texts]), settings_list, [26] * 5))
        results = [step_result.result() for step_result in (flight, second, third)]
        results_.append(np.concatenate([step_result.tokens for step_result in results]).tolist())
    assert results_[0] == results_[1]


def _sampled(batch: Any, settings_list: list[SamplingSettings], lengths: list[int]) -> Any:
    """The same step, sampling after the last token of each row and returning its logits."""
    from dataclasses import replace

    last = batch.row_starts[1:] - 1
    return replace(
        batch, sample_indices=last, sampling=pick_rows(settings_list, lengths), logits_indices=last
    )
