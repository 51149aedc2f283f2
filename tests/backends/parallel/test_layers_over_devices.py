"""Layers over several devices, in order. Here all of them are the CPU; tests/gpu has two kinds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_support import family, read_by_engine

import unspool
from unspool.backends.torch import paged
from unspool.backends.torch.loaded import TorchModel
from unspool.errors import SettingsError
from unspool.model.checkpoint import load_transformer
from unspool.model.config_hf import config_from_hf
from unspool.model.layer_places import Places, places_of

sys.path.insert(0, str(Path(__file__).parents[2] / "model"))
from catalogue_shapes import SHAPES


def places(name: str, count: int, **more: Any) -> Places:
    return places_of(config_from_hf(SHAPES[name]), [f"cuda:{n}" for n in range(count)], **more)


def test_layers_lie_in_order_and_each_device_has_its_share():
    found = places("llama3.3-70b", 4)
    assert list(found.layers) == sorted(found.layers) and len(found.layers) == 80
    assert all(18 <= found.layers.count(f"cuda:{n}") <= 22 for n in range(4))
    assert (found.of("embed.weight"), found.of("norm.weight")) == ("cuda:0", "cuda:3")
    assert found.of("head.weight") == "cuda:3"
    assert found.of("layers.79.feed.up.weight") == "cuda:3"


def test_a_head_that_is_the_table_of_tokens_lies_with_it():
    found = places("qwen3-4b", 2)
    assert found.of("embed.weight") == found.of("norm.weight") == "cuda:0"
    assert found.layers[-1] == "cuda:1"


def test_more_room_gets_more_layers():
    found = places("llama3.3-70b", 2, room=[3.0, 1.0])
    assert 58 <= found.layers.count("cuda:0") <= 62


def test_layers_that_read_the_keys_of_others_lie_with_them():
    found = places("gemma4-e2b", 2)
    config = config_from_hf(SHAPES["gemma4-e2b"])
    for layer in range(config.layers):
        assert found.layers[layer] == found.layers[config.kv_source(layer)]
    assert len(set(found.layers)) == 2


def test_every_device_gets_a_layer_and_too_many_are_refused():
    assert set(places("gpt2", 12).layers) == {f"cuda:{n}" for n in range(12)}
    with pytest.raises(SettingsError, match=r"13 devices are too many.*into 12"):
        places("gpt2", 13)


@pytest.mark.parametrize("name", ["gemma4-shared", "qwen3.5"])
def test_texts_are_the_same_as_on_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tokens, turns and states go along; told apart here by what the layers are said to be on."""
    checkpoint = family(name, tmp_path)
    one = TorchModel(load_transformer(checkpoint))
    wanted = read_by_engine(one)
    two = TorchModel(
        load_transformer(checkpoint, device=places_of(checkpoint.config, ["cpu", "cpu"]))
    )
    devices = [torch.device("cpu", min(n, 1)) for n in range(checkpoint.config.layers)]
    monkeypatch.setattr(paged, "layer_devices", lambda model: devices)
    made: list[torch.device] = []
    plan = paged._Plan

    def planned(batch: Any, table: Any, size: int, device: torch.device) -> Any:
        made.append(device)
        return plan(batch, table, size, device)

    monkeypatch.setattr(paged, "_Plan", planned)
    found = read_by_engine(two)
    assert set(made) == set(devices) and len(set(devices)) == 2
    assert np.array_equal(found, wanted)


def test_as_people_load_it(tmp_path: Path):
    checkpoint = family("qwen3", tmp_path)
    one, two = (
        unspool.load(checkpoint.path, memory=4 << 20, **options)
        for options in ({"backend": "torch"}, {"devices": ["cpu", "cpu"]})
    )
    texts = [lm.generate([5, 6, 7], seed=1, max_tokens=8).tokens for lm in (one, two)]
    assert texts[0] == texts[1]
    assert two.model.fingerprint() == one.model.fingerprint()
