"""Mixture of experts for any number of tokens, without synchronizing with the host.

A pair is a token and one of its K selected experts, numbered token * K + rank. There are two paths:

- Few tokens: `route_few` selects the experts, `gather_up` and `gather_down` are GEMVs whose rows
  are those of the selected experts. They are limited by reading these weights once.
- Many tokens: pairs are grouped by expert in blocks of ROWS, so that a program multiplies one block
  with one expert's matrix. The number of blocks is known on the device only: the grid has the
  maximum, and surplus programs return immediately.

Sums have a fixed order. The matrices of all experts are stacked by rows. They are plain (BITS 0: U
is their number of columns, and a unit is a column) or packed as in `packed.py`.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import (
    activated,
    gated_activation,
    rounded,
    wait,
)
from unspool.backends.cuda.kernels.gemv import epilogue
from unspool.backends.cuda.kernels.packed import (
    block_rows,
    dequantize_rows,
    excess_and_sums,
    load_slots,
    load_units_at,
    product,
    quantize_vector,
)

# -- Router


@triton.jit
def choose_experts(
    score, selection_bias, scale, experts_scale,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Top-K experts of a token and their gates [KP], from router scores [EP] (-inf from E on).

    BIASED: `selection_bias` is added to the probabilities for the selection. SCALED: gates are
    multiplied by `scale` of their expert.
    """
    experts, ranks = tl.arange(0, EP), tl.arange(0, KP)
    if SIGMOID:
        probs = 1.0 / (1.0 + tl.exp(-score))
    else:
        probs = tl.exp(score - tl.max(score, 0))
        probs = probs / tl.sum(probs, 0)
    weight = probs
    if BIASED:
        weight += tl.load(selection_bias + experts, mask=experts < E, other=0.0)
    # Integers in the order of the floats, then of the experts, so that ties select the first one.
    bits = weight.to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32 | (EP - 1 - experts)
    LOWEST: tl.constexpr = -(2**63)
    keys = tl.where(experts < E, keys, LOWEST)
    selected = tl.zeros((KP,), tl.int32)
    gate = tl.zeros((KP,), tl.float32)
    for k in range(K):
        best = tl.max(keys, 0)
        expert = EP - 1 - (best & (EP - 1)).to(tl.int32)
        is_best = experts == expert
        if BIASED:
            prob = tl.sum(tl.where(is_best, probs, 0.0), 0)
        else:
            order = (best >> 32).to(tl.int32)
            prob = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        selected = tl.where(ranks == k, expert, selected)
        gate = tl.where(ranks == k, prob, gate)
        keys = tl.where(is_best, LOWEST, keys)
    if NORMALIZE:
        total = tl.sum(gate, 0)
        if SIGMOID:
            total += 1e-6  # parts.SMALLEST_SUM
        gate = gate / total
    gate *= experts_scale
    if SCALED:
        gate *= tl.load(scale + selected, mask=ranks < K, other=0.0)
    return selected, gate


