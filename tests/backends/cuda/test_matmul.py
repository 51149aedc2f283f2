"""Products of plain and packed matrices against plain torch and gguf's own numbers (in Triton's
interpreter); exact ones are bit-identical alone and among others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from helpers.packed_support import numbers, random_blocks  # noqa: E402
from unspool.backends.cuda import matmul  # noqa: E402
from unspool.backends.cuda.kernels.common import ACTIVATIONS  # noqa: E402
from unspool.backends.cuda.kernels.elementwise import add_norm, glu, multiply_gate  # noqa: E402
from unspool.backends.cuda.matmul import (  # noqa: E402
    PACKINGS,
    Addition,
    Epilogue,
    NormWeights,
    PackedMatrix,
    _order_probe,
    exact_gemm,
    float8_packing,
    norm_kind,
    norm_tensors,
    pack_float8,
    quantize,
    repack,
    split_columns,
)
from unspool.backends.cuda.weights import PlainMatrix, StackedMatrix  # noqa: E402
from unspool.model.files.stored import float8_to_float32  # noqa: E402
from unspool.model.layers.parts import activate, gated_activation  # noqa: E402

ROWS, COLUMNS = 19, 256  # several programs, the last of them with fewer rows


def packed(kind: str, rows: int = ROWS, columns: int = COLUMNS, bias=None):
    """A matrix, and its numbers."""
    rng = np.random.default_rng(7)
    if kind.startswith("FP8"):
        raw = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        raw[(raw & 127) == 127] = 0
        scales = rng.uniform(0.5, 2, (rows, -(-columns // 128) if "block" in kind else 1))
        scales = scales.astype(np.float32)
        parts = pack_float8(torch.from_numpy(raw), torch.from_numpy(scales))
        packing, plain = float8_packing(columns, scales.shape[1]), float8_to_float32(raw, scales)
    else:
        raw = random_blocks(kind, rows, columns)
        packing, plain = PACKINGS[kind], numbers(kind, raw)
        parts = repack(kind, torch.from_numpy(raw))
    matrix = PackedMatrix(packing, parts, rows, columns, torch.float32, bias)
    return matrix, torch.from_numpy(plain)


KINDS = [*PACKINGS, "FP8 rows", "FP8 blocks"]


def near(result, expected, bound=2e-5):
    return float((result - expected).norm() / expected.norm()) < bound


def normed(x, norm, eps):
    if norm is None:
        return x
    if norm.bias is None:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.gain, eps)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.gain, norm.bias, eps)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_products(kind):
    """The numbers are gguf's own, and products with one vector and with few are torch's."""
    torch.manual_seed(0)
    matrix, plain = packed(kind)
    assert torch.equal(matrix.float_rows(0, ROWS), plain)
    assert torch.equal(matrix.float_rows(5, 9), plain[5:9])
    x, out = torch.randn(3, COLUMNS), torch.full((3, ROWS), torch.nan)
    matrix.gemm(x, out)
    assert near(out, x @ plain.t())
    norm = NormWeights(torch.rand(COLUMNS))
    matrix.gemv(x[0], out[0], Epilogue(1e-5, norm))
    assert near(out[0], plain @ torch.nn.functional.rms_norm(x[0], (COLUMNS,), norm.gain, 1e-5))


@pytest.mark.parametrize("kind", KINDS)
def test_one_vector_of_16_bits(kind):
    """The weights meet it in whole numbers: a rounding far below the vector's own."""
    torch.manual_seed(0)
    matrix, plain = packed(kind)
    x, out = torch.randn(COLUMNS).half(), torch.full((ROWS,), torch.nan)
    x[32:64] = 0
    x[64:96] *= 1000
    matrix.gemv(x, out, Epilogue(1e-5))
    assert near(out, plain @ x.float(), 2e-4)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(broken):
    matrix, _ = packed("Q4_0")
    x, out = torch.randn(COLUMNS).half(), torch.zeros(ROWS)
    x[100] = broken
    matrix.gemv(x, out, Epilogue(1e-5))
    assert not out.isfinite().any()


