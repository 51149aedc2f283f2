"""The kernel of interventions: changes to rows of a tensor, by a list of operations for each."""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import wait

# Kinds of operations. All have the form x = keep * x + factor * vector.
CHANGE_ADD = 0
_DIRECTION, _VALUES, _SCALE, _FEATURE = (tl.constexpr(n) for n in range(1, 5))
CHANGE_KINDS = {
    "add": CHANGE_ADD, "project_out": 1, "replace": 2, "mean_ablate": 2, "scale": 3,
    "clamp_feature": 4,
}  # fmt: skip


@triton.jit(do_not_specialize=["place"])
def change_rows(
    x, starts, entries, ops, numbers, vectors, place, D: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Apply the operations of each row of x, [rows, D], in their order.

    Row r has the entries from starts[place + r] to starts[place + r + 1]; an entry is the number of
    an operation. Its 8 fields: kind, first column, columns, where its vector is, where its encoder
    is, factor, bias, threshold; the last three are 32-bit floats, `numbers` at the same address.
    """
    row = tl.program_id(0)
    wait(PDL)
    first = tl.load(starts + place + row)
    last = tl.load(starts + place + row + 1)
    for entry in range(first, last):
        op = tl.load(entries + entry) * 8
        kind = tl.load(ops + op)
        base = x + row.to(tl.int64) * D + tl.load(ops + op + 1)
        count = tl.load(ops + op + 2)
        vector = vectors + tl.load(ops + op + 3)
        factor = tl.load(numbers + op + 5)
        threshold = tl.load(numbers + op + 7)
        is_product = (kind == _DIRECTION) | (kind == _FEATURE)
        encoder = tl.where(kind == _FEATURE, tl.load(ops + op + 4), tl.load(ops + op + 3))
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, tl.where(is_product, count, 0), BLOCK):
            cols = start + tl.arange(0, BLOCK)
            old = tl.load(base + cols, mask=cols < count, other=0.0).to(tl.float32)
            sums += old * tl.load(vectors + encoder + cols, mask=cols < count, other=0.0)
        feature = tl.sum(sums) + tl.load(numbers + op + 6)
        feature = tl.where((kind == _DIRECTION) | (feature > threshold), feature, 0.0)
        keep = tl.where(kind == _VALUES, 0.0, tl.where(kind == _SCALE, factor, 1.0))
        factor = tl.where(is_product, factor - feature, tl.where(kind == _VALUES, 1.0, factor))
        for start in range(0, count, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            old = tl.load(base + cols, mask=cols < count, other=0.0).to(tl.float32)
            delta = tl.load(vector + cols, mask=(cols < count) & (kind != _SCALE), other=0.0)
            new = tl.where(keep == 0.0, 0.0, keep * old) + factor * delta
            tl.store(base + cols, new.to(x.dtype.element_ty), mask=cols < count)
        tl.debug_barrier()  # the next operation may give these columns to other threads
