"""A model over two ranks computes what one process computes, within rounding: every family.

Rank 1 is a thread here; test_ranks.py starts processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers.adapter_support import all_logits, with_adapters
from helpers.catalogue_shapes import SHAPES
from helpers.cuda_support import (
    backend,
    family,
    language_model,
    read_by_engine,
    read_in_many_ways,
    torch_model,
)
from unspool.backends.torch import backend as torch_backend
from unspool.backends.torch.backend import TorchModel
from unspool.backends.torch.parallel import worker
from unspool.backends.torch.parallel.model import split_model
from unspool.backends.torch.parallel.ranks import Ranks
from unspool.errors import SettingsError, UnspoolError
from unspool.model.files.checkpoint import load_transformer
from unspool.model.files.config_json import config_from_hf
from unspool.model.files.sharding import DeviceMap, TensorParallelRank, build_device_map

CLOSE = 1e-4
FAR = 1e-3  # recurrent layers accumulate rounding errors over tokens
FAMILIES = {
    "gpt2": CLOSE,  # biases, no RoPE
    "llama-tied-bias": CLOSE,
    "qwen3": CLOSE,  # norm per head
    "olmo2": CLOSE,  # norm over all heads
    "gemma3": CLOSE,
    "gemma4-shared": CLOSE,  # shared KV cache, per-layer embeddings
    "gemma4-experts": CLOSE,  # experts and a dense feed-forward, fewer key heads than ranks
    "qwen3-moe": CLOSE,
    "gpt-oss": CLOSE,  # sinks, experts with biases
    "qwen3.5-moe": FAR,  # gated DeltaNet, a shared expert
    "lfm2": FAR,  # short convolutions, which every rank has
}
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 258, 30)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("begin", '{"device": "cpu"}')
    with pytest.MonkeyPatch.context() as patch:
        stay = SimpleNamespace(environ=os.environ, _exit=lambda code: None)
        patch.setattr(worker, "os", stay)  # a worker that fails would end its process
        other = threading.Thread(
            target=lambda: worker.work(Ranks.join(store.port, TensorParallelRank(1, 2)))
        )
        other.start()
        result = Ranks(store, TensorParallelRank(0, 2), "cpu", address="127.0.0.1")
        yield result
        assert not result.failure
        result.close()
        other.join(60)
        assert not other.is_alive(), "closing stops it"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return family("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str, ranks: Ranks, tmp_path: Path):
    checkpoint = family(name, tmp_path)
    single, split = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    assert split.config == single.config
    assert split.fingerprint() == single.fingerprint(), "independent of the number of ranks"
    alone, together = language_model(single, memory=4 << 20), language_model(split, memory=4 << 20)
    with alone.open_branch(PROMPT) as a, together.open_branch(PROMPT) as b:
        expected = alone.engine.extend(a, num_logits=len(PROMPT))
        result = together.engine.extend(b, num_logits=len(PROMPT))
    assert np.abs(expected).max() > 1, "the logits must not be trivial"
    assert np.abs(result - expected).max() < FAMILIES[name]
    texts = [lm.generate(PROMPT, temperature=0, max_tokens=12).tokens for lm in (alone, together)]
    assert texts[0] == texts[1]
    for lm in (alone, together):
        lm.close()


def test_steps_of_all_kinds(checkpoint: Any, ranks: Ranks):
    """Prompts, chunks, drafts and single tokens in one batch, rewound and recomputed."""
    models = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    single, split = (read_in_many_ways(backend(model), 259) for model in models)
    assert np.abs(single - split).max() < CLOSE


def test_the_same_seeds_give_the_same_texts(checkpoint: Any, ranks: Ranks):
    models = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    options: dict[str, Any] = {"seed": 7, "temperature": 0.8, "repetition_penalty": 1.2}
    single, split = (
        [
            sample.tokens
            for sample in language_model(model).samples(PROMPT, 3, max_tokens=10, **options)
        ]
        for model in models
    )
    assert len({tuple(tokens) for tokens in single}) > 1
    assert single == split


def test_adapters(checkpoint: Any, ranks: Ranks):
    models = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    single, split = (all_logits(with_adapters(model)) for model in models)
    for expected, result in zip(single, split, strict=True):
        assert np.abs(np.asarray(expected) - np.asarray(result)).max() < 5 * CLOSE


@pytest.mark.parametrize("name", ["gemma4-dense", "qwen3.5"])
def test_observations_include_the_heads_of_all_ranks(name: str, ranks: Ranks, tmp_path: Path):
    """In layers with different numbers of heads, and in recurrent layers."""
    checkpoint = family(name, tmp_path)
    observed = []
    for model in (torch_model(checkpoint), split_model(checkpoint, ranks, "float32")):
        lm = language_model(model, memory=4 << 20)
        branch = lm.engine.open(PROMPT)
        observed.append(lm.engine.look(branch, at=frozenset({3, 17})).inside)
        lm.close()
    (single,), (split,) = observed
    assert np.abs(single.residuals - split.residuals).max() < FAR
    assert np.abs(single.parts - split.parts).max() < FAR
    for name in ("attention", "recurrent"):
        for expected, result in zip(getattr(single, name), getattr(split, name), strict=True):
            assert np.array_equal(np.isnan(expected), np.isnan(result))
            assert np.nanmax(np.abs(expected - result)) < FAR
    assert len(single.attention) == 2


def test_weights_for_the_lenses(ranks: Ranks, tmp_path: Path):
    checkpoint = family("gpt2", tmp_path)
    single, split = torch_model(checkpoint), split_model(checkpoint, ranks, "float32")
    vectors = np.random.default_rng(1).standard_normal((3, 48)).astype(np.float32)
    assert np.abs(single.logits(vectors) - split.logits(vectors)).max() < CLOSE
    assert np.array_equal(single.normed(vectors), split.normed(vectors))
    for name in ("embed.weight", "head.weight"):
        assert np.array_equal(single.rows(name, 100, 200), split.rows(name, 100, 200))
    for name in ("norm.weight", "norm.bias", "head.bias"):
        expected, result = single.vector(name), split.vector(name)
        assert (expected is None and result is None) or np.array_equal(expected, result)


def test_closing_one_model_keeps_the_others(checkpoint: Any, ranks: Ranks):
    first, second = (split_model(checkpoint, ranks, "float32") for _ in range(2))
    first.close()
    first.close()
    assert second.fingerprint() == torch_model(checkpoint).fingerprint()
    assert not ranks.failure


def test_it_has_no_single_transformer(checkpoint: Any, ranks: Ranks):
    lm = language_model(split_model(checkpoint, ranks, "float32"))
    with pytest.raises(UnspoolError, match="in one process"):
        _ = lm.transformer


# -- Layers over several devices ------------------------------------------------------------------


def places(name: str, count: int, **options: Any) -> DeviceMap:
    return build_device_map(
        config_from_hf(SHAPES[name]), [f"cuda:{n}" for n in range(count)], **options
    )


def test_layers_are_in_order_and_divided_evenly():
    result = places("llama3.3-70b", 4)
    assert list(result.layers) == sorted(result.layers) and len(result.layers) == 80
    assert all(18 <= result.layers.count(f"cuda:{n}") <= 22 for n in range(4))
    names = ("embed.weight", "norm.weight", "head.weight", "layers.79.feed.up.weight")
    assert [result.device_of(name) for name in names] == ["cuda:0", *["cuda:3"] * 3]
    more_memory = places("llama3.3-70b", 2, room=[3.0, 1.0])
    assert 58 <= more_memory.layers.count("cuda:0") <= 62
    tied = places("qwen3-4b", 2)
    assert tied.device_of("embed.weight") == tied.device_of("norm.weight") == "cuda:0"
    assert tied.layers[-1] == "cuda:1"


def test_layers_that_share_a_kv_cache_are_on_one_device():
    result = places("gemma4-e2b", 2)
    config = config_from_hf(SHAPES["gemma4-e2b"])
    for layer in range(config.layers):
        assert result.layers[layer] == result.layers[config.kv_source(layer)]
    assert len(set(result.layers)) == 2


def test_every_device_gets_a_layer_and_too_many_are_rejected():
    assert set(places("gpt2", 12).layers) == {f"cuda:{n}" for n in range(12)}
    with pytest.raises(SettingsError, match=r"13 devices are too many.*at most 12"):
        places("gpt2", 13)


@pytest.mark.parametrize("name", ["gemma4-shared", "qwen3.5"])
def test_texts_are_the_same_as_on_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tokens, RoPE angles and states move along; the devices are faked: all are the CPU."""
    checkpoint = family(name, tmp_path)
    single = TorchModel(load_transformer(checkpoint))
    expected = read_by_engine(single)
    two = TorchModel(
        load_transformer(checkpoint, device=build_device_map(checkpoint.config, ["cpu", "cpu"]))
    )
    devices = [torch.device("cpu", min(n, 1)) for n in range(checkpoint.config.layers)]
    monkeypatch.setattr(torch_backend, "layer_devices", lambda model: devices)
    created: list[torch.device] = []
    original = torch_backend._BatchIndices

    def create(batch: Any, table: Any, size: int, device: torch.device) -> Any:
        created.append(device)
        return original(batch, table, size, device)

    monkeypatch.setattr(torch_backend, "_BatchIndices", create)
    result = read_by_engine(two)
    assert set(created) == set(devices) and len(set(devices)) == 2
    assert np.array_equal(result, expected)


def test_load_with_devices(tmp_path: Path):
    checkpoint = family("qwen3", tmp_path)
    single, two = (
        unspool.load(checkpoint.path, memory=4 << 20, **options)
        for options in ({"backend": "torch"}, {"devices": ["cpu", "cpu"]})
    )
    texts = [lm.generate([5, 6, 7], seed=1, max_tokens=8).tokens for lm in (single, two)]
    assert texts[0] == texts[1]
    assert two.model.fingerprint() == single.model.fingerprint()
