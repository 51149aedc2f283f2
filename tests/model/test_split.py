"""Tensor-parallel parts cover every weight, and a rank reads only its part.

No process is started here; test_tensor_parallel.py compares the computation.
"""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.catalogue_shapes import SHAPES
from unspool.backends.torch.parallel.model import load_part
from unspool.errors import SettingsError
from unspool.model.config import ModelConfig, Rotary
from unspool.model.files.checkpoint import open_checkpoint, save_checkpoint
from unspool.model.files.config_json import config_from_hf
from unspool.model.files.sharding import (
    TensorParallelRank,
    check_shardable,
    is_added_once,
    reason_not_splittable,
    shard_config,
    shard_of,
)
from unspool.model.files.stored import FileTensor
from unspool.model.weights import weight_shapes

# Together they have all that is dealt out: experts, biases, shared keys, recurrent layers, ...
NAMES = (
    "gpt2", "llama3.1-8b", "olmo2-1b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma3-1b", "gemma4-e2b",
    "gemma4-26b-a4b", "gemma4-31b", "qwen3.5-4b", "lfm2.5-1.2b",
)  # fmt: skip


def config_of(name: str, **changes: Any) -> ModelConfig:
    return config_from_hf({**SHAPES[name], **changes})


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_are_those_of_smaller_models_and_make_up_the_whole(name: str):
    config, ranks = config_of(name), 4
    assert reason_not_splittable(config, ranks) is None
    covered: dict[str, Any] = {}
    for share in TensorParallelRank(0, ranks).all_ranks:
        smaller = weight_shapes(shard_config(config, share))
        for weight, shape in weight_shapes(config).items():
            cut = shard_of(config, weight, share)
            if cut is None:
                assert smaller[weight] == shape, weight
                continue
            axis, places = cut
            part = (*shape[:axis], len(places), *shape[axis + 1 :])
            assert smaller[weight] == part, weight
            observed = covered.setdefault(weight, np.zeros(shape[axis], np.int64))
            observed[places] += 1
    for weight, observed in covered.items():
        assert observed.min() == observed.max() >= 1, (
            f"{weight}: some rows are missing, or oftener there"
        )
    split = sum(math.prod(weight_shapes(config)[weight]) for weight in covered)
    assert split > 0.8 * sum(map(math.prod, weight_shapes(config).values())), (
        "what is large is split"
    )


def test_key_heads_that_are_fewer_than_ranks_are_had_by_neighbours():
    config = config_of("llama3.1-8b")
    rows = [
        shard_of(config, "layers.3.attention.k.weight", share)
        for share in TensorParallelRank(0, 16).all_ranks
    ]
    assert [int(cut.indices[0]) // 128 for cut in rows if cut] == [n // 2 for n in range(16)]
    assert all(cut and len(cut.indices) == 128 for cut in rows)


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "words"),
    [
        ("smollm2-135m", {}, 2, "it has 9 heads; 3 would fit"),
        ("qwen2.5-0.5b", {}, 7, "2 heads of keys and values; 2 would fit"),
        ("phi4", {}, 4, "10 heads of keys"),
        ("gemma3-1b", {}, 8, "it has 4 heads"),
        ("qwen3.5-4b", {"linear_num_key_heads": 2}, 4, "recurrent .* 2 key heads; 2 would fit"),
        ("gpt-oss-20b", {"intermediate_size": 2882}, 4, "experts have an inner width of 2882"),
        ("qwen3-0.6b", {"intermediate_size": 3074}, 4, "an inner width of 3074"),
        (
            "smollm2-135m",
            {"num_attention_heads": 7, "num_key_value_heads": 7, "intermediate_size": 30},
            2,
            "it fits no number of them; put its layers onto",
        ),
    ],
)
def test_what_does_not_divide_is_refused_in_words(
    name: str, changes: dict[str, int], ranks: int, words: str
):
    with pytest.raises(SettingsError, match=f"over {ranks} processes.*{words}"):
        check_shardable(config_of(name, **changes), ranks)


def test_a_bias_behind_a_sum_is_added_once():
    bias = FileTensor.from_float32(np.ones(4, np.float32))
    config = config_of("gpt2")
    for name in ("layers.0.attention.out.bias", "layers.0.feed.down.bias"):
        assert is_added_once(name)
        parts = [
            share.local_part(config, name, bias).float32()
            for share in TensorParallelRank(0, 3).all_ranks
        ]
        assert np.array_equal(sum(parts), np.ones(4))


@pytest.mark.parametrize("axes", [2, 3])
def test_packed_numbers_are_cut_along_every_axis(axes: int):
    import gguf

    shape = (3, 8, 64)[3 - axes :]
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    packed = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
    stored = FileTensor("Q8_0", packed, shape)
    for axis in range(axes - 2, axes):
        for places in (np.arange(2, 6), np.array([0, 3, 4])):
            part = stored.part(axis, places)
            expected = np.take(stored.float32(), places, axis)
            assert part.shape == expected.shape
            assert np.array_equal(part.float32(), expected)


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path):
    """Peak memory, as counted by Python and numpy."""
    import torch

    from unspool.model.layers.transformer import Transformer

    config = ModelConfig(
        family="llama", vocab_size=512, width=128, layers=8, heads=8, kv_heads=8, head_width=16,
        ff_width=512, context=64, rotary=Rotary(width=16),
    )  # fmt: skip
    torch.manual_seed(0)
    save_checkpoint(Transformer(config), tmp_path)
    size = 4 * sum(math.prod(shape) for shape in weight_shapes(config).values())
    checkpoint = open_checkpoint(tmp_path)
    ranks: Any = SimpleNamespace(
        share=TensorParallelRank(1, 8), device="cpu", groups=SimpleNamespace(sum=None, gather=None)
    )
    load_part(checkpoint, ranks, "float32")  # imports what it needs
    tracemalloc.start()
    try:
        part = load_part(checkpoint, ranks, "float32")
        peak_bytes, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(tensor.numel() for tensor in part.parameters()) * 4 < size / 6
    assert most < size / 3, f"{most:,} of {size:,} bytes were in memory at once"
    assert peak_bytes < size / 4
