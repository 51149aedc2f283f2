"""Products and the small kernels between them, against plain torch (in Triton's interpreter)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from unspool.backends.cuda.matmul import Epilogue, NormWeights  # noqa: E402
from unspool.backends.cuda.weights import PlainMatrix  # noqa: E402
from unspool.model.layers.parts import activate  # noqa: E402


def normed(x, norm, eps):
    if norm is None:
        return x
    if norm.bias is None:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.gain, eps)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], norm.gain, norm.bias, eps)


@pytest.mark.parametrize(
    ("kind", "activation", "gated"),
    [
        ("none", "none", False), ("rms", "silu", True), ("layer", "gelu", False),
        ("rms", "gelu_tanh", True), ("none", "relu", True), ("layer", "none", True),
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
    matrix.gemv(x, out, Epilogue(eps, norm, activation, gated, residual))
    y = matrix.weight @ normed(x, norm, eps) + matrix.bias
    bent = y if activation == "none" else activate(activation, y)
    expected = activate(activation, y[:rows]) * y[rows:] if gated and activation != "none" else bent
    if gated and activation == "none":
        expected = y[:rows] * y[rows:]
    assert torch.allclose(out, expected + residual, atol=1e-5)


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
