"""A model over a GPU and the CPU, and over two processes that share a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helpers.cuda_support import family, read_by_engine, torch_model
from unspool.backends.torch.backend import TorchModel
from unspool.backends.torch.parallel.model import split_model
from unspool.backends.torch.parallel.ranks import Ranks
from unspool.model.files.checkpoint import load_transformer
from unspool.model.files.sharding import build_device_map

CLOSE = 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma4-shared", "qwen3.5"])
def test_layers_on_two_kinds_of_device(name: str, tmp_path: Path, device: str):
    checkpoint = family(name, tmp_path)
    expected = read_by_engine(torch_model(checkpoint))
    places = build_device_map(checkpoint.config, ["cpu", device])
    model = TorchModel(load_transformer(checkpoint, device=places))
    assert np.abs(read_by_engine(model) - expected).max() < CLOSE


def test_two_ranks(tmp_path: Path, device: str):
    checkpoint = family("qwen3-moe", tmp_path)
    expected = read_by_engine(torch_model(checkpoint))
    ranks = Ranks.spawn(2, [f"{device}:0", f"{device}:0"])  # "cuda" alone means one for each
    try:
        model = split_model(checkpoint, ranks, "float32")
        assert np.abs(read_by_engine(model) - expected).max() < CLOSE
    finally:
        ranks.close()
