"""Every family on a GPU: the numbers of the plain transformer, and the CPU's texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers import tiny
from helpers.cuda_support import (
    PAGES,
    backend,
    cuda_model,
    distance,
    family,
    language_model,
    prompts,
    read_by_engine,
    read_in_many_ways,
    torch_model,
    written,
)
from helpers.paged_texts import Library, RandomCheckpoint, config, look
from helpers.parity import ODD_SHAPES, check_seen, difference, looked_at
from unspool.backends.cuda import attention
from unspool.backends.step import Backend, LoadedModel

CLOSE = 2e-4  # of logits of size 10, in 32 bits
CLOSE_INSIDE = 6e-4  # of numbers up to 25
VOCABULARY = 259


@dataclass
class Case:
    checkpoint: Any
    torch_model: LoadedModel  # on the CPU
    cuda_model: LoadedModel  # on the GPU
    backends: tuple[Backend, Backend]


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str
) -> Case:
    checkpoint = family(request.param, tmp_path_factory.mktemp(request.param))
    expected, actual = torch_model(checkpoint), cuda_model(checkpoint, device=device)
    return Case(checkpoint, expected, actual, (backend(expected), backend(actual)))


@pytest.mark.parametrize("prompts_run", ["in graphs", "apart", "with next tokens"])
def test_however_the_tokens_arrive(case: Case, prompts_run: str, monkeypatch: pytest.MonkeyPatch):
    running: Any = case.backends[1]
    if prompts_run != "in graphs":
        monkeypatch.setattr(running, "graph_tokens", 0)
    if prompts_run == "with next tokens":
        monkeypatch.setattr(running.runner, "max_fused_rows", 1)
    expected, actual = (read_in_many_ways(model, VOCABULARY) for model in case.backends)
    assert expected.std() > 0.5, "a model that says nothing would prove nothing"
    assert difference(actual, expected) < CLOSE


def test_all_that_can_be_looked_at(case: Case):
    expected, actual = (
        looked_at(model, (70, 30, 1, 17), VOCABULARY, PAGES) for model in case.backends
    )
    sinks = case.cuda_model.config.sinks
    check_seen(actual, expected, CLOSE, CLOSE_INSIDE, sinks=sinks)


def test_greedy_texts_are_the_cpus(case: Case):
    prompt_list = prompts(5, VOCABULARY)
    with language_model(case.torch_model) as cpu, language_model(case.cuda_model) as gpu:
        options = {"temperature": 0, "max_tokens": 24}
        assert written(gpu, prompt_list, **options) == written(cpu, prompt_list, **options)


def test_in_16_bits_within_the_rounding_of_a_plain_run_in_16_bits(case: Case, device: str):
    """Both round, in another order; neither may be further from 32 bits than rounding takes it."""
    true = read_in_many_ways(case.backends[0], VOCABULARY)
    halves = [
        make(case.checkpoint, dtype="bfloat16", device=device) for make in (torch_model, cuda_model)
    ]
    expected, actual = (read_in_many_ways(backend(model), VOCABULARY) for model in halves)
    assert distance(actual, true) < 1.5 * distance(expected, true) + 1e-3


@pytest.mark.parametrize("name", tiny.TODAY)
def test_families_of_today(name: str, tmp_path: Path, device: str):
    """Also those with recurrent layers: prompts, and the texts that a CPU writes."""
    checkpoint = family(name, tmp_path)
    models = torch_model(checkpoint), cuda_model(checkpoint, device=device)
    expected, actual = (read_by_engine(model) for model in models)
    assert expected.std() > 0.2, "a model that says nothing would prove nothing"
    assert difference(actual, expected) < CLOSE
    vocabulary = models[0].config.vocab_size
    texts = []
    for model in models:
        with language_model(model) as lm:
            options = {"temperature": 0, "max_tokens": 24}
            texts.append(written(lm, prompts(5, vocabulary), **options))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", tiny.TODAY)
def test_families_of_today_in_16_bits(name: str, tmp_path: Path, device: str):
    checkpoint = family(name, tmp_path)
    true = read_by_engine(torch_model(checkpoint))
    expected, actual = (
        read_by_engine(make(checkpoint, dtype="bfloat16", device=device))
        for make in (torch_model, cuda_model)
    )
    # Of most tokens: rounding may change which expert a router chooses.
    errors = [
        np.median([distance(*rows) for rows in zip(logits, true, strict=True)])
        for logits in (actual, expected)
    ]
    assert errors[0] < 2 * errors[1] + 1e-3


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
    models = torch_model(checkpoint), cuda_model(checkpoint, device=device)
    expected, actual = (read_in_many_ways(backend(model), shape.vocab_size) for model in models)
    assert difference(actual, expected) < CLOSE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_texts(dtype: str, device: str):
    """Many pieces of attention, chunks with a long past, and the room of graphs growing."""
    shape = config(
        context=6000, width=256, heads=8, kv_heads=2, head_width=64, ff_width=512, windows=(0, 300)
    )
    checkpoint = RandomCheckpoint(shape)
    models = [make(checkpoint, dtype=dtype, device=device) for make in (torch_model, cuda_model)]
    results = []
    for model in models:
        library = Library(800, shape.vocab_size)
        running = backend(model, context=6000, pages=800)
        long, short = library.text(5200), library.text(600)
        parts = [*look(running, [(long, 3000)], None)[0]]
        parts += look(running, [(long, 1500), (short, 500)], None)[0]
        for _ in range(3):
            parts += look(running, [(long, 1), (short, 1)], None)[0]
        parts += look(running, [(short, 1)], None)[0]
        results.append(np.concatenate(parts))
    assert distance(results[1], results[0]) < (1e-4 if dtype == "float32" else 4e-2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_saved_and_loaded_with_unspool_load(name: str, tmp_path: Path, device: str):
    """What people call: the kernels are chosen by themselves."""
    import unspool

    tiny.save(name, tmp_path)
    prompt_list = prompts(3, VOCABULARY)
    options = {"temperature": 0, "max_tokens": 16}
    with (
        unspool.load(tmp_path, backend="torch", device="cpu", memory=8 << 20) as cpu,
        unspool.load(tmp_path, device=device, dtype="float32", memory=8 << 20) as gpu,
    ):
        assert type(gpu.model).__name__ == "CudaModel"
        assert written(gpu, prompt_list, **options) == written(cpu, prompt_list, **options)


@pytest.mark.parametrize("heads", [(4, 2, 64), (6, 1, 128), (3, 3, 16)], ids=str)
def test_long_chunks_by_cudnn(
    heads: tuple[int, int, int], device: str, monkeypatch: pytest.MonkeyPatch
):
    """As near to 32 bits as our own kernel, with a past and without."""
    sizes = dict(zip(("heads", "kv_heads", "head_width"), heads, strict=True))
    checkpoint = RandomCheckpoint(config(layers=2, context=512, **sizes))
    fast = cuda_model(checkpoint, dtype="bfloat16", device=device)
    monkeypatch.setattr(attention, "LONG_PRODUCTS", 0)
    monkeypatch.setattr(attention, "LONG_BLOCK", 64)
    logits = []
    for model, long_chunk in ((torch_model(checkpoint), 0), (fast, 1 << 30), (fast, 17)):
        monkeypatch.setattr(attention, "LONG_CHUNK", long_chunk)
        running = backend(model, context=512, pages=200)
        logits.append(read_in_many_ways(running, checkpoint.config.vocab_size, long=300))
    expected, by_kernel, by_library = logits
    assert not np.array_equal(by_kernel, by_library), "cuDNN did not run"
    assert distance(by_library, expected) < 1.5 * distance(by_kernel, expected) + 1e-3