@pytest.mark.parametrize("has_several_blocks", [False, True])
@pytest.mark.parametrize(("kind", "gated"), [("Q4_K", True), ("Q8_0", False), ("FP8 blocks", True)])
def test_one_vector_with_all_around_it(kind, gated, has_several_blocks, monkeypatch):
    if has_several_blocks:  # blocks of four rows for each of two programs
        monkeypatch.setattr(matmul, "packed_gemv_tiling", lambda *_: (4, 1, 2))
    torch.manual_seed(1)
    rows, columns = 30, 768  # units of a row that are no power of two
    bias = torch.randn(rows)
    matrix, plain = packed(kind, rows, columns, bias)
    num_out = rows // (1 + gated)
    norm = NormWeights(torch.rand(columns), torch.randn(columns))
    x, residual, out = torch.randn(columns), torch.randn(num_out), torch.full((num_out,), torch.nan)
    matrix.gemv(x, out, Epilogue(1e-5, norm, "silu", gated, residual))
    normed = torch.nn.functional.layer_norm(x, (columns,), norm.gain, norm.bias, 1e-5)
    y = plain @ normed + bias
    bent = torch.nn.functional.silu(y[:num_out])
    assert near(out, (bent * y[num_out:] if gated else bent) + residual)


@pytest.mark.parametrize(
    ("kind", "second", "post"),
    [("Q4_0", False, "rms"), ("Q8_0", True, "none"), ("FP8 rows", True, "layer")],
)
def test_an_addition_before_a_packed_product(kind, second, post):
    torch.manual_seed(6)
    matrix, plain = packed(kind)
    h, first, other = (torch.randn(2, COLUMNS) for _ in range(3))
    norm, post_norm = NormWeights(torch.rand(COLUMNS)), None
    if post != "none":
        shift = torch.randn(COLUMNS) if post == "layer" else None
        post_norm = NormWeights(torch.rand(COLUMNS), shift)
    sums, out = torch.full_like(h, torch.nan), torch.full((2, ROWS), torch.nan)
    addition = Addition(sums, first, other if second else None, post_norm, 0.3, 0.7)
    matrix.gemv(h, out, Epilogue(1e-5, norm, addition=addition))
    expected = (h + 0.3 * (normed(first, post_norm, 1e-5) + second * other)) * 0.7
    assert near(sums, expected)
    assert near(out, normed(expected, norm, 1e-5) @ plain.t())


@pytest.mark.parametrize("kind", ["Q4_1", "FP8 rows"])
def test_many_vectors(kind, monkeypatch):
    """More than are worth unpacking in registers, in several pieces of the matrix."""
    monkeypatch.setattr("unspool.backends.cuda.matmul._DEQUANT_SIZE", 10 * COLUMNS)
    torch.manual_seed(3)
    bias = torch.randn(ROWS)
    matrix, plain = packed(kind, bias=bias)
    x, out = torch.randn(70, COLUMNS), torch.full((70, ROWS), torch.nan)
    matrix.gemm(x, out)
    assert near(out, x @ plain.t() + bias)


@pytest.mark.parametrize("kind", ["Q6_K", "FP8 blocks"])
def test_exact_products_are_the_same_alone_and_among_others(kind):
    torch.manual_seed(4)
    matrix, _ = packed(kind)
    x = torch.randn(70, COLUMNS)
    alone, among = torch.empty(1, ROWS), torch.empty(70, ROWS)
    matrix.gemm(x[:1], alone, exact=True)
    matrix.gemm(x, among, exact=True)
    assert torch.equal(alone[0], among[0])


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_K", "FP8 rows"])
def test_rows_of_tokens(kind):
    matrix, plain = packed(kind)
    out = torch.full((4, COLUMNS), torch.nan)
    tokens, previous = torch.tensor([5, -2, 18, -1]), torch.tensor([-1, 7])  # the last pick failed
    matrix.embed_tokens(tokens, previous, out)
    assert torch.equal(out[:3], plain[[5, 7, 18]])
    assert out.isfinite().all()


def test_matrices_of_different_types_one_above_the_other():
    torch.manual_seed(5)
    (first, a), (second, b) = packed("Q4_K"), packed("Q6_K", 20)
    matrix, plain = StackedMatrix((first, second)), torch.cat((a, b))
    assert (matrix.rows, matrix.columns) == plain.shape
    x, residual = torch.randn(70, COLUMNS), torch.randn(len(plain))
    single, few, many = (torch.full((n, len(plain)), torch.nan) for n in (1, 2, 70))
    matrix.gemv(x[0], single[0], Epilogue(1e-5, residual=residual))
    matrix.gemm(x[:2], few)
    matrix.gemm(x, many)
    assert near(single[0], plain @ x[0] + residual)
    assert near(few, x[:2] @ plain.t()) and near(many, x @ plain.t())
    assert torch.equal(matrix.float_rows(12, 24), plain[12:24])


