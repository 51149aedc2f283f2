"""Routed feed-forwards against the plain transformer's, run by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.packed_support import numbers, random_blocks
from unspool.backends.cuda import experts as module
from unspool.backends.cuda import load as load_module
from unspool.backends.cuda.experts import ExpertScratch, run_experts, split_units
from unspool.backends.cuda.load import load_weights
from unspool.backends.cuda.matmul import (
    PACKINGS,
    PackedMatrix,
    float8_packing,
    pack_float8,
    quantize,
    repack,
)
from unspool.backends.cuda.weights import (
    ExpertWeights,
    PlainMatrix,
    Weights,
)
from unspool.model.config import ModelConfig
from unspool.model.files.quantized import ConvertedTensor, build_mxfp4
from unspool.model.files.stored import FLOAT8, FileTensor, float8_to_float32
from unspool.model.layers.parts import Experts
from unspool.model.layers.transformer import Transformer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_experts(
    count: int = 6, top_k: int = 2, width: int = 48, inner: int = 40, normalize: bool = True,
    activation: str = "silu", dtype: torch.dtype = torch.float32, **settings: Any,
) -> tuple[Experts, ExpertWeights, Weights]:  # fmt: skip
    config = ModelConfig(
        family="test", vocab_size=8, width=width, layers=1, heads=1, kv_heads=1, head_width=8,
        ff_width=8, context=8, positions="none", experts=count, experts_per_token=top_k,
        expert_width=inner, normalize_experts=normalize, activation=activation, **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    torch.manual_seed(count)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model = model.to(DEVICE, dtype).requires_grad_(False)
    stored = {name: FileTensor.from_float32(t.float().cpu().numpy()) for name, t in
              model.state_dict().items()}  # fmt: skip
    checkpoint: Any = SimpleNamespace(path=Path("m"), config=config, weights=stored.items)
    weights = load_weights(checkpoint, dtype=dtype, device=torch.device(DEVICE))
    feed, layer_feed = model.layers[0].feed, weights.layers[0].feed
    assert layer_feed is not None
    expert_weights = layer_feed.experts
    assert expert_weights is not None and isinstance(feed, Experts)
    return feed, expert_weights, weights


def inputs(tokens: int, width: int = 48) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens)).to(DEVICE)


def run(
    x: torch.Tensor, expert_weights: ExpertWeights, weights: Weights, exact: bool = False,
    router_input: torch.Tensor | None = None, times: int = 2,
) -> torch.Tensor:  # fmt: skip
    scratch = ExpertScratch.for_tokens(len(x) + 3, weights.config, weights)
    out = torch.full_like(x, torch.nan)
    for _ in range(times):  # it leaves its scratch as it found it
        run_experts(
            x, expert_weights, weights.config, out, scratch, pdl=False, exact=exact,
            router_input=router_input,
        )  # fmt: skip
    assert not scratch.counts.any() and not scratch.arrived.any()
    return out


@given(
    tokens=st.integers(1, 11),
    count=st.integers(1, 9),
    top_k=st.integers(1, 3),
    width=st.sampled_from((16, 40, 48)),
    inner=st.sampled_from((8, 33, 64)),
    normalize=st.booleans(),
    activation=st.sampled_from(("silu", "gelu", "relu")),
)
@settings(max_examples=2, deadline=None)
def test_as_the_plain_transformer(
    tokens: int, count: int, top_k: int, width: int, inner: int, normalize: bool, activation: str
):
    feed, expert_weights, weights = make_experts(
        count, min(top_k, count), width, inner, normalize, activation
    )
    x = inputs(tokens, width)
    torch.testing.assert_close(
        run(x, expert_weights, weights), feed(x[None])[0], rtol=1e-5, atol=1e-5
    )


KINDS_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "sigmoid": {"router": "sigmoid", "experts_scale": 2.5, "selection_bias": True},
    "sigmoid, weights of any sum": {"router": "sigmoid", "normalize": False},
    "softmax with a selection bias": {"selection_bias": True, "experts_scale": 0.5},
    "as gpt-oss": {
        "router_bias": True, "expert_bias": True, "activation": "swiglu_clamped",
        "activation_limit": 0.7,
    },
    "no gate": {"gated": False, "activation": "relu2", "expert_bias": True},
}  # fmt: skip


@pytest.mark.parametrize("tokens", [3, 10])
@pytest.mark.parametrize("kind", KINDS_OF_EXPERTS)
def test_every_kind_of_router_and_expert(kind: str, tokens: int):
    feed, expert_weights, weights = make_experts(4, 3, inner=37, **KINDS_OF_EXPERTS[kind])
    x = inputs(tokens)
    torch.testing.assert_close(
        run(x, expert_weights, weights, times=1), feed(x[None])[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("tokens", [2, 9])
def test_a_factor_per_expert_and_another_input_of_the_router(tokens: int):
    feed, expert_weights, weights = make_experts(4)
    scale = torch.rand(4, device=DEVICE) + 0.5
    x, router_input = inputs(tokens), inputs(tokens + 20)[:tokens]
    gates, expert_ids = feed.route(router_input)
    expected = feed.run_experts(x, gates * scale[expert_ids], expert_ids)
    actual = run(
        x, replace(expert_weights, scale=scale), weights, router_input=router_input, times=1
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", (3, 12, pytest.param(150, marks=pytest.mark.slow)))
def test_narrow_numbers_few_and_many(tokens: int):
    """In 16 bits, where blocks grow with the number of tokens."""
    feed, expert_weights, weights = make_experts(dtype=torch.float16)
    x = inputs(tokens).half()
    torch.testing.assert_close(
        run(x, expert_weights, weights), feed(x[None])[0], rtol=0.02, atol=0.02
    )


@pytest.mark.slow
def test_the_same_bits_for_any_number_of_tokens():
    _, expert_weights, weights = make_experts(4, 2)
    x = inputs(150)
    together = run(x, expert_weights, weights, exact=True)
    for n in (0, 70, 149):
        assert torch.equal(run(x[n : n + 1], expert_weights, weights, exact=True)[0], together[n])


@pytest.mark.parametrize("tokens", [2, 20])
def test_all_tokens_may_choose_the_same_experts(tokens: int):
    _, expert_weights, weights = make_experts(5, 2)
    expert_weights.router.zero_()  # of equals the first
    scratch, x = ExpertScratch.for_tokens(20, weights.config, weights), inputs(tokens)
    run_experts(x, expert_weights, weights.config, torch.empty_like(x), scratch, pdl=False)
    assert scratch.expert_ids[:tokens].tolist() == [[0, 1]] * tokens
    if tokens * 2 > 5 * module.MAX_GATHERED_PAIRS and tokens > 1:
        assert int(scratch.total) == 2 * -(-tokens // module.SMALL_BLOCK)


@pytest.mark.parametrize("units", [1, 2, 3, 12, 90, 96, 97, 360, 448])
def test_tiles_of_a_row(units: int):
    first, second = split_units(units)
    assert units <= first + second <= max(1, 2 * units - 1)
    assert all(size & (size - 1) == 0 for size in (first, second))


# -- packed experts --------------------------------------------------------------------------------

KINDS = [*PACKINGS, "FP8 rows", "FP8 blocks", "4 bits", "8 bits"]


def packed_stack(
    kind: str, experts: int, rows: int, columns: int, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[PackedMatrix, torch.Tensor]:
    """Matrices of experts, stacked by rows, and their numbers [experts, rows, columns]."""
    rng, height = np.random.default_rng(rows), experts * rows
    if kind.startswith("FP8"):
        raw = rng.integers(0, 256, (height, columns), dtype=np.uint8)
        raw[(raw & 127) == 127] = 0
        scales = rng.uniform(1e-4, 2e-4, (height, -(-columns // 128) if "block" in kind else 1))
        scales = scales.astype(np.float32)
        parts = pack_float8(torch.from_numpy(raw), torch.from_numpy(scales))
        packing, plain = float8_packing(columns, scales.shape[1]), float8_to_float32(raw, scales)
    elif kind.endswith("bits"):
        packing, parts = quantize(torch.randn(height, columns) * 0.1, int(kind[0]))
        matrix = PackedMatrix(packing, parts, height, columns, torch.float32)
        plain = matrix.float_rows(0, height).numpy()
    else:
        raw = random_blocks(kind, height, columns)
        packing, plain, factors = PACKINGS[kind], numbers(kind, raw), None
        if kind == "NVFP4":
            factors = torch.rand(height) * 1e-3
            plain = plain * factors.numpy()[:, None]
        parts = repack(kind, torch.from_numpy(raw), factors)
    matrix = PackedMatrix(packing, parts, height, columns, dtype, bias)
    return matrix, torch.from_numpy(plain).view(experts, rows, columns)


def packed_experts(
    kind: str, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Experts, ExpertWeights, Weights]:
    width = inner = 256 if kind.endswith("_K") else 64
    if not kind.endswith(("_K", "NVFP4")):
        inner = 96  # 3 units of a row
    feed, plain, weights = make_experts(3, 2, width, inner, dtype=dtype, **settings)
    matrices = []
    for matrix, rows, columns in ((plain.gate_up, plain.gate_up.rows // 3, width),
                                  (plain.down, width, inner)):  # fmt: skip
        packed, values = packed_stack(kind, 3, rows, columns, matrix.bias, dtype)
        matrices.append((packed, values.to(DEVICE, dtype)))
    (gate_up, inner_values), (down, down_values) = matrices
    if feed.gate is not None:
        feed.gate.weight.copy_(inner_values[:, :inner])
    feed.up.weight.copy_(inner_values[:, -inner:])
    feed.down.weight.copy_(down_values)
    return feed, replace(plain, gate_up=gate_up, down=down), weights


_USUAL = ("Q4_0", "Q4_K", "Q6_K", "MXFP4")  # others are slow, in the interpreter


def near(result: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return float((result - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in _USUAL)) for kind in KINDS],
)
def test_few_tokens_of_packed_experts(kind: str):
    feed, expert_weights, weights = packed_experts(kind)
    x = inputs(1, weights.config.width) * 0.1
    assert near(run(x, expert_weights, weights, times=1), feed(x[None])[0], 1e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "FP8 rows", "MXFP4", "NVFP4", "8 bits"])
def test_few_tokens_of_packed_experts_in_16_bits(kind: str):
    """Products of integers, except for FP8."""
    feed, expert_weights, weights = packed_experts(kind, torch.bfloat16)
    x = (inputs(1, weights.config.width) * 0.1).bfloat16()
    actual = run(x, expert_weights, weights, times=1)
    assert near(actual.float(), feed.float()(x.float()[None])[0], 0.02)


@pytest.mark.parametrize(
    "kind",
    ["FP8 blocks", "MXFP4", *(pytest.param(k, marks=pytest.mark.slow) for k in ("Q4_1", "NVFP4"))],
)
def test_many_tokens_of_packed_experts(kind: str):
    """With the same bits for any number of tokens."""
    feed, expert_weights, weights = packed_experts(kind)
    x = inputs(18, weights.config.width) * 0.1
    together = run(x, expert_weights, weights, exact=True, times=1)
    assert near(together, feed(x[None])[0], 1e-4)
    alone = run(x[17:], expert_weights, weights, exact=True, times=1)
    assert torch.equal(alone[0], together[17])


@pytest.mark.parametrize("tokens", [1, 9])
def test_packed_experts_without_a_gate(tokens: int):
    feed, expert_weights, weights = packed_experts(
        "MXFP4", gated=False, activation="relu2", expert_bias=True
    )
    x = inputs(tokens, weights.config.width) * 0.1
    assert near(run(x, expert_weights, weights, times=1), feed(x[None])[0], 1e-4)


# -- loading ---------------------------------------------------------------------------------------


def file_tensor(kind: str, shape: tuple[int, int, int]) -> FileTensor:
    experts, rows, columns = shape
    if kind == "converted MXFP4":
        rng = np.random.default_rng(1)
        codes = rng.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        powers = rng.integers(110, 130, codes.shape[:3], dtype=np.uint8)
        return ConvertedTensor("MXFP4", shape, build_mxfp4, (codes, powers))
    if kind == FLOAT8:
        raw = np.random.default_rng(3).integers(0, 127, shape, dtype=np.uint8)
        scales = np.random.default_rng(4).uniform(1, 2, (experts, rows, 1)).astype("f4")
        return FileTensor(kind, raw, shape, scales)
    if kind == "F32":
        return FileTensor.from_float32(np.random.default_rng(2).normal(size=shape).astype("f4"))
    factor = np.arange(1, experts + 1, dtype=np.float32) / 7 if kind == "NVFP4" else None
    blocks = random_blocks(kind, experts * rows, columns, seed=rows)
    return FileTensor(kind, blocks.reshape(experts, rows, -1), shape, factor=factor)


@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
@pytest.mark.parametrize(
    ("inner", "down", "options"),
    [
        ("Q4_K", "Q6_K", {}),
        ("converted MXFP4", "NVFP4", {}),
        ("NVFP4", FLOAT8, {}),
        ("Q8_0", "MXFP4", {"keep_packed": False}),
        ("F32", "F32", {"quantize_bits": 8}),
    ],
)
def test_experts_of_a_file(
    inner: str, down: str, options: dict[str, Any], chunk_bytes: int, monkeypatch: Any
):
    """Their numbers are the file's, packed or not, and loaded in chunks of any size."""
    monkeypatch.setattr(load_module, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(
        load_module.StagingLane, "copy_to_device", lambda _, data: torch.from_numpy(data.copy())
    )
    width = 256 if inner.endswith("_K") else 64
    config = ModelConfig(
        family="test", vocab_size=8, width=width, layers=1, heads=1, kv_heads=1, head_width=8,
        ff_width=8, context=8, positions="none", experts=3, experts_per_token=2, expert_width=width,
        expert_bias=True, router_bias=True, selection_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Transformer(config).requires_grad_(False)
    stored = {
        name: FileTensor.from_float32(parameter.numpy())
        for name, parameter in model.named_parameters()
    }
    names = [f"layers.0.feed.{name}.weight" for name in ("gate", "up", "down")]
    for name, kind in zip(names, (inner, inner, down), strict=True):
        stored[name] = file_tensor(kind, (3, width, width))
    checkpoint: Any = SimpleNamespace(path=Path("m"), config=config, weights=stored.items)
    weights = load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu"), **options)
    assert weights.layers[0].feed is not None
    loaded = weights.layers[0].feed.experts
    assert loaded is not None
    gate, up, down_values = (torch.from_numpy(stored[name].float32()) for name in names)
    is_packed = options.get("keep_packed", True)
    for matrix, values, kind in (
        (loaded.gate_up, torch.cat((gate, up), 1), inner), (loaded.down, down_values, down),
    ):  # fmt: skip
        assert isinstance(
            matrix, PackedMatrix if is_packed and (kind != "F32" or options) else PlainMatrix
        )
        actual = matrix.float_rows(0, matrix.rows).view(values.shape)
        assert (
            near(actual, values, 0.01)
            if options.get("quantize_bits")
            else torch.equal(actual, values)
        )
    feed = model.layers[0].feed
    assert isinstance(feed, Experts) and feed.gate is not None
    assert torch.equal(loaded.gate_up.bias, torch.cat((feed.gate.bias, feed.up.bias), 1).flatten())
    assert torch.equal(loaded.router_bias, feed.router.bias)
    assert torch.equal(loaded.selection_bias, feed.selection_bias)
