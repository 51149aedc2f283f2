"""The kernel of interventions: changes to rows of a tensor, by a list of operations for each."""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of operations. All have the form x = keep * x + factor * vector.
CHANGE_ADD = 0
_DIRECTION, _VALUES, _SCALE, _FEATURE = (tl.constexpr(n) for n in range(1, 5))
CHANGE_KINDS = {
    "add": CHANGE_ADD, "project_out": 1, "replace": 2, "mean_ablate": 2, "scale": 3,
    "clamp_feature": 4,
}  # fmt: skip


@triton.jit
def load_op(entries, ops, numbers, vectors, entry, last, cols):
    """Kind, first column, number of columns, vector, encoder, factor, bias and threshold of an
    entry's operation, and the first numbers of its vector."""
    inside = entry < last
    op = tl.load(entries + entry, inside, 0) * 8
    kind, count = tl.load(ops + op), tl.load(ops + op + 2)
    vector = vectors + tl.load(ops + op + 3)
    encoder = tl.where(kind == _FEATURE, vectors + tl.load(ops + op + 4), vector)
    has_vector = inside & (kind != _SCALE)
    start = tl.load(vector + cols, mask=(cols < count) & has_vector, other=0.0)
    column, factor = tl.load(ops + op + 1), tl.load(numbers + op + 5)
    bias, threshold = tl.load(numbers + op + 6), tl.load(numbers + op + 7)
    return kind, column, count, vector, encoder, factor, bias, threshold, start


@triton.jit(do_not_specialize=["place"])
def change_rows(
    x, starts, entries, ops, numbers, vectors, place, D: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Apply the operations of each row of x, [rows, D], in their order.

    Row r has the entries from starts[place + r] to starts[place + r + 1]; an entry is the number of
    an operation. Its 8 fields: kind, first column, columns, where its vector is, where its encoder
    is, factor, bias, threshold; the last three are 32-bit floats, `numbers` at the same address.

    The tables are from before this step: the first operation is loaded before the wait.
    """
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first, last = tl.load(starts + place + row), tl.load(starts + place + row + 1)
    block = tl.arange(0, BLOCK)
    kind, column, count, vector, encoder, factor, bias, threshold, delta = load_op(
        entries, ops, numbers, vectors, first, last, block
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    for entry in range(first, last):
        base = x + row.to(tl.int64) * D + column
        is_product = (kind == _DIRECTION) | (kind == _FEATURE)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, tl.where(is_product, count, 0), BLOCK):
            cols = start + block
            old = tl.load(base + cols, mask=cols < count, other=0.0).to(tl.float32)
            sums += old * tl.load(encoder + cols, mask=cols < count, other=0.0)
        feature = tl.sum(sums) + bias
        feature = tl.where((kind == _DIRECTION) | (feature > threshold), feature, 0.0)
        keep = tl.where(kind == _VALUES, 0.0, tl.where(kind == _SCALE, factor, 1.0))
        factor = tl.where(is_product, factor - feature, tl.where(kind == _VALUES, 1.0, factor))
        for start in range(0, count, BLOCK):
            cols = start + block
            if start > 0:
                delta = tl.load(vector + cols, mask=(cols < count) & (kind != _SCALE), other=0.0)
            old = tl.load(base + cols, mask=cols < count, other=0.0).to(tl.float32)
            new = tl.where(keep == 0.0, 0.0, keep * old) + factor * delta
            tl.store(base + cols, new.to(x.dtype.element_ty), mask=cols < count)
        kind, column, count, vector, encoder, factor, bias, threshold, delta = load_op(
            entries, ops, numbers, vectors, entry + 1, last, block
        )
        tl.debug_barrier()  # the next operation may give these columns to other threads
