"""Quantized safetensors: each format's numbers, read from files written here as it is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import unspool
from helpers import tiny
from helpers.catalogue_shapes import SHAPES
from unspool import native
from unspool.backends.cpu.model import load_cpu
from unspool.errors import ModelFileError, UnspoolWarning
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.model.files.config_json import config_from_hf
from unspool.model.files.stored import FileTensor

transformers.logging.disable_progress_bar()

needs_native = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)
Tensors = dict[str, torch.Tensor]
# From a matrix's name and values: its tensors, and the numbers they stand for.
Write = Callable[[str, Any, np.random.Generator], tuple[Tensors, Any]]


def words(numbers: Any, bits: int) -> torch.Tensor:
    """Whole numbers along the last axis in 32-bit words, the first in the lowest bits."""
    item = 32 // bits
    apart = numbers.astype(np.uint64).reshape(*numbers.shape[:-1], -1, item)
    joined = (apart << (np.arange(item, dtype=np.uint64) * np.uint64(bits))).sum(-1)
    return torch.from_numpy(joined.astype(np.uint32).view(np.int32))


def parts(
    values: Any, rng: np.random.Generator, bits: int, group: int, half: Any = np.float16
) -> tuple[Any, Any, Any]:
    """Random integers of `bits` bits, scales and zero points for the groups of a matrix."""
    rows, columns = values.shape
    numbers = rng.integers(0, 1 << bits, values.shape)
    scales = rng.uniform(0.5, 1.5, (rows, columns // group)) / columns**0.5 / (1 << (bits - 1))
    zeros = rng.integers((1 << bits) // 4, 3 * (1 << bits) // 4, scales.shape)
    return numbers, scales.astype(half).astype(np.float32), zeros


def wide(groups: Any, columns: int) -> Any:
    return np.repeat(groups, columns // groups.shape[1], 1)


def gptq(bits: int, group: int, act_order: bool, version: int = 1) -> Write:
    def write(name: str, values: Any, rng: np.random.Generator) -> tuple[Tensors, Any]:
        columns = values.shape[1]
        numbers, scales, zeros = parts(values, rng, bits, group or columns)
        index = np.arange(columns) // (group or columns)
        index = rng.permutation(index) if act_order else index
        at = name.removesuffix("weight")
        tensors = {
            f"{at}qweight": words(numbers, bits).T,
            f"{at}qzeros": words((zeros - (version == 1)).T, bits),
            f"{at}scales": torch.from_numpy(scales.T).half(),
            f"{at}g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        return tensors, (numbers - zeros[:, index]).astype(np.float32) * scales[:, index]

    return write


def awq(name: str, values: Any, rng: np.random.Generator) -> tuple[Tensors, Any]:
    """Eight outputs in a word, every second one first."""
    numbers, scales, zeros = parts(values, rng, 4, 64)

    def outputs(matrix: Any) -> torch.Tensor:
        turned = matrix.T.reshape(matrix.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(turned.reshape(matrix.shape[1], -1), 4)

    at = name.removesuffix("weight")
    tensors = {
        f"{at}qweight": outputs(numbers),
        f"{at}qzeros": outputs(zeros),
        f"{at}scales": torch.from_numpy(scales.T).half(),
    }
    columns = values.shape[1]
    return tensors, (numbers - wide(zeros, columns)).astype(np.float32) * wide(scales, columns)


def compressed(bits: int, group: int, symmetric: bool) -> Write:
    """Written by the package that the format comes from."""

    def write(name: str, values: Any, rng: np.random.Generator) -> tuple[Tensors, Any]:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

        numbers, scales, zeros = parts(values, rng, bits, group)
        rounded = torch.from_numpy(scales).bfloat16()
        scales, middle = rounded.float().numpy(), 1 << (bits - 1)
        zeros = np.full_like(zeros, middle) if symmetric else zeros
        signed = torch.from_numpy((numbers - middle).astype(np.int8))
        tensors = {
            f"{name}_packed": pack_to_int32(signed, bits),
            f"{name}_scale": rounded,
            f"{name}_shape": torch.tensor(values.shape),
        }
        if not symmetric:
            below = torch.from_numpy((zeros - middle).astype(np.int8))
            tensors[f"{name}_zero_point"] = pack_to_int32(below, bits, packed_dim=0).contiguous()
        columns = values.shape[1]
        complete = numbers - wide(zeros, columns)
        return tensors, complete.astype(np.float32) * wide(scales, columns)

    return write


def mlx(bits: int, group: int) -> Write:
    def write(name: str, values: Any, rng: np.random.Generator) -> tuple[Tensors, Any]:
        numbers, scales, zeros = parts(values, rng, bits, group)
        minima = (-scales * zeros).astype(np.float16).astype(np.float32)
        stream = (numbers[..., None] >> np.arange(bits)) & 1
        packed = np.packbits(stream.reshape(len(numbers), -1).astype(np.uint8), -1, "little")
        at = name.removesuffix("weight")
        tensors = {
            name: torch.from_numpy(packed.view(np.uint32)),
            f"{at}scales": torch.from_numpy(scales).half(),
            f"{at}biases": torch.from_numpy(minima).half(),
        }
        columns = values.shape[1]
        return tensors, wide(scales, columns) * numbers.astype(np.float32) + wide(minima, columns)

    return write


def nvfp4(divided: bool) -> Write:
    def write(name: str, values: Any, rng: np.random.Generator) -> tuple[Tensors, Any]:
        rows, columns = values.shape
        codes = rng.integers(0, 16, values.shape)
        scales = torch.from_numpy(rng.uniform(0.001, 400, (rows, columns // 16)))
        scales = scales.to(torch.float8_e4m3fn)
        packed = torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))
        factor = torch.tensor([2000.0 if divided else 0.0005])
        fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        numbers = np.concatenate((fp4, -fp4))[codes] * np.repeat(scales.float().numpy(), 16, 1)
        if divided:
            names = {f"{name}_packed": packed, f"{name}_global_scale": factor}
        else:
            names = {name: packed, f"{name}_scale_2": factor}
        complete = numbers / factor.numpy() if divided else numbers * factor.numpy()
        return {**names, f"{name}_scale": scales}, complete

    return write


def packed_settings(bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "group_size": 32}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": groups}  # fmt: skip


_GPTQ = {"quant_method": "gptq", "bits": 4}
# Format: how it is written, what config.json says, the type it becomes, and whether all is kept.
FORMATS: dict[str, tuple[Write, dict[str, Any], str]] = {
    "gptq": (gptq(4, 64, False), _GPTQ, "ZERO4"),
    "gptq-rows": (gptq(4, 0, False), {**_GPTQ, "group_size": -1}, "ZERO4"),
    "gptq-8": (gptq(8, 32, False), {**_GPTQ, "bits": 8}, "ZERO8"),
    "gptq-v2": (gptq(4, 32, False, 2), {**_GPTQ, "checkpoint_format": "gptq_v2"}, "ZERO4"),
    "gptq-act-order": (gptq(4, 32, True), {**_GPTQ, "desc_act": True}, "F16"),
    "awq": (awq, {"quant_method": "awq", "bits": 4}, "ZERO4"),
    "compressed": (compressed(4, 64, True), packed_settings(4), "Q4_0"),
    "compressed-zeros": (compressed(4, 32, False), packed_settings(4), "ZERO4"),
    "compressed-8": (compressed(8, 32, True), packed_settings(8), "Q8_0"),
    "nvfp4": (
        nvfp4(True),
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "NVFP4",
    ),
    "nvfp4-nvidia": (nvfp4(False), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    "mlx": (mlx(4, 64), {"bits": 4, "group_size": 64}, "Q4_1"),
    "mlx-8": (mlx(8, 32), {"bits": 8, "group_size": 32}, "AFFINE8"),
    "mlx-3": (mlx(3, 32), {"bits": 3, "group_size": 32}, "Q4_1"),
    "mlx-6": (mlx(6, 64), {"bits": 6, "group_size": 64}, "AFFINE8"),
}


def checkpoints(name: str, folder: Path) -> tuple[Path, Path]:
    """A tiny Llama quantized so, and the same with its numbers worked out."""
    write, settings, _ = FORMATS[name]
    if name.startswith("compressed"):
        pytest.importorskip("compressed_tensors")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**tiny._SHAPE, **shape, "num_hidden_layers": 1})
    tiny.filled(transformers.LlamaForCausalLM(config)).save_pretrained(folder / "plain")
    rng = np.random.default_rng(0)
    plain = load_file(folder / "plain" / "model.safetensors")
    quantized: Tensors = {}
    for key, tensor in plain.items():
        if "proj" not in key:
            quantized[key] = tensor
            continue
        result, values = write(key, tensor.numpy(), rng)
        quantized.update({key: part.contiguous() for key, part in result.items()})
        plain[key] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    save_file(plain, folder / "plain" / "model.safetensors", {"format": "pt"})
    (folder / "packed").mkdir()
    save_file(quantized, folder / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "plain" / "config.json").read_text())
    key = "quantization" if name.startswith("mlx") else "quantization_config"
    (folder / "packed" / "config.json").write_text(json.dumps({**config, key: settings}))
    return folder / "packed", folder / "plain"


@pytest.fixture(scope="module", params=FORMATS)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    return (request.param, *checkpoints(request.param, tmp_path_factory.mktemp(request.param)))


def matrices(folder: Path) -> dict[str, FileTensor]:
    return {
        n: s for n, s in open_checkpoint(folder).weights() if ".attention." in n or ".feed." in n
    }


def test_every_number_is_the_one_that_was_meant_and_a_loss_is_said(pair: tuple[str, Path, Path]):
    name, packed, plain = pair
    checkpoint = open_checkpoint(packed)
    assert checkpoint.losses == ""
    list(checkpoint.weights())
    assert ("dequantized to float16" in checkpoint.losses) == (name == "gptq-act-order")
    reference, kind = matrices(plain), FORMATS[name][2]
    for weight, stored in matrices(packed).items():
        assert stored.type == kind
        expected = reference[weight].float32()
        if kind == "F16":
            expected = expected.astype(np.float16).astype(np.float32)
        # A minimum of (0 - zero) * scale, added last, may differ in the last of 24 bits.
        allowed = 2e-7 * np.abs(expected).max()
        np.testing.assert_allclose(stored.float32(), expected, rtol=0, atol=allowed)


def test_plain_torch_says_a_loss_too(tmp_path: Path):
    packed, _ = checkpoints("gptq-act-order", tmp_path)
    with pytest.warns(UnspoolWarning, match="dequantized to float16"):
        unspool.load(packed, backend="torch").close()


@needs_native
def test_the_native_layout_holds_the_same(pair: tuple[str, Path, Path]):
    name, packed, _ = pair
    model = load_cpu(open_checkpoint(packed), threads=1).wait()
    for weight, stored in matrices(packed).items():
        np.testing.assert_array_equal(model.packed[weight].float32(), stored.float32())
    loss = model.quantization_error or ""
    assert ("dequantized to float16" in loss) == (name == "gptq-act-order")


@pytest.mark.parametrize(("name", "stays_packed"), [("mlx", True), ("awq", False)])
def test_a_gpu_keeps_what_its_kernels_know_and_unpacks_the_rest(
    name: str, stays_packed: bool, tmp_path: Path
):
    pytest.importorskip("triton")
    from unspool.backends.cuda.load import load_weights
    from unspool.backends.cuda.matmul import PackedMatrix

    packed, plain = checkpoints(name, tmp_path)
    here = torch.device("cpu")
    result = load_weights(
        open_checkpoint(packed), dtype=torch.float32, device=here, keep_packed=True
    )
    feed = result.layers[0].feed
    assert feed is not None and feed.dense is not None
    matrix = feed.dense.down
    assert isinstance(matrix, PackedMatrix) == stays_packed
    if not stays_packed:
        expected = matrices(plain)["layers.0.feed.down.weight"].float32()
        np.testing.assert_allclose(matrix.weight.numpy(), expected, rtol=0, atol=1e-6)


def test_rows_move_without_being_built():
    """As they do for plain tensors: some of them, in another order, every second, one by one."""
    from unspool.model.files.quantized import ConvertedTensor, build_mxfp4

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 8, 2, 16), dtype=np.uint8)
    scales = rng.integers(100, 130, (3, 8, 2), dtype=np.uint8)
    complete = ConvertedTensor("MXFP4", (3, 8, 64), build_mxfp4, (blocks, scales))
    values = complete.float32()
    low, high = blocks & 15, blocks >> 4
    codes = np.stack((low, high), -1).reshape(3, 8, 2, 32)
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate((fp4, -fp4))
    expected = table[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    np.testing.assert_array_equal(values, expected.reshape(3, 8, 64))
    odd = complete.every_second(1)
    assert odd.shape == (3, 4, 64)
    np.testing.assert_array_equal(odd.float32(), values[:, 1::2])
    single = odd.slices()[2]
    assert single.shape == (4, 64)
    order = np.array([3, 0, 2, 1])
    np.testing.assert_array_equal(single.reordered(order).float32(), values[2, 1::2][order])
    np.testing.assert_array_equal(single.rows(1, 3).float32(), values[2, 3:7:2])
    assert complete.nbytes == complete.data.nbytes
    stacked = ConvertedTensor.stacked(complete.slices())
    assert stacked.shape == complete.shape and stacked.nbytes == complete.nbytes
    np.testing.assert_array_equal(stacked.float32(), values)
    for number, part in enumerate(stacked.slices()):
        np.testing.assert_array_equal(part.float32(), values[number])
    mixed = ConvertedTensor.stacked([complete.slices()[0], FileTensor.from_float32(values[1])])
    np.testing.assert_array_equal(mixed.float32(), values[:2])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "with 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "by gptq to 3 bits"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp8"}, "MLX's mode 'mxfp8'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24'"),
    ],
    ids=["bitsandbytes", "gptq 3", "mlx mxfp8", "marlin"],
)
def test_other_formats_are_refused_by_name(settings: dict[str, Any], words: str):
    with pytest.raises(ModelFileError, match=words):
        config_from_hf({**SHAPES["qwen3-0.6b"], "quantization_config": settings})


# -- FP8 experts stacked in one tensor, with scales per matrix ------------------------------------


BLOCK = 16
EXPERTS = "model.layers.{}.mlp.experts."


def fused(folder: Path, kind: str) -> dict[str, Any]:
    """A tiny Qwen3 with experts so written; gives the numbers that are meant."""
    reference = tiny.save("qwen3-moe", folder)
    state, expected = load_file(folder / "model.safetensors"), {}
    for layer in (0, 2, 3):
        at = EXPERTS.format(layer)
        block = reference.model.layers[layer].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            values = getattr(block, name).detach()
            scale, wide = scales(values, kind)
            numbers = (values / wide).to(torch.float8_e4m3fn)
            state[at + name] = numbers
            state[f"{at}{name}_scale{'_inv' * (kind == 'block')}"] = scale
            expected[f"{layer}.{name}"] = (numbers.float() * wide).numpy()
        for old in [key for key in state if key.startswith(at) and key.endswith(".weight")]:
            del state[old]
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    output = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": output}))
    return expected


def scales(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As a file has them, and one for each number."""
    count, rows, columns = values.shape
    sizes = torch.rand(count, -(-rows // BLOCK), -(-columns // BLOCK)) / 100 + 0.01
    if kind == "block":
        wide = sizes.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        return sizes, wide[:, :rows, :columns]
    if kind == "row":
        item = torch.rand(count, rows, 1) / 100 + 0.01
        return item, item.expand_as(values)
    single = sizes[:, 0, 0].clone() if kind == "matrix" else sizes[0, 0, 0].reshape(1)
    return single, single[:, None, None].expand_as(values)


@pytest.mark.parametrize("kind", ["block", "row", "matrix", "all"])
def test_numbers_of_fused_float8_matrices(kind: str, tmp_path: Path):
    expected = fused(tmp_path, kind)
    model = load_transformer(open_checkpoint(tmp_path))
    for layer in (0, 2, 3):
        feed = model.layers[layer].feed
        sides = torch.cat((feed.gate.weight, feed.up.weight), 1)
        for name, result in (("gate_up_proj", sides), ("down_proj", feed.down.weight)):
            numbers = result.detach().float().numpy()
            assert np.allclose(numbers, expected[f"{layer}.{name}"], rtol=5e-3)


def test_scales_of_another_number_of_experts_are_refused(tmp_path: Path):
    fused(tmp_path, "block")
    state = load_file(tmp_path / "model.safetensors")
    name = EXPERTS.format(0) + "down_proj_scale_inv"
    state[name] = state[name][:-1].contiguous()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="scales"):
        load_transformer(open_checkpoint(tmp_path))
