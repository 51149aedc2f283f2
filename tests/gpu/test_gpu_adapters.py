"""Adapters on a GPU: the numbers of the plain backend, each line by its own, in captured steps."""

from __future__ import annotations

import pytest

from helpers.adapter_support import SHAPES, all_logits, random_adapter, with_adapters
from helpers.cuda_support import cuda_model, language_model, torch_model, written
from helpers.paged_texts import RandomCheckpoint, config
from helpers.parity import difference

CLOSE = 2e-4


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("name", SHAPES)
def test_the_numbers_of_the_plain_backend(name: str, exact: bool, device: str) -> None:
    checkpoint = RandomCheckpoint(config(**{"layers": 1, "context": 128, **SHAPES[name]}))
    expected = all_logits(with_adapters(torch_model(checkpoint)))
    actual = all_logits(with_adapters(cuda_model(checkpoint, exact=exact, device=device)))
    assert difference(actual, expected) < CLOSE


def test_texts_with_adapters_beside_each_other_are_those_alone(device: str) -> None:
    checkpoint = RandomCheckpoint(config(context=128))
    names = [None, "all", "few", "wide"] * 4
    options = {"max_tokens": 24, "temperature": 0.9, "seed": 3}
    with with_adapters(cuda_model(checkpoint, exact=True, device=device)) as lm:
        requests = [([5, 6, n], {"adapter": name, **options}) for n, name in enumerate(names)]
        streams = [lm.begin(prompt, **request_options) for prompt, request_options in requests]
        together = [[step.token for step in steps] for _, steps in streams]
        alone = [
            lm.generate(prompt, **request_options).tokens for prompt, request_options in requests
        ]
    assert together == alone and len({*map(tuple, together)}) > 4


def test_they_come_and_go_while_steps_are_captured(device: str) -> None:
    shape = config(context=128)
    checkpoint = RandomCheckpoint(shape)
    lm, expected = (
        language_model(cuda_model(checkpoint, device=device)),
        language_model(torch_model(checkpoint)),
    )
    for number in range(12):
        adapter = random_adapter(shape, 2 + number % 3, seed=number)
        for lm_ in (lm, expected):
            lm_.engine.adapters.load(f"a{number}", adapter)
            if number % 2:
                lm_.engine.adapters.unload(f"a{number - 1}")
        if number % 3 == 0:  # captured with what is there now
            requests = {"max_tokens": 4, "temperature": 0, "adapter": f"a{number}"}
            assert written(lm, [[5, 6]], **requests) == written(expected, [[5, 6]], **requests)
    for name in ("a1", "a7", "a11", None):
        requests = {"max_tokens": 12, "temperature": 0, "adapter": name}
        prompts = [[5, 6, 7], [8, 9]]
        assert written(lm, prompts, **requests) == written(expected, prompts, **requests)
