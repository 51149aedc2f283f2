"""Layers over several devices, in order. Here all devices are the CPU; tests/gpu uses real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unspool
from helpers.catalogue_shapes import SHAPES
from helpers.cuda_support import family, read_by_engine
from unspool.backends.torch import backend
from unspool.backends.torch.backend import TorchModel
from unspool.errors import SettingsError
from unspool.model.files.checkpoint import load_transformer
from unspool.model.files.config_json import config_from_hf
from unspool.model.files.sharding import DeviceMap, build_device_map


def places(name: str, count: int, **options: Any) -> DeviceMap:
    return build_device_map(
        config_from_hf(SHAPES[name]), [f"cuda:{n}" for n in range(count)], **options
    )


def test_layers_are_in_order_and_divided_evenly():
    result = places("llama3.3-70b", 4)
    assert list(result.layers) == sorted(result.layers) and len(result.layers) == 80
    assert all(18 <= result.layers.count(f"cuda:{n}") <= 22 for n in range(4))
    assert (result.device_of("embed.weight"), result.device_of("norm.weight")) == (
        "cuda:0",
        "cuda:3",
    )
    assert result.device_of("head.weight") == "cuda:3"
    assert result.device_of("layers.79.feed.up.weight") == "cuda:3"


def test_a_tied_head_is_on_the_device_of_the_embedding():
    result = places("qwen3-4b", 2)
    assert result.device_of("embed.weight") == result.device_of("norm.weight") == "cuda:0"
    assert result.layers[-1] == "cuda:1"


def test_more_memory_gets_more_layers():
    result = places("llama3.3-70b", 2, room=[3.0, 1.0])
    assert 58 <= result.layers.count("cuda:0") <= 62


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
    monkeypatch.setattr(backend, "layer_devices", lambda model: devices)
    created: list[torch.device] = []
    original = backend._BatchIndices

    def create(batch: Any, table: Any, size: int, device: torch.device) -> Any:
        created.append(device)
        return original(batch, table, size, device)

    monkeypatch.setattr(backend, "_BatchIndices", create)
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
