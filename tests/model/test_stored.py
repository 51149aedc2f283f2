"""Tensors as files have them: rows can be moved packed, and come out as if they were not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import tiny
from helpers.cuda_support import cuda_model
from helpers.paged_texts import random_blocks
from unspool.backends.cpu.model import load_cpu
from unspool.backends.torch.backend import TorchModel
from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import fingerprint, load_transformer, open_checkpoint
from unspool.model.files.gguf import BLOCK_TYPES
from unspool.model.files.stored import FLOAT_TYPES, FileTensor
from unspool.model.files.tensor_mapping import read_weights
from unspool.model.weights import TensorRule, weight_shapes

ROWS, COLUMNS = 24, 512
TYPES = [kind.name for kind in BLOCK_TYPES.values()]
PACKED = [name for name in TYPES if name not in FLOAT_TYPES]


def stored(kind: str, shape: tuple[int, ...] = (ROWS, COLUMNS), seed: int = 0) -> FileTensor:
    """Random numbers of a type, all of them finite."""
    random = np.random.default_rng(seed)
    if len(shape) == 1:
        return FileTensor.from_float32(random.standard_normal(shape).astype(np.float32))
    return random_blocks(kind, *shape, random)


def test_floats_are_what_torch_makes_of_the_same_bits():
    for kind, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        single = stored(kind)
        bits = torch.from_numpy(single.data.view(np.int16).copy()).view(dtype)
        np.testing.assert_array_equal(single.float32(), bits.float().numpy())
    plain = stored("F32")
    assert plain.float32() is plain.data, "nothing is copied"


@pytest.mark.parametrize("kind", TYPES)
def test_rows_move_packed_as_they_move_unpacked(kind: str):
    single = stored(kind)
    complete = single.float32()
    part = single.rows(5, 11)
    assert part.type == kind and part.shape == (6, COLUMNS)
    np.testing.assert_array_equal(part.float32(), complete[5:11])
    order = np.random.default_rng(3).permutation(ROWS)
    moved = single.reordered(order)
    assert moved.type == kind
    np.testing.assert_array_equal(moved.float32(), complete[order])
    other = stored(kind, seed=1)
    pair = FileTensor.stacked([single, other])
    assert (pair.type, pair.shape) == (kind, (2, ROWS, COLUMNS))
    np.testing.assert_array_equal(pair.float32(), np.stack([complete, other.float32()]))


@pytest.mark.parametrize("kind", TYPES)
def test_changed_numbers(kind: str):
    single = stored(kind)
    np.testing.assert_array_equal(single.transposed().float32(), single.float32().T)
    assert single.transposed().shape == (COLUMNS, ROWS)
    assert single.transposed().type == ("F32" if kind in PACKED else kind)
    np.testing.assert_array_equal(single.minus_one().float32(), single.float32() - 1)


def test_experts_of_several_types_and_shapes():
    mixed = FileTensor.stacked([stored("Q4_1"), stored("Q8_0")])
    assert mixed.type == "F32"
    np.testing.assert_array_equal(mixed.float32()[1], stored("Q8_0").float32())
    with pytest.raises(ModelFileError, match="different shapes"):
        FileTensor.stacked([stored("F32"), stored("F32", (ROWS, 8))])


CONFIG = ModelConfig(
    family="own", vocab_size=256, width=256, layers=1, heads=4, kv_heads=4, head_width=64,
    ff_width=256, context=64, positions="sinusoidal",
)  # fmt: skip


def read(rule: TensorRule, reference: FileTensor) -> dict[str, FileTensor]:
    """Weights of which some come by this rule, and the others under our own names."""
    patterns = {name.replace("layers.0", "layers.{i}"): name for name in weight_shapes(CONFIG)}
    rules = [rule, *(TensorRule(p, (p,)) for p in patterns if p not in rule.weights)]
    files = {name: stored("F32", shape) for name, shape in weight_shapes(CONFIG).items()}
    files[rule.tensor.replace("{i}", "0")] = reference
    return dict(read_weights(CONFIG, tuple(rules), files.get))


Q, K, V = (f"layers.{{i}}.attention.{name}.weight" for name in "qkv")


@pytest.mark.parametrize("kind", TYPES)
def test_the_rows_of_a_head_are_sorted_without_unpacking(kind: str):
    complete = stored(kind, (256, 256))
    result = read(TensorRule("q.{i}", (Q,), "interleaved"), complete)["layers.0.attention.q.weight"]
    assert result.type == kind
    # Neighbours 0,1 2,3 ... of each head become its first and its second half.
    heads = complete.float32().reshape(4, 32, 2, 256)
    np.testing.assert_array_equal(
        result.float32().reshape(4, 64, 256), np.concatenate([heads[:, :, 0], heads[:, :, 1]], 1)
    )


@pytest.mark.parametrize("kind", TYPES)
def test_queries_keys_and_values_are_split_without_unpacking(kind: str):
    for layout in ("plain", "per_head"):
        packed = stored(kind, (768, 256))
        result = read(TensorRule("qkv.{i}", (Q, K, V), layout), packed)  # type: ignore[arg-type]
        complete = packed.float32()
        for number, name in enumerate("qkv"):
            piece = result[f"layers.0.attention.{name}.weight"]
            assert piece.type == kind
            expected = complete[number * 256 : (number + 1) * 256]
            if layout == "per_head":
                expected = complete.reshape(4, 3, 64, 256)[:, number].reshape(256, 256)
            np.testing.assert_array_equal(piece.float32(), expected)


@pytest.mark.parametrize("layout", ["interleaved", "per_head"])
def test_rows_that_are_no_heads_are_told(layout: str):
    with pytest.raises(ModelFileError, match=r"\(250, 256\).*need \(256, 256\)"):
        read(TensorRule("q.{i}", (Q,), layout), stored("F32", (250, 256)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_torch_gets_is_what_was_saved(dtype: torch.dtype, tmp_path: Path):
    reference = tiny.make("llama").to(dtype)
    reference.save_pretrained(tmp_path)
    kinds = {single.type for _, single in open_checkpoint(tmp_path).weights()}
    names = {torch.float16: "F16", torch.bfloat16: "BF16"}
    assert kinds == {names.get(dtype, "F32")}
    narrow = load_transformer(open_checkpoint(tmp_path), dtype="bfloat16")
    assert {weight.dtype for weight in narrow.parameters()} == {torch.bfloat16}
    loaded = load_transformer(open_checkpoint(tmp_path))
    assert loaded.embed.weight.dtype == torch.float32
    expected = reference.model.layers[2].mlp.down_proj.weight.float()
    assert torch.equal(loaded.layers[2].feed.down.weight, expected)
    loaded.layers[2].feed.down.weight.data += 1  # a copy: the file does not change
    again = load_transformer(open_checkpoint(tmp_path))
    assert torch.equal(again.layers[2].feed.down.weight, expected)


# -- A model is known by its weights, wherever it runs --------------------------------------------


FILE = Path(__file__).parents[1] / "data" / "wikipedia-12m-qwen3.5.gguf"


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt2", "qwen3.5"])
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
    model = tiny.save("llama", tmp_path / "one")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "other")
    single, other = (fingerprint(open_checkpoint(tmp_path / name)) for name in ("one", "other"))
    assert single != other
