"""Adapters on a GPU: the numbers of the plain backend, each line by its own, in captured steps."""

from __future__ import annotations

import pytest
from cuda_support import language_model, ours, plain, written
from paged_texts import RandomCheckpoint, config
from parity import difference

from adapter_support import SHAPES, all_logits, random_adapter, with_adapters

CLOSE = 2e-4


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("name", SHAPES)
def test_the_numbers_of_the_plain_backend(name: str, exact: bool, device: str) -> None:
    checkpoint = RandomCheckpoint(config(**{"layers": 1, "context": 128, **SHAPES[name]}))
    theirs = all_logits(with_adapters(plain(checkpoint)))
    mine = all_logits(with_adapters(ours(checkpoint, exact=exact, device=device)))
    assert difference(mine, theirs) < CLOSE


def test_texts_with_adapters_beside_each_other_are_those_alone(device: str) -> None:
    checkpoint = RandomCheckpoint(config(context=128))
    names = [None, "all", "few", "wide"] * 4
    options = {"max_tokens": 24, "temperature": 0.9, "seed": 3}
    with with_adapters(ours(checkpoint, exact=True, device=device)) as lm:
        asked = [([5, 6, n], {"adapter": name, **options}) for n, name in enumerate(names)]
        begun = [lm.begin(prompt, **given) for prompt, given in asked]
        together = [[step.token for step in steps] for _, steps in begun]
        alone = [lm.generate(prompt, **given).tokens for prompt, given in asked]
    assert together == alone and len({*map(tuple, together)}) > 4


def test_they_come_and_go_while_steps_are_captured(device: str) -> None:
    shape = config(context=128)
    checkpoint = RandomCheckpoint(shape)
    lm, theirs = language_model(ours(checkpoint, device=device)), language_model(plain(checkpoint))
    for number in range(12):
        adapter = random_adapter(shape, 2 + number % 3, seed=number)
        for one in (lm, theirs):
            one.engine.adapters.load(f"a{number}", adapter)
            if number % 2:
                one.engine.adapters.unload(f"a{number - 1}")
        if number % 3 == 0:  # captured with what is there now
            asked = {"max_tokens": 4, "temperature": 0, "adapter": f"a{number}"}
            assert written(lm, [[5, 6]], **asked) == written(theirs, [[5, 6]], **asked)
    for name in ("a1", "a7", "a11", None):
        asked = {"max_tokens": 12, "temperature": 0, "adapter": name}
        prompts = [[5, 6, 7], [8, 9]]
        assert written(lm, prompts, **asked) == written(theirs, prompts, **asked)