@pytest.mark.parametrize("bits, bound", [(4, 0.1), (8, 0.01)])
def test_rounding_to_fewer_bits(bits, bound):
    torch.manual_seed(6)
    plain = torch.randn(ROWS, COLUMNS)
    plain[3] = 0
    plain[4, :32] = 5  # a group of equals
    packing, parts = quantize(plain, bits)
    matrix = PackedMatrix(packing, parts, ROWS, COLUMNS, torch.float32)
    assert near(matrix.float_rows(0, ROWS), plain, bound)
    assert matrix.nbytes < plain.nbytes * (bits + 1.01) / 32


def test_what_is_no_number_is_found():
    blocks = random_blocks("Q8_0", 4, 64)
    parts = repack("Q8_0", torch.from_numpy(blocks))
    assert parts.is_finite(PACKINGS["Q8_0"])
    blocks[2, 1] = 0x7E  # the upper byte of a scale: NaN
    parts = repack("Q8_0", torch.from_numpy(blocks))
    assert not parts.is_finite(PACKINGS["Q8_0"])
    raw, scales = torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 1)
    assert pack_float8(raw, scales).is_finite(float8_packing(32, 1))
    raw[1, 5] = 255
    assert not pack_float8(raw, scales).is_finite(float8_packing(32, 1))
    blocks = random_blocks("MXFP4", 4, 64)
    assert repack("MXFP4", torch.from_numpy(blocks)).is_finite(PACKINGS["MXFP4"])
    blocks[3, 17] = 255  # the power of the second block
    assert not repack("MXFP4", torch.from_numpy(blocks)).is_finite(PACKINGS["MXFP4"])
    blocks = torch.from_numpy(random_blocks("NVFP4", 4, 64))
    factors = torch.tensor([1.0, 2.0, torch.inf, 4.0])
    assert repack("NVFP4", blocks).is_finite(PACKINGS["NVFP4"])
    assert not repack("NVFP4", blocks, factors).is_finite(PACKINGS["NVFP4"])


# -- Plain matrices --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "activation", "gated"),
    [
        ("none", "none", False), ("rms", "silu", True), ("layer", "gelu", False),
        ("rms", "gelu_tanh", True), ("none", "relu", True), ("layer", "none", True),
        ("none", "relu2", False), ("rms", "swiglu_clamped", True),
    ],
)  # fmt: skip
def test_a_product_with_all_around_it(kind, activation, gated):
    torch.manual_seed(0)
    rows, columns, eps = 37, 88, 1e-5
    matrix = PlainMatrix(
        torch.randn(rows * (1 + gated), columns) * 0.1, torch.randn(rows * (1 + gated))
    )
    norm = None
    if kind != "none":
        norm = NormWeights(torch.rand(columns), torch.randn(columns) if kind == "layer" else None)
    x, residual, out = torch.randn(columns), torch.randn(rows), torch.full((rows,), torch.nan)
    matrix.gemv(x, out, Epilogue(eps, norm, activation, gated, residual, limit=0.4))
    y = matrix.weight @ normed(x, norm, eps) + matrix.bias
    if activation == "swiglu_clamped":
        settings: Any = SimpleNamespace(activation=activation, activation_limit=0.4)
        expected = gated_activation(settings, y[:rows], y[rows:])
    else:
        bent = y[:rows] if activation == "none" else activate(activation, y[:rows])
        expected = bent * y[rows:] if gated else bent
    assert torch.allclose(out, expected + residual, atol=1e-5)


