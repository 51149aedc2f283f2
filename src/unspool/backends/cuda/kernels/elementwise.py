"""Small kernels between the GEMMs: embeddings, norms, gated activations, the greedy token."""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import (
    activated,
    add_to_residual,
    gated_activation,
    load_norm,
    load_parts,
    normalize_parts,
    rounded,
    store_parts,
    wait,
)

# -- Small kernels between the GEMMs of a batch: one program per row (a new token)


@triton.jit(do_not_specialize=["rows"])
def copy_segments(source, target, segments, rows, BLOCK: tl.constexpr):
    """Copy parts of a buffer of words, one per program. Source or target is memory of the host.

    segments [programs, 3]: the first word of a part, its words per row, and words besides.
    """
    part = segments + tl.program_id(0) * 3
    first, words = tl.load(part), tl.load(part + 1) * rows + tl.load(part + 2)
    for at in range(0, words, BLOCK):
        word = at + tl.arange(0, BLOCK)
        values = tl.load(source + first + word, mask=word < words)
        tl.store(target + first + word, values, mask=word < words)


@triton.jit
def embed_and_update(
    updates, table, tokens, previous, positions, embed, position_embed, h, scale, ROOM,
    D: tl.constexpr, DP: tl.constexpr, UNPACKED: tl.constexpr, SCALED: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """First kernel of a step: update the block table and embed the tokens.

    UNPACKED: the embedding is in `h` already. A token -1 - n is pick n of the previous step.
    `updates` holds the number of updates, then indices into the table, then (from 1 + ROOM on) the
    pages; the last program applies them.
    """
    batch_row, num_rows = tl.program_id(0), tl.num_programs(0) - 1
    if batch_row == num_rows:
        count = tl.load(updates)
        for first in range(0, count, 256):
            number = first + tl.arange(0, 256)
            inside = number < count
            index = tl.load(updates + 1 + number, mask=inside, other=0)
            page = tl.load(updates + 1 + ROOM + number, mask=inside, other=0)
            tl.store(table + index, page, mask=inside)
    else:
        cols = tl.arange(0, DP)
        row = batch_row.to(tl.int64)
        if not UNPACKED:
            row = tl.load(tokens + batch_row)
            if row < 0:
                row = tl.load(previous - 1 - row)
            row = tl.maximum(row, 0)  # a failed pick: the host drops its row
        vector = tl.load(embed + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        if SCALED:
            vector = rounded(vector * scale, h)
        if POSITIONS:
            index = tl.load(positions + batch_row).to(tl.int64) * D + cols
            vector += tl.load(position_embed + index, mask=cols < D, other=0.0).to(tl.float32)
        tl.store(
            h + batch_row.to(tl.int64) * D + cols, vector.to(h.dtype.element_ty), mask=cols < D
        )


@triton.jit
def add_norm(
    h, first, second, post_gain, post_shift, gain, shift, out, eps, added_scale, scale,
    D: tl.constexpr, DP: tl.constexpr, ADDED: tl.constexpr, POST: tl.constexpr,
    NORM: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h = `add_to_residual`(h, first, second); out = norm(h), or h without NORM."""
    at = tl.program_id(0).to(tl.int64) * D
    cols = (tl.arange(0, DP),)
    gains, shifts = load_norm(gain, shift, cols, D, NORM, 1)
    post_gains, post_shifts = load_norm(post_gain, post_shift, cols, D, POST, 1)
    wait(PDL)
    x = add_to_residual(
        load_parts(h + at, cols, D, 1), first + at, second + at, post_gains, post_shifts, cols,
        eps, added_scale, scale, D, ADDED, POST, SCALED, 1,
    )  # fmt: skip
    if ADDED > 0 or SCALED:
        store_parts(h + at, x, cols, D, 1)
    store_parts(out + at, normalize_parts(x, gains, shifts, cols, out, eps, D, NORM, 1), cols, D, 1)


@triton.jit
def glu(
    gate_up, out, F: tl.constexpr, BF: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """act(gate) * up, where `gate_up` is [gate, up]; without a gate act(up).

    LIMIT: see `gated_activation`.
    """
    wait(PDL)
    batch_row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BF + tl.arange(0, BF)
    inside, width = cols < F, F * (1 + GATED)
    y = tl.load(gate_up + batch_row * width + cols, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(gate_up + batch_row * width + F + cols, mask=inside, other=0.0).to(tl.float32)
        y = gated_activation(y, up, out, ACTIVATION, LIMIT)
    else:
        y = activated(y, ACTIVATION)
    tl.store(out + batch_row * F + cols, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply_gate(
    x, gate, out, X_STRIDE, GATE_STRIDE, F: tl.constexpr, BF: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, F] = x * activation(gate); may be in place."""
    wait(PDL)
    batch_row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BF + tl.arange(0, BF)
    inside = cols < F
    y = tl.load(gate + batch_row * GATE_STRIDE + cols, mask=inside, other=0.0).to(tl.float32)
    y = rounded(activated(y, ACTIVATION), out)
    y *= tl.load(x + batch_row * X_STRIDE + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + batch_row * F + cols, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scale_by_gate(
    inner, x, gate, F: tl.constexpr, FP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """inner [rows, F] *= sigmoid(gate · x), with gate [D] and x [rows, D]."""
    cols, inner_cols = tl.arange(0, DP), tl.arange(0, FP)
    weight = tl.load(gate + cols, mask=cols < D, other=0.0).to(tl.float32)
    wait(PDL)
    batch_row = tl.program_id(0).to(tl.int64)
    vector = tl.load(x + batch_row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    score = rounded(tl.sum(vector * weight, 0), inner)
    at = inner + batch_row * F + inner_cols
    y = tl.load(at, mask=inner_cols < F, other=0.0).to(tl.float32) / (1.0 + tl.exp(-score))
    tl.store(at, y.to(inner.dtype.element_ty), mask=inner_cols < F)


@triton.jit
def token_inputs(
    tokens, previous, embed, projected, gain, out, projected_scale, embed_scale, eps,
    LAYERS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, UNPACKED: tl.constexpr,
):  # fmt: skip
    """Per-layer embedding of one token and layer: (norm(projected) + embed) / sqrt(2).

    UNPACKED: the embedding is in `out` already. A token -1 - n is pick n of the previous step.
    """
    batch_row, layer, cols = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DP)
    inside = cols < D
    at = (batch_row * LAYERS + layer) * D + cols
    row = batch_row
    if not UNPACKED:
        row = tl.load(tokens + batch_row)
        if row < 0:
            row = tl.load(previous - 1 - row)
        row = tl.maximum(row, 0)
    table_at = (row * LAYERS + layer) * D + cols
    looked_up = tl.load(embed + table_at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(projected + at, mask=inside, other=0.0).to(tl.float32)
    x = rounded(x * projected_scale, out)
    gains = load_parts(gain, (cols,), D, 1)
    x = normalize_parts((x,), gains, (), (cols,), out, eps, D, 1, 1)[0]
    x = rounded(x + rounded(looked_up * embed_scale, out), out) * 0.7071067811865476
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_all_heads(
    qkv, q_gain, k_gain, eps, Q: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RMSNorm over all query heads together, and over all key heads, in place."""
    wait(PDL)
    batch_row, keys = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, P)
    size = tl.where(keys == 1, K, Q)
    at = qkv + batch_row * WIDTH + tl.where(keys == 1, Q, 0) + cols
    inside = cols < size
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(tl.where(keys == 1, k_gain, q_gain) + cols, mask=inside, other=0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * gain
    tl.store(at, x.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def greedy_token(logits, ids, temperature, token, logprob, N, NP: tl.constexpr):
    """Token with the largest logit (ties: the first), and its log-probability.

    NP is the power of two >= N.
    """
    indices = tl.arange(0, NP)
    inside = indices < N
    x = tl.load(logits + indices, mask=inside, other=-float("inf")).to(tl.float32)
    peak = tl.max(x, 0)
    first = tl.min(tl.where(x == peak, indices, NP), 0)
    first = tl.minimum(first, N - 1)  # NaN logits: any valid token
    scaled = (x - peak) / tl.load(temperature).to(tl.float32)
    tl.store(token, tl.load(ids + first))
    tl.store(logprob, -tl.log(tl.sum(tl.where(inside, tl.exp(scaled), 0.0), 0)).to(tl.float64))
