"""Interventions on a GPU: in captured graphs and in prompts, alone and among others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.cuda_support import cuda_model, language_model, prompts, torch_model
from helpers.intervention_support import (
    STEERED_MODELS,
    check_changes_and_readings,
    native_sites,
    random_intervention,
)
from helpers.paged_texts import RandomCheckpoint, config, host
from helpers.parity import difference
from unspool.backends.interventions import Add, Intervention, Scale, resolve
from unspool.lm import LanguageModel

SHAPE = config(layers=3, context=512)


@pytest.fixture(scope="module")
def models(device: str) -> Iterator[dict[str, LanguageModel]]:
    checkpoint = RandomCheckpoint(SHAPE)
    with (
        language_model(torch_model(checkpoint)) as reference,
        language_model(cuda_model(checkpoint, device=device)) as fast,
        language_model(
            cuda_model(checkpoint, dtype="bfloat16", device=device, exact=True)
        ) as exact,
    ):
        yield {"torch": reference, "fast": fast, "exact": exact}


@pytest.mark.parametrize("name", STEERED_MODELS)
def test_changes_and_readings_are_those_of_torch(name: str, device: str):
    check_changes_and_readings(name, torch_model, partial(cuda_model, device=device))


def chosen(number: int) -> list[Intervention]:
    """What text `number` is steered with: nothing, one vector on all layers, or anything."""
    rng, sites = np.random.default_rng(number), native_sites(SHAPE)
    if number % 4 == 0:
        return []
    if number % 4 == 1:
        return [Intervention("resid_post", Add(rng.standard_normal(SHAPE.width)))]
    return [random_intervention(SHAPE, sites, rng) for _ in range(number % 3 + 1)]


def written(
    lm: LanguageModel, prompt_list: list[list[int]], numbers: list[int], **options: Any
) -> list[list[tuple[int, float]]]:
    streams = [
        lm.stream(
            prompt_list[number], seed=number, end=False, max_tokens=16,
            interventions=chosen(number), **options,
        )
        for number in numbers
    ]  # fmt: skip
    return [[(step.token, step.logprob) for step in stream] for stream in streams]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8}], ids=str)
@pytest.mark.parametrize("count", [4, 64, 256])
def test_exact_texts_are_the_same_alone_and_among_others(
    models: dict[str, LanguageModel], options: dict[str, Any], count: int
):
    """To the last bit, with any interventions of the neighbours; plain texts too."""
    prompt_list = prompts(count, SHAPE.vocab_size, longest=60)
    together = written(models["exact"], prompt_list, list(range(count)), **options)
    for number in [*range(4), *range(4, count, max(1, count // 12))]:
        alone = written(models["exact"], prompt_list, [number], **options)
        assert alone[0] == together[number], f"text {number} of {count}"


def test_texts_are_those_of_torch(models: dict[str, LanguageModel]):
    prompt_list = prompts(24, SHAPE.vocab_size, longest=40)
    texts = [
        written(models[name], prompt_list, list(range(24)), temperature=0.7)
        for name in ("torch", "fast")
    ]
    plain = [[token for token, _ in text] for text in texts[0]]
    fast = [[token for token, _ in text] for text in texts[1]]
    num_equal = sum(a == b for a, b in zip(fast, plain, strict=True))
    assert num_equal >= 22, f"{num_equal} of 24"  # a draw may fall on a border


def walk(lm: LanguageModel) -> list[Any]:
    """Logits of branches of one text whose interventions are at the same and at other sites, with
    forks and rewinds."""
    rng, logits, prompt = np.random.default_rng(5), [], list(range(20, 50))
    plain = lm.engine.open(prompt)
    logits.append(host(plain.append()))
    for turn in range(12):
        site = ("resid_post", "mlp_out", "attn_out", "resid_mid")[turn % 4]
        vectors = Add(rng.standard_normal((SHAPE.layers, SHAPE.width)))
        op = Scale(0.5) if turn % 3 == 0 else vectors
        changes = resolve([Intervention(site, op)], len(prompt))
        branch = lm.engine.open(prompt, interventions=changes)
        logits += [host(branch.append([token])) for token in (7, 8, 9)]
        other = branch.fork()
        other.rewind(31)
        logits += [host(other.append([turn, 3])), host(branch.append([1])), host(other.append([2]))]
        logits.append(host(plain.append([turn])))
        branch.release()
        other.release()
    plain.release()
    return logits


def test_branches_while_graphs_run(models: dict[str, LanguageModel]):
    streams = [
        models["fast"].stream(list(range(9)), seed=n, end=False, max_tokens=200) for n in range(8)
    ]
    actual, expected = walk(models["fast"]), walk(models["torch"])
    for stream in streams:
        stream.close()
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert difference(a, b) < 1e-3 * max(1.0, float(np.abs(b).max())), number