@pytest.mark.parametrize(
    ("columns", "dtype", "second", "post", "added_scale", "scale"),
    [
        (88, torch.float32, False, "rms", 1.0, 1.0), (88, torch.bfloat16, True, "none", 0.3, 1.0),
        (88, torch.bfloat16, False, "layer", 1.0, 0.7), (88, torch.float16, True, "rms", 1.0, 1.0),
        (74, torch.float32, True, "layer", 0.3, 0.7), (80, torch.float32, False, "rms", 1.0, 1.0),
    ],
)  # fmt: skip
def test_an_addition_before_a_product(columns, dtype, second, post, added_scale, scale):
    """The same bits as an addition by `add_norm`, and then a product; or (in two parts, which are
    summed in another order) nearly."""
    torch.manual_seed(2)
    rows, eps = 70, 1e-5
    matrix = PlainMatrix(torch.randn(rows, columns).to(dtype))
    h, first, other = (torch.randn(2, columns).to(dtype) for _ in range(3))
    norm, gain = NormWeights(torch.rand(columns)), torch.rand(columns)
    post_norm = None
    if post != "none":
        post_norm = NormWeights(gain, torch.randn(columns) if post == "layer" else None)
    sums, out = torch.full_like(h, torch.nan), torch.empty(2, rows, dtype=dtype)
    factor = torch.randn(2, 3 * rows).to(dtype)[:, rows : 2 * rows]
    added = other if second else None
    addition = Addition(sums, first, added, post_norm, added_scale, scale)
    epilogue = Epilogue(eps, norm, "gelu_tanh", residual=factor, is_factor=True)
    matrix.gemv(h, out, replace(epilogue, addition=addition))

    before, normed_sums = h.clone(), torch.empty_like(h)
    add_norm[(2,)](
        h, first, other, *norm_tensors(post_norm, h), *norm_tensors(norm, h), normed_sums, eps,
        added_scale, scale, D=columns, DP=128, ADDED=1 + second, POST=norm_kind(post_norm), NORM=1,
        SCALED=added_scale != 1 or scale != 1, PDL=False,
    )  # fmt: skip
    bound = 1e-5 if split_columns(columns, False)[1] else 0
    torch.testing.assert_close(sums, h, rtol=bound, atol=bound)
    assert not torch.equal(h, before)
    gate, expected = torch.empty(2, rows, dtype=dtype), torch.empty(2, rows, dtype=dtype)
    matrix.gemv(normed_sums, gate, Epilogue(eps))
    multiply_gate[(2, 1)](
        factor, gate, expected, factor.stride(0), rows, F=rows, BF=128,
        ACTIVATION=ACTIVATIONS["gelu_tanh"], PDL=False,
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("activation", "gated"), [("silu", True), ("relu2", False), ("swiglu_clamped", True)]
)
def test_activations_of_a_batch(activation, gated):
    torch.manual_seed(0)
    gate_up, out = torch.randn(3, 40 * (1 + gated)), torch.full((3, 40), torch.nan)
    glu[(3, 2)](
        gate_up, out, F=40, BF=32, GATED=gated, ACTIVATION=ACTIVATIONS[activation], PDL=False,
        LIMIT=0.4,
    )  # fmt: skip
    settings: Any = SimpleNamespace(activation=activation, activation_limit=0.4)
    if gated:
        expected = gated_activation(settings, gate_up[:, :40], gate_up[:, 40:])
    else:
        expected = activate(activation, gate_up)
    assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_vector_and_many_agree(dtype):
    torch.manual_seed(1)
    matrix = PlainMatrix(torch.randn(300, 130).to(dtype))
    x = torch.randn(3, 130).to(dtype)
    single, many = torch.empty(300, dtype=dtype), torch.empty(3, 300, dtype=dtype)
    matrix.gemv(x[1], single, Epilogue(1e-6))
    matrix.gemm(x, many)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    assert torch.allclose(single.float(), many[1].float(), rtol=bound, atol=bound)


@pytest.mark.parametrize(("shape", "biased"), [((96, 300), False), ((70, 1024), True)])
def test_a_line_alone_and_among_others_has_the_same_bits(shape, biased):
    torch.manual_seed(0)
    rows, columns = shape
    weight, x = torch.randn(rows, columns), torch.randn(130, columns)
    bias = torch.randn(rows) if biased else None
    expected = torch.nn.functional.linear(x.double(), weight.double())
    if bias is not None:
        expected += bias
    alone = None
    for count in (1, 20, 65, 130):
        out = torch.full((count, rows), torch.nan)
        exact_gemm(weight, bias, x[:count], out)
        assert torch.allclose(out.double(), expected[:count], atol=1e-3)
        alone = out[0] if alone is None else alone
        assert torch.equal(out[0], alone)


@pytest.mark.parametrize("columns", [48, 257])
def test_matrices_that_tell_another_order_of_summation(columns):
    """In exact arithmetic all their products are zero."""
    x, weight = _order_probe(20, torch.empty(64, columns, dtype=torch.bfloat16))
    assert (x.double() @ weight.double().T).abs().max() == 0
    terms = x.float()[:, None] * weight.float()
    sums = torch.zeros(2, 20, 64)
    for n in range(columns):
        sums += torch.stack((terms[..., n], terms[..., columns - 1 - n]))
    ahead, back = sums.to(torch.bfloat16)
    assert (ahead != back).float().mean() > 0.3