@triton.jit
def route_few(
    x, router, bias, selection_bias, scale, scores, arrived, expert_ids, gates, experts_scale,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, BE: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Select the experts of a few tokens: one program per token and BE experts.

    The last program of a token selects from its scores; `arrived` is zero before and after.
    """
    token = tl.program_id(1).to(tl.int64)
    rows, cols = tl.program_id(0) * BE + tl.arange(0, BE), tl.arange(0, DP)
    inside = (rows < E)[:, None] & (cols < D)[None, :]
    tile = tl.load(router + rows[:, None] * D + cols[None, :], mask=inside, other=0.0)
    wait(PDL)
    vector = tl.load(x + token * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    sums = tl.sum(tile.to(tl.float32) * vector[None, :], 1)
    if BIAS:
        sums += tl.load(bias + rows, mask=rows < E, other=0.0)
    tl.store(scores + token * E + rows, sums, mask=rows < E)
    tl.debug_barrier()
    programs = tl.num_programs(0)
    if tl.atomic_add(arrived + token, 1, sem="acq_rel") == programs - 1:
        tl.store(arrived + token, 0)
        experts, ranks = tl.arange(0, EP), tl.arange(0, KP)
        score = tl.load(
            scores + token * E + experts, mask=experts < E, other=-float("inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        selected, gate = choose_experts(
            score, selection_bias, scale, experts_scale, E, EP, K, KP, SIGMOID, NORMALIZE, BIASED,
            SCALED,
        )  # fmt: skip
        tl.store(expert_ids + token * K + ranks, selected, mask=ranks < K)
        tl.store(gates + token * K + ranks, gate, mask=ranks < K)


@triton.jit
def route(
    x, router, bias, scores, N,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Router logits: scores [N, E] = x · routerᵀ + bias."""
    wait(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.program_id(1) * BE + tl.arange(0, BE)
    sums = tl.zeros((ROWS, BE), tl.float32)
    for at in range(0, D, BD):
        cols = at + tl.arange(0, BD)
        inside = cols < D
        token = tl.load(
            x + rows.to(tl.int64)[:, None] * D + cols[None, :],
            mask=(rows < N)[:, None] & inside[None, :],
            other=0.0,
        )
        weight = tl.load(
            router + experts[None, :] * D + cols[:, None],
            mask=(experts < E)[None, :] & inside[:, None],
            other=0.0,
        )
        sums = tl.dot(token, weight, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + experts, mask=experts < E, other=0.0)[None, :]
    ranks = rows.to(tl.int64)[:, None] * E + experts[None, :]
    tl.store(scores + ranks, sums, mask=(rows < N)[:, None] & (experts < E)[None, :])


@triton.jit
def select_experts(
    scores, selection_bias, scale, expert_ids, gates, counts, experts_scale,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Top-K experts of a token and their gates; counts the tokens of each expert."""
    wait(PDL)
    n = tl.program_id(0).to(tl.int64)
    experts, ranks = tl.arange(0, EP), tl.arange(0, KP)
    score = tl.load(scores + n * E + experts, mask=experts < E, other=-float("inf"))
    selected, gate = choose_experts(
        score, selection_bias, scale, experts_scale, E, EP, K, KP, SIGMOID, NORMALIZE, BIASED,
        SCALED,
    )  # fmt: skip
    tl.atomic_add(counts + selected, 1, mask=ranks < K)
    tl.store(expert_ids + n * K + ranks, selected, mask=ranks < K)
    tl.store(gates + n * K + ranks, gate, mask=ranks < K)


# -- Few tokens: GEMVs with the rows of the selected experts


@triton.jit
def load_tile(
    quants, records, factors, first, rows, units, inside, U: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Load units of experts' matrices: unit n is in rows first[n] + `rows`."""
    if BITS == 0:
        at = (first * U + units)[None, :] + (rows * U)[:, None]
        tile = tl.load(quants + at, mask=inside, other=0.0, eviction_policy="evict_first")
        record, factor = tile, tile
    else:
        tile, record, factor = load_units_at(
            quants, records, factors, first, rows, units, inside, U, BITS, KIND, SHARE
        )
    return tile, record, factor


@triton.jit
def load_vector(
    x, units, gate, SIZE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Load the units of vector x [SIZE], times `gate`, in the form that `multiply` needs."""
    if BITS == 0:
        vector = tl.load(x + units, mask=units < SIZE, other=0.0).to(tl.float32) * gate
        loaded = (vector, vector, vector, vector, vector)
    else:
        slots = load_slots(x, units, SIZE, BITS)
        INTEGER: tl.constexpr = KIND != 4 and x.dtype.element_ty.primitive_bitwidth == 16
        if INTEGER:
            upper, lower, step, sums = quantize_vector(slots, BITS, KIND, NATIVE)
            loaded = (slots, upper, lower, step * gate, sums)
        else:
            scaled = ()
            for slot in tl.static_range(0, 32 // BITS):
                scaled = scaled + (slots[slot] * gate[:, None],)  # noqa: RUF005
            step, sums = excess_and_sums(scaled, BITS, KIND, OFFSET)
            loaded = (scaled, scaled, scaled, step, sums)
    return loaded


@triton.jit
def multiply(
    tile, record, factor, units, vector, zero, INTEGER: tl.constexpr, BITS: tl.constexpr,
    KIND: tl.constexpr, OFFSET: tl.constexpr, SHARE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows times the vector of `load_vector`, [rows]."""
    if BITS == 0:
        y = tl.sum(tile.to(tl.float32) * vector[0][None, :], 1)
    else:
        y = product(
            tile, record, factor, units, vector[0], vector[1], vector[2], vector[3], vector[4],
            zero, BITS, KIND, OFFSET, SHARE, INTEGER, NATIVE,
        )  # fmt: skip
    return y


@triton.jit
def gather_up(
    x, quants, records, factors, bias, expert_ids, inner, N,
    D: tl.constexpr, K: tl.constexpr, U: tl.constexpr, UP: tl.constexpr, TAIL: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SHARE: tl.constexpr,
    BN: tl.constexpr, GLU: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """inner [pairs, N] = activation(gate · x) * (up · x) of each pair's expert; without GLU
    activation(up · x).

    The U units of a row are divided into powers of two: UP, and TAIL for the others (0: none).
    """
    pair = tl.program_id(1).to(tl.int64)
    start, stride, height = tl.program_id(0), tl.num_programs(0), N * (1 + GLU)
    units = tl.arange(0, UP)
    wait(PDL)
    expert = tl.load(expert_ids + pair).to(tl.int64)
    x, inner, bias = x + pair // K * D, inner + pair * N, bias + expert * height
    rows = block_rows(start, N, BN, GLU)
    first = tl.zeros_like(units).to(tl.int64) + expert * height
    inside = (rows < height)[:, None] & (units < U)[None, :]
    tile, record, factor = load_tile(
        quants, records, factors, first, rows, units, inside, U, BITS, KIND, SHARE
    )
    if TAIL > 0:
        tail = UP + tl.arange(0, TAIL)
        tail_first = tl.zeros_like(tail).to(tl.int64) + expert * height
        inside = (rows < height)[:, None] & (tail < U)[None, :]
        tail_tile, tail_record, tail_factor = load_tile(
            quants, records, factors, tail_first, rows, tail, inside, U, BITS, KIND, SHARE
        )
    INTEGER: tl.constexpr = KIND != 4 and x.dtype.element_ty.primitive_bitwidth == 16
    vector = load_vector(x, units, tl.full((UP,), 1.0, tl.float32), D, BITS, KIND, OFFSET, NATIVE)
    if TAIL > 0:
        tail_vector = load_vector(
            x, tail, tl.full((TAIL,), 1.0, tl.float32), D, BITS, KIND, OFFSET, NATIVE
        )
    zero = tl.minimum(N, 0)
    for block in range(start, tl.cdiv(N, BN), stride):
        rows = block_rows(block + stride, N, BN, GLU)
        inside = (rows < height)[:, None] & (units < U)[None, :]
        next_tile, next_record, next_factor = load_tile(
            quants, records, factors, first, rows, units, inside, U, BITS, KIND, SHARE
        )
        y = multiply(
            tile, record, factor, units, vector, zero, INTEGER, BITS, KIND, OFFSET, SHARE, NATIVE
        )
        tile, record, factor = next_tile, next_record, next_factor
        if TAIL > 0:
            inside = (rows < height)[:, None] & (tail < U)[None, :]
            next_tile, next_record, next_factor = load_tile(
                quants, records, factors, tail_first, rows, tail, inside, U, BITS, KIND, SHARE
            )
            y += multiply(
                tail_tile, tail_record, tail_factor, tail, tail_vector, zero, INTEGER, BITS, KIND,
                OFFSET, SHARE, NATIVE,
            )  # fmt: skip
            tail_tile, tail_record, tail_factor = next_tile, next_record, next_factor
        z = y
        if GLU:
            y, z = tl.split(tl.reshape(y, [BN, 2]))
        out_rows = block * BN + tl.arange(0, BN)
        epilogue(
            y, z, out_rows, out_rows < N, bias, inner, inner, 1.0, N, GLU, ACTIVATION, BIAS,
            False, False, LIMIT,
        )  # fmt: skip


@triton.jit
def load_gates(expert_ids, gates, units, U: tl.constexpr, K: tl.constexpr):
    """Expert and gate of units of a token's K vectors: [units] each."""
    inside = units < K * U
    expert = tl.load(expert_ids + units // U, mask=inside, other=0).to(tl.int64)
    return expert, tl.load(gates + units // U, mask=inside, other=0.0)


@triton.jit
def gather_down(
    inner, quants, records, factors, bias, expert_ids, gates, out, N,
    F: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, U: tl.constexpr, UP: tl.constexpr,
    TAIL: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    SHARE: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """out [tokens, N] = sum over a token's K experts of gate * (down · inner).

    The K vectors of a token are one vector of K * U units. A unit's expert selects the matrix that
    it is multiplied with, and its gate is part of the vector. UP and TAIL: see `gather_up`.
    """
    token = tl.program_id(1).to(tl.int64)
    start, stride = tl.program_id(0), tl.num_programs(0)
    wait(PDL)
    expert_ids, gates = expert_ids + token * K, gates + token * K
    inner, out = inner + token * (K * F), out + token * N
    INTEGER: tl.constexpr = KIND != 4 and inner.dtype.element_ty.primitive_bitwidth == 16
    units = tl.arange(0, UP)
    expert, gate = load_gates(expert_ids, gates, units, U, K)
    first, at = expert * N, units % U
    rows = start * BN + tl.arange(0, BN)
    inside = (rows < N)[:, None] & (units < K * U)[None, :]
    tile, record, factor = load_tile(
        quants, records, factors, first, rows, at, inside, U, BITS, KIND, SHARE
    )
    if TAIL > 0:
        tail = UP + tl.arange(0, TAIL)
        expert, tail_gate = load_gates(expert_ids, gates, tail, U, K)
        tail_first, tail_at = expert * N, tail % U
        inside = (rows < N)[:, None] & (tail < K * U)[None, :]
        tail_tile, tail_record, tail_factor = load_tile(
            quants, records, factors, tail_first, rows, tail_at, inside, U, BITS, KIND, SHARE
        )
    vector = load_vector(inner, units, gate, K * F, BITS, KIND, OFFSET, NATIVE)
    if TAIL > 0:
        tail_vector = load_vector(inner, tail, tail_gate, K * F, BITS, KIND, OFFSET, NATIVE)
    if BIAS:
        ranks = tl.arange(0, KP)
        bias_first = tl.load(expert_ids + ranks, mask=ranks < K, other=0).to(tl.int64) * N
        bias_gate = tl.load(gates + ranks, mask=ranks < K, other=0.0)
    zero = tl.minimum(N, 0)
    for block in range(start, tl.cdiv(N, BN), stride):
        next_rows = (block + stride) * BN + tl.arange(0, BN)
        inside = (next_rows < N)[:, None] & (units < K * U)[None, :]
        next_tile, next_record, next_factor = load_tile(
            quants, records, factors, first, next_rows, at, inside, U, BITS, KIND, SHARE
        )
        y = multiply(
            tile, record, factor, at, vector, zero, INTEGER, BITS, KIND, OFFSET, SHARE, NATIVE
        )
        tile, record, factor = next_tile, next_record, next_factor
        if TAIL > 0:
            inside = (next_rows < N)[:, None] & (tail < K * U)[None, :]
            next_tile, next_record, next_factor = load_tile(
                quants, records, factors, tail_first, next_rows, tail_at, inside, U, BITS, KIND,
                SHARE,
            )  # fmt: skip
            y += multiply(
                tail_tile, tail_record, tail_factor, tail_at, tail_vector, zero, INTEGER, BITS,
                KIND, OFFSET, SHARE, NATIVE,
            )  # fmt: skip
            tail_tile, tail_record, tail_factor = next_tile, next_record, next_factor
        if BIAS:
            bias_at = bias_first[None, :] + rows[:, None]
            mask = (rows < N)[:, None] & (ranks < K)[None, :]
            biases = tl.load(bias + bias_at, mask=mask, other=0.0).to(tl.float32)
            y += tl.sum(biases * bias_gate[None, :], 1)
        tl.store(out + rows, y.to(out.dtype.element_ty), mask=rows < N)
        rows = next_rows


# -- Many tokens: pairs grouped by expert, on tensor cores


@triton.jit
def group_pairs(
    expert_ids, counts, pairs, blocks, total, PAIRS,
    E: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Group the pairs of one expert, in order, into blocks.

    `blocks`: the expert of each block and its number of pairs.
    """
    wait(PDL)
    expert, all_experts, part = tl.program_id(0), tl.arange(0, EP), tl.arange(0, BP)
    count = tl.load(counts + all_experts, mask=all_experts < E, other=0)
    needed = (count + ROWS - 1) // ROWS
    first = tl.sum(tl.where(all_experts < expert, needed, 0), 0)
    num_pairs = tl.sum(tl.where(all_experts == expert, count, 0), 0)
    if expert == 0:
        tl.store(total, tl.sum(needed, 0))
    for at in range(0, (num_pairs + ROWS - 1) // ROWS, BP):
        block = at + part
        in_range = block * ROWS < num_pairs
        tl.store(blocks + 2 * (first + block), expert, mask=in_range)
        tl.store(
            blocks + 2 * (first + block) + 1,
            tl.minimum(num_pairs - block * ROWS, ROWS),
            mask=in_range,
        )
    num_before = 0
    for at in range(0, PAIRS, BP):
        pair = at + part
        is_mine = tl.load(expert_ids + pair, mask=pair < PAIRS, other=-1) == expert
        rank = num_before + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(pairs + first * ROWS + rank, pair, mask=is_mine)
        num_before += tl.sum(is_mine.to(tl.int32), 0)


@triton.jit
def _load_block(pairs, blocks, block, ROWS: tl.constexpr):
    """Expert of a block, its pairs, and which of its rows are used."""
    rows = tl.arange(0, ROWS)
    real = rows < tl.load(blocks + 2 * block + 1)
    pair = tl.load(pairs + block * ROWS + rows, mask=real, other=0)
    return tl.load(blocks + 2 * block).to(tl.int64), pair.to(tl.int64), real


@triton.jit
def weight_tile(
    quants, records, factors, first, rows, at, inside, zero, target, U: tl.constexpr,
    BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SHARE: tl.constexpr,
    BN: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    """BU units from `at` on of the rows `first` + `rows`: [BN, columns] in the dtype of `target`.

    `inside`: which of the rows exist.
    """
    units = at + tl.arange(0, BU)
    tile, record, factor = load_tile(
        quants, records, factors, tl.zeros_like(units).to(tl.int64) + first, rows, units,
        inside[:, None] & (units < U)[None, :], U, BITS, KIND, SHARE,
    )  # fmt: skip
    if BITS != 0:
        tile = dequantize_rows(
            tile, record, factor, units, zero, target, BN, BU, BITS, KIND, OFFSET, SHARE
        )
    return tile


@triton.jit
def up_project(
    x, quants, records, factors, bias, inner, pairs, blocks, total, N,
    D: tl.constexpr, K: tl.constexpr, U: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BU: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, GLU: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner [pairs, N] = activation(gate · x) * (up · x), each pair by its expert; without GLU
    activation(up · x). SIZE: columns of a unit."""
    wait(PDL)
    block = tl.program_id(0)
    if block >= tl.load(total):
        return
    expert, pair, real = _load_block(pairs, blocks, block, ROWS)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    inside, zero, first = rows < N, tl.minimum(N, 0), expert * N * (1 + GLU)
    token = x + (pair // K)[None, :] * D
    sums = tl.zeros((BN, ROWS), tl.float32)
    up_sums = sums
    for at in tl.range(0, U, BU, num_stages=STAGES):
        cols = at * SIZE + tl.arange(0, BU * SIZE)
        mask = real[None, :] & (cols < D)[:, None]
        vector = tl.load(token + cols[:, None], mask=mask, other=0.0)
        tile = weight_tile(
            quants, records, factors, first, rows, at, inside, zero, x, U, BITS, KIND, OFFSET,
            SHARE, BN, BU,
        )  # fmt: skip
        sums = tl.dot(tile, vector, sums, input_precision="ieee")
        if GLU:
            tile = weight_tile(
                quants, records, factors, first + N, rows, at, inside, zero, x, U, BITS, KIND,
                OFFSET, SHARE, BN, BU,
            )  # fmt: skip
            up_sums = tl.dot(tile, vector, up_sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + first + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    y = rounded(sums, x)
    if GLU:
        if BIAS:
            offset = tl.load(bias + first + N + rows, mask=inside, other=0.0)
            up_sums += offset.to(tl.float32)[:, None]
        y = gated_activation(y, rounded(up_sums, x), x, ACTIVATION, LIMIT)
    else:
        y = activated(y, ACTIVATION)
    tl.store(
        inner + pair[None, :] * N + rows[:, None],
        y.to(inner.dtype.element_ty),
        mask=real[None, :] & inside[:, None],
    )


@triton.jit
def down_project(
    inner, quants, records, factors, bias, expert_out, pairs, blocks, total, N,
    F: tl.constexpr, U: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BU: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """expert_out [pairs, N] = down · inner, each pair by its expert. SIZE: columns of a unit."""
    wait(PDL)
    block = tl.program_id(0)
    if block >= tl.load(total):
        return
    expert, pair, real = _load_block(pairs, blocks, block, ROWS)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    inside, zero, first = rows < N, tl.minimum(N, 0), expert * N
    sums = tl.zeros((BN, ROWS), tl.float32)
    for at in tl.range(0, U, BU, num_stages=STAGES):
        cols = at * SIZE + tl.arange(0, BU * SIZE)
        mask = real[None, :] & (cols < F)[:, None]
        vector = tl.load(inner + pair[None, :] * F + cols[:, None], mask=mask, other=0.0)
        tile = weight_tile(
            quants, records, factors, first, rows, at, inside, zero, inner, U, BITS, KIND, OFFSET,
            SHARE, BN, BU,
        )  # fmt: skip
        sums = tl.dot(tile, vector, sums, input_precision="ieee")
    if BIAS:
        sums += tl.load(bias + first + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(
        expert_out + pair[None, :] * N + rows[:, None],
        sums.to(expert_out.dtype.element_ty),
        mask=real[None, :] & inside[:, None],
    )


@triton.jit
def combine(
    expert_out, gates, counts, out,
    D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum the outputs of a token's experts, weighted by their gates; reset `counts`."""
    wait(PDL)
    n = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros((BD,), tl.float32)
    for k in tl.static_range(K):
        expert_value = tl.load(expert_out + (n * K + k) * D + cols, mask=cols < D, other=0.0)
        total += expert_value.to(tl.float32) * rounded(tl.load(gates + n * K + k), out)
    tl.store(out + n * D + cols, total.to(out.dtype.element_ty), mask=cols < D)
    if tl.program_id(0) == 0 and tl.program_id(1) == 0:
        all_experts = tl.arange(0, EP)
        tl.store(counts + all_experts, tl.zeros((EP,), tl.int32), mask=all_experts < E)
