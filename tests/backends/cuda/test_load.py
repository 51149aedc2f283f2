"""Weights from the file to the device: the same numbers as the plain transformer has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from safetensors.torch import load_file, save_file  # noqa: E402

from helpers import tiny  # noqa: E402
from helpers.cuda_support import language_model, torch_model  # noqa: E402
from helpers.packed_support import numbers, random_blocks  # noqa: E402
from unspool.backends.cuda import load as load_module  # noqa: E402
from unspool.backends.cuda.load import load_weights  # noqa: E402
from unspool.backends.cuda.matmul import PackedMatrix  # noqa: E402
from unspool.backends.cuda.model import CudaModel  # noqa: E402
from unspool.backends.cuda.weights import (  # noqa: E402
    PlainMatrix,
    StackedMatrix,
    Weights,
)
from unspool.errors import ModelFileError, UnspoolError  # noqa: E402
from unspool.model.files.checkpoint import (  # noqa: E402
    fingerprint,
    load_transformer,
    open_checkpoint,
)
from unspool.model.hub.memory import format_bytes  # noqa: E402

CPU = torch.device("cpu")


def loaded(path: Path, **options) -> Weights:
    options = {"dtype": torch.float32, "device": CPU, **options}
    return load_weights(open_checkpoint(path), **options)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_same_tensors_as_of_a_plain_transformer(family, tmp_path, monkeypatch):
    """Also those that a file stores transposed."""
    monkeypatch.setattr(load_module, "_CHUNK_BYTES", 1000)  # several pieces a matrix
    tiny.save(family, tmp_path)
    weights, model = loaded(tmp_path), load_transformer(open_checkpoint(tmp_path))
    assert torch.equal(weights.embed.weight, model.embed.weight)
    for matrix, parts in weights.parts.items():
        first = 0
        for name, rows in parts:
            expected = model.get_parameter(name).float()
            assert torch.equal(matrix.float_rows(first, first + rows), expected), name
            first += rows
        assert first == matrix.rows and matrix.weight.is_contiguous()


def test_another_type_than_the_files(tmp_path):
    tiny.save("llama", tmp_path)
    narrow, plain = loaded(tmp_path, dtype=torch.bfloat16), loaded(tmp_path)
    assert narrow.dtype == torch.bfloat16
    assert narrow.layers[0].attention_norm.gain.dtype == torch.float32
    narrow_qkv, plain_qkv = (weights.layers[1].mixer.qkv.weight for weights in (narrow, plain))
    assert torch.equal(narrow_qkv, plain_qkv.bfloat16())


def test_rounded_to_fewer_bits_while_loading(tmp_path):
    plain = write_quantized(tmp_path / "m.gguf", {}, raw=False)
    loaded_weights = loaded(tmp_path / "m.gguf", quantize_bits=4)
    assert isinstance(loaded_weights.layers[0].feed.dense.gate_up, PackedMatrix)
    expected = np.concatenate([plain["blk.0.ffn_gate"], plain["blk.0.ffn_up"]])
    rows = loaded_weights.layers[0].feed.dense.gate_up.float_rows(250, 262).numpy()
    assert np.linalg.norm(rows - expected[250:262]) < 0.12 * np.linalg.norm(expected[250:262])
    assert loaded_weights.embed.packing.bits == 8  # as the native backend does
    assert loaded_weights.precision == "4 bits"


def test_numbers_that_are_none_are_refused(tmp_path):
    model = tiny.make("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelFileError, match=r"layers\.2\.feed\.up\.weight contains NaN"):
        loaded(tmp_path)


def test_too_little_memory_is_said_in_words(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    tiny.save("llama", tmp_path)
    monkeypatch.setattr(load_module.WeightLoader, "_empty", full)
    with pytest.raises(UnspoolError, match=r"weights need .*, and cpu has .* free"):
        loaded(tmp_path)


def test_a_model_larger_than_the_memory_is_refused_with_what_fits(tmp_path, monkeypatch):
    tiny.save("llama", tmp_path)
    needed = sum(4 * math.prod(stored.shape) for _, stored in open_checkpoint(tmp_path).weights())

    def refusal(free: int, **options: Any) -> str:
        monkeypatch.setattr(load_module, "_free_bytes", lambda device: free)
        with pytest.raises(UnspoolError) as caught:
            loaded(tmp_path, **options)
        return str(caught.value)

    monkeypatch.setattr(load_module, "PLANNED_CONTEXT", 1)
    monkeypatch.setattr(load_module.WeightLoader, "weights", None)  # nothing is loaded
    message = refusal(needed - 1)
    assert f"the weights need {format_bytes(needed)}" in message
    assert "cpu has" in message and "KV cache of" in message
    assert "quantize=8" in message and "quantize=4" in message
    message = refusal(needed // 4)
    assert "quantize=8" not in message and "quantize=4" in message
    message = refusal(needed // 8, quantize_bits=4)
    assert "quantize=" not in message and "unspool models plan" in message


# -- quantized files ----------------------------------------------------------------------------


def write_quantized(
    path: Path, types: dict[str, str], width: int = 256, raw: bool = True, usual: str = "Q4_K"
) -> dict[str, np.ndarray]:
    """A Llama of one layer in a GGUF file, its matrices of some types; gives their numbers."""
    inner, half = width, width // 2
    shapes = {
        "token_embd": (40, width), "output": (40, width), "blk.0.attn_q": (width, width),
        "blk.0.attn_k": (half, width), "blk.0.attn_v": (half, width),
        "blk.0.attn_output": (width, width), "blk.0.ffn_gate": (inner, width),
        "blk.0.ffn_up": (inner, width), "blk.0.ffn_down": (width, inner),
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "qwen2")
    sizes = {
        "context_length": 64, "embedding_length": width, "block_count": 1,
        "feed_forward_length": inner, "attention.head_count": 4, "attention.head_count_kv": 2,
    }  # fmt: skip
    for name, value in sizes.items():
        writer.add_uint32(f"qwen2.{name}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-5)
    loaded_weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        kind = types.get(name, usual)
        blocks = random_blocks(kind, *shape, seed=number)
        loaded_weights[name] = numbers(kind, blocks)
        data = blocks if raw else loaded_weights[name]
        dtype = gguf.GGMLQuantizationType[kind] if raw else None
        writer.add_tensor(f"{name}.weight", data, raw_dtype=dtype)
    for name, size in (("q", width), ("k", half), ("v", half)):
        writer.add_tensor(f"blk.0.attn_{name}.bias", np.zeros(size, np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return loaded_weights


def test_a_quantized_file_stays_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(load_module, "_CHUNK_BYTES", 3000)
    path = tmp_path / "m.gguf"
    plain = write_quantized(path, {"output": "Q6_K", "token_embd": "Q8_0"})
    loaded_weights = loaded(path)
    layer = loaded_weights.layers[0]
    for matrix, names in (
        (loaded_weights.embed, ["token_embd"]),
        (loaded_weights.head, ["output"]),
        (layer.mixer.qkv, ["blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v"]),
        (layer.feed.dense.gate_up, ["blk.0.ffn_gate", "blk.0.ffn_up"]),
        (layer.feed.dense.down, ["blk.0.ffn_down"]),
    ):
        expected = np.concatenate([plain[name] for name in names])
        assert isinstance(matrix, PackedMatrix)
        for first in range(0, matrix.rows, 100):  # of every part that was read, some
            some = matrix.float_rows(first, min(first + 3, matrix.rows)).numpy()
            assert np.array_equal(some, expected[first : first + 3])
    assert loaded_weights.precision == "Q4_K"
    num_bytes = sum(matrix.nbytes for matrix in loaded_weights.matrices())
    assert num_bytes < 0.7 * sum(numbers.size for numbers in plain.values())


def test_a_quantized_file_is_unpacked(tmp_path):
    plain = write_quantized(tmp_path / "m.gguf", {}, width=32, usual="Q8_0")
    unpacked = loaded(tmp_path / "m.gguf", keep_packed=False)
    down = unpacked.layers[0].feed.dense.down
    assert isinstance(down, PlainMatrix) and unpacked.precision == "float32"
    assert np.array_equal(down.weight.numpy(), plain["blk.0.ffn_down"])


@pytest.mark.slow
def test_matrices_of_different_types_are_kept_side_by_side(tmp_path):
    path = tmp_path / "m.gguf"
    plain = write_quantized(path, {"blk.0.ffn_up": "Q6_K", "blk.0.ffn_down": "Q6_K"})
    layer = loaded(path).layers[0]
    # What is gated is one launch, which knows one type: here the numbers are unpacked.
    assert isinstance(layer.gate_up, PlainMatrix) and isinstance(layer.down, PackedMatrix)
    expected = np.concatenate([plain["blk.0.ffn_gate"], plain["blk.0.ffn_up"]])
    assert np.array_equal(layer.gate_up.weight.numpy(), expected)


def float8_checkpoint(folder: Path, kind: str) -> dict[str, np.ndarray]:
    """A tiny Llama whose layers are FP8, as published checkpoints have them; gives its numbers."""
    model = tiny.make("llama")
    model.save_pretrained(folder)
    state, plain = load_file(folder / "model.safetensors"), {}
    block = (16, 16)
    for name in [n for n in state if n.endswith("_proj.weight")]:
        weight = state[name]
        rows, columns = weight.shape
        if kind == "tensor":
            scale = wide = weight.abs().max() / 448
        elif kind == "row":
            scale = wide = weight.abs().amax(1, keepdim=True) / 448
        else:
            shape = (-(-rows // block[0]), -(-columns // block[1]))
            scale = torch.rand(shape) * 0.01 + 0.01
            wide = scale.repeat_interleave(block[0], 0)[:rows]
            wide = wide.repeat_interleave(block[1], 1)[:, :columns]
        state[name] = (weight / wide).to(torch.float8_e4m3fn)
        state[name + ("_scale_inv" if kind == "block" else "_scale")] = scale
        plain[name] = (state[name].float() * wide).numpy()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3"}
    if kind == "block":
        config["quantization_config"]["weight_block_size"] = list(block)
    (folder / "config.json").write_text(json.dumps(config))
    return plain


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_float8_checkpoints(kind, tmp_path):
    plain = float8_checkpoint(tmp_path, kind)
    loaded_weights = loaded(tmp_path)
    layer = loaded_weights.layers[2]
    at = "model.layers.2"
    for matrix, names in (
        (layer.mixer.qkv, [f"{at}.self_attn.{n}_proj.weight" for n in "qkv"]),
        (layer.feed.dense.gate_up, [f"{at}.mlp.{n}_proj.weight" for n in ("gate", "up")]),
        (layer.feed.dense.down, [f"{at}.mlp.down_proj.weight"]),
    ):
        assert isinstance(matrix, PackedMatrix) and not isinstance(matrix, StackedMatrix)
        expected = np.concatenate([plain[name] for name in names])
        for first in (0, 14, matrix.rows // 2 - 2, matrix.rows - 4):
            rows = matrix.float_rows(first, first + 4).numpy()
            assert np.allclose(rows, expected[first : first + 4], rtol=1e-6)
    assert loaded_weights.precision == "FP8"
    reference = load_transformer(open_checkpoint(tmp_path))
    assert np.allclose(
        reference.layers[2].feed.down.weight.numpy(), plain[f"{at}.mlp.down_proj.weight"], rtol=1e-6
    )


def test_float8_without_scales_is_refused(tmp_path):
    float8_checkpoint(tmp_path, "row")
    state = load_file(tmp_path / "model.safetensors")
    without_scales = {name: tensor for name, tensor in state.items() if not name.endswith("_scale")}
    save_file(without_scales, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"no .*_scale or .*_scale_inv for them"):
        loaded(tmp_path)


def test_float8_on_the_cpu(tmp_path):
    """The native backend reads the same checkpoint, in 16 bits."""
    from unspool.backends.cpu.model import load_cpu
    from unspool.native import missing_reason

    if missing_reason():
        pytest.skip("no native library")
    plain = float8_checkpoint(tmp_path, "block")
    model = load_cpu(open_checkpoint(tmp_path))
    loaded_weights = model.wait().packed["layers.1.feed.up.weight"].float32()
    expected = plain["model.layers.1.mlp.up_proj.weight"]
    assert np.allclose(loaded_weights, expected, rtol=0.01) and model.precision == "bfloat16"
    assert "FP8 weights were rounded to bfloat16" in str(model.quantization_error)
    assert load_cpu(open_checkpoint(tmp_path), store="8").precision == "8 bits"


@pytest.mark.parametrize("kind", ["gguf", pytest.param("fp8", marks=pytest.mark.slow)])
def test_the_same_texts_as_the_plain_transformer(kind, tmp_path):
    path = tmp_path
    if kind == "fp8":
        float8_checkpoint(path, "block")
    else:
        path /= "m.gguf"
        types = {"token_embd": "Q8_0", "blk.0.ffn_down": "Q5_0", "output": "Q4_0"}
        write_quantized(path, types, width=64, usual="Q4_1")
    checkpoint, weights = open_checkpoint(path), loaded(path)
    packed = language_model(CudaModel(weights, lambda: fingerprint(checkpoint)), memory=1 << 22)
    plain = language_model(torch_model(checkpoint), memory=1 << 22)
    prompts, options = [[3, 1, 4, 1, 5], [5, 3]], {"max_tokens": 2, "temperature": 0}
    expected = [result.tokens for result in plain.generate(prompts, **options)]
    assert [result.tokens for result in packed.generate(prompts, **options)] == expected
    assert packed.model.rows("embed.weight", 3, 5).shape == (2, weights.config.width)
    assert packed.model.fingerprint() == plain.model.fingerprint()
