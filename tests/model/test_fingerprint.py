"""A model is known by its weights, wherever it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unspool
from helpers import tiny
from helpers.cuda_support import cuda_model
from unspool.backends.cpu.model import load_cpu
from unspool.backends.torch.backend import TorchModel
from unspool.decoding.speculative.head_drafter import shipped_head
from unspool.model.files.checkpoint import fingerprint, load_transformer, open_checkpoint

FILE = Path(__file__).parents[1] / "data" / "wikipedia-12m-qwen3.5.gguf"


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma3", "gpt2", "qwen3.5", "lfm2"])
def test_every_backend_finds_the_same(name: str, tmp_path: Path):
    tiny.save(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    result = fingerprint(checkpoint)
    assert TorchModel(load_transformer(checkpoint)).fingerprint() == result
    assert load_cpu(checkpoint, store="float32").fingerprint() == result


def test_a_packed_file_too():
    checkpoint = open_checkpoint(FILE)
    assert load_cpu(checkpoint).fingerprint() == fingerprint(checkpoint)
    assert TorchModel(load_transformer(checkpoint)).fingerprint() == fingerprint(checkpoint)


def test_what_is_rounded_on_a_gpu_is_still_the_same_model(tmp_path: Path):
    tiny.save("llama", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert cuda_model(checkpoint, dtype="bfloat16").fingerprint() == fingerprint(checkpoint)


def test_one_number_is_enough(tmp_path: Path):
    from unspool.model.files.checkpoint import save_checkpoint

    tiny.save("llama", tmp_path / "one")
    model = load_transformer(open_checkpoint(tmp_path / "one"))
    with torch.no_grad():
        model.layers[1].feed.up.weight[0, 0] += 1e-3
    save_checkpoint(model, tmp_path / "other")
    single, other = (fingerprint(open_checkpoint(tmp_path / name)) for name in ("one", "other"))
    assert single != other


def test_the_shipped_head_is_found_by_the_file_alone(default_model: Path):
    class OnAGpu:
        def fingerprint(self) -> str:
            return fingerprint(open_checkpoint(default_model))

    with unspool.load(default_model, device="cpu", progress=False) as lm:
        assert shipped_head(OnAGpu()) == shipped_head(lm.model)  # type: ignore[arg-type]
