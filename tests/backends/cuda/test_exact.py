"""Exact products: a line gives the same bits alone, among few and among many."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from unspool.backends.cuda.matmul import exact_gemm, num_splits  # noqa: E402


@pytest.mark.parametrize(
    ("shape", "biased"), [((96, 300), False), ((130, 576), True), ((70, 1024), True)]
)
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


def test_parts_depend_on_the_matrix_alone_and_keep_a_large_gpu_busy():
    assert num_splits(28_672, 4096) == 1
    assert num_splits(4096, 14_336) * (4096 // 64) >= 264
    assert num_splits(64, 128) == 1  # too few columns to share
