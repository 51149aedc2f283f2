"""Every family on a GPU: the numbers of the plain transformer, and the CPU's texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from cuda_support import (
    PAGES,
    backend,
    distance,
    family,
    language_model,
    ours,
    plain,
    prompts,
    read_in_many_ways,
    written,
)
from paged_texts import Library, RandomCheckpoint, config, look
from parity import ODD_SHAPES, check_seen, difference, looked_at

from unspool.backends.base import Backend, Loaded

CLOSE = 2e-4  # of logits of size 10, in 32 bits
CLOSE_INSIDE = 6e-4  # of numbers up to 25
VOCABULARY = 259


@dataclass
class Case:
    checkpoint: Any
    plain: Loaded  # on the CPU
    ours: Loaded  # on the GPU
    backends: tuple[Backend, Backend]


# The kernels know no sinks: plain torch runs what has them.
OURS = [name for name in tiny.FAMILIES if not name.startswith("gpt-oss")]


@pytest.fixture(scope="module", params=OURS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str
) -> Case:
    checkpoint = family(request.param, tmp_path_factory.mktemp(request.param))
    theirs, mine = plain(checkpoint), ours(checkpoint, device=device)
    return Case(checkpoint, theirs, mine, (backend(theirs), backend(mine)))


def test_however_the_tokens_arrive(case: Case):
    theirs, mine = (read_in_many_ways(one, VOCABULARY) for one in case.backends)
    assert theirs.std() > 0.5, "a model that says nothing would prove nothing"
    assert difference(mine, theirs) < CLOSE


def test_all_that_can_be_looked_at(case: Case):
    theirs, mine = (looked_at(one, (70, 30, 1, 17), VOCABULARY, PAGES) for one in case.backends)
    check_seen(mine, theirs, CLOSE, CLOSE_INSIDE)


def test_greedy_texts_are_the_cpus(case: Case):
    asked = prompts(5, VOCABULARY)
    with language_model(case.plain) as cpu, language_model(case.ours) as gpu:
        options = {"temperature": 0, "max_tokens": 24}
        assert written(gpu, asked, **options) == written(cpu, asked, **options)


def test_in_16_bits_within_the_rounding_of_a_plain_run_in_16_bits(case: Case, device: str):
    """Both round, in another order; neither may be further from 32 bits than rounding takes it."""
    true = read_in_many_ways(case.backends[0], VOCABULARY)
    halves = [make(case.checkpoint, dtype="bfloat16", device=device) for make in (plain, ours)]
    theirs, mine = (read_in_many_ways(backend(one), VOCABULARY) for one in halves)
    assert distance(mine, true) < 1.5 * distance(theirs, true) + 1e-3


SHAPES: dict[str, dict[str, Any]] = {
    "wide heads": {"head_width": 80, "kv_heads": 1, "ff_width": 51},
    "heads of 96": {"head_width": 96, "heads": 6, "kv_heads": 2, "width": 100},
    "heads of 256": {"head_width": 256, "heads": 2, "kv_heads": 1, "width": 64},
    "many heads on one key": {"heads": 40, "kv_heads": 1, "head_width": 16, "width": 40},
    **ODD_SHAPES,
}


@pytest.mark.parametrize("name", SHAPES)
def test_odd_shapes(name: str, device: str):
    shape = config(**{"context": 128, **SHAPES[name]})
    checkpoint = RandomCheckpoint(shape)
    models = plain(checkpoint), ours(checkpoint, device=device)
    theirs, mine = (read_in_many_ways(backend(one), shape.vocab_size) for one in models)
    assert difference(mine, theirs) < CLOSE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_texts(dtype: str, device: str):
    """Many pieces of attention, chunks with a long past, and the room of graphs growing."""
    shape = config(
        context=6000, width=256, heads=8, kv_heads=2, head_width=64, ff_width=512, windows=(0, 300)
    )
    checkpoint = RandomCheckpoint(shape)
    models = [make(checkpoint, dtype=dtype, device=device) for make in (plain, ours)]
    found = []
    for one in models:
        library = Library(800, shape.vocab_size)
        running = backend(one, context=6000, pages=800)
        long, short = library.text(5200), library.text(600)
        parts = [*look(running, [(long, 3000)], None)[0]]
        parts += look(running, [(long, 1500), (short, 500)], None)[0]
        for _ in range(3):
            parts += look(running, [(long, 1), (short, 1)], None)[0]
        parts += look(running, [(short, 1)], None)[0]
        found.append(np.concatenate(parts))
    assert distance(found[1], found[0]) < (1e-4 if dtype == "float32" else 4e-2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_saved_and_loaded_with_unspool_load(name: str, tmp_path: Path, device: str):
    """What people call: the kernels are chosen by themselves."""
    import unspool

    tiny.save(name, tmp_path)
    asked = prompts(3, VOCABULARY)
    options = {"temperature": 0, "max_tokens": 16}
    with (
        unspool.load(tmp_path, backend="torch", device="cpu", memory=8 << 20) as cpu,
        unspool.load(tmp_path, device=device, dtype="float32", memory=8 << 20) as gpu,
    ):
        assert type(gpu.model).__name__ == "CudaModel"
        assert written(gpu, asked, **options) == written(cpu, asked, **options)
