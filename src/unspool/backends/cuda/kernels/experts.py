"""Mixture of experts for any number of tokens, without synchronizing with the host.

A pair is a token and one of its K selected experts, numbered token * K + rank. Pairs are grouped by
expert in blocks of ROWS, so that a program multiplies one block with one expert's matrix. The
number of blocks is known on the device only: the grid has the maximum, and surplus programs return
immediately. Sums over columns have a fixed order.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import activated, rounded, wait


@triton.jit
def route(
    x, router, scores, N,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Router logits: scores [N, E] = x · routerᵀ."""
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
    ranks = rows.to(tl.int64)[:, None] * E + experts[None, :]
    tl.store(scores + ranks, rounded(sums, x), mask=(rows < N)[:, None] & (experts < E)[None, :])


@triton.jit
def select_experts(
    scores, expert_ids, gates, counts,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Top-K experts of a token and their gates; counts the tokens of each expert."""
    wait(PDL)
    n = tl.program_id(0).to(tl.int64)
    experts, ranks = tl.arange(0, EP), tl.arange(0, KP)
    score = tl.load(scores + n * E + experts, mask=experts < E, other=-float("inf"))
    probs = tl.exp(score - tl.max(score, 0))
    probs = probs / tl.sum(probs, 0)
    candidates = tl.where(experts < E, probs, -1.0)
    selected = tl.zeros((KP,), tl.int32)
    gate = tl.zeros((KP,), tl.float32)
    for k in tl.static_range(K):
        best = tl.max(candidates, 0)
        expert = tl.min(tl.where(candidates == best, experts, E - 1), 0)  # ties: the first
        selected = tl.where(ranks == k, expert, selected)
        gate = tl.where(ranks == k, best, gate)
        candidates = tl.where(experts == expert, -2.0, candidates)
        tl.atomic_add(counts + expert, 1)
    if NORMALIZE:
        gate = gate / tl.sum(gate, 0)
    tl.store(expert_ids + n * K + ranks, selected, mask=ranks < K)
    tl.store(gates + n * K + ranks, gate, mask=ranks < K)


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
def _weight(matrix, rows, cols, N: tl.constexpr, D: tl.constexpr):
    """Transposed tile [cols, rows] of a matrix [N, D]."""
    return tl.load(
        matrix + rows[None, :] * D + cols[:, None],
        mask=(rows < N)[None, :] & (cols < D)[:, None],
        other=0.0,
    )


@triton.jit
def up_project(
    x, gate_up, inner, pairs, blocks, total,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner [pairs, F] = activation(x · gateᵀ) * (x · upᵀ), each pair by its expert."""
    wait(PDL)
    block = tl.program_id(0)
    if block >= tl.load(total):
        return
    expert, pair, real = _load_block(pairs, blocks, block, ROWS)
    columns = tl.program_id(1) * BF + tl.arange(0, BF)
    gate = gate_up + expert * 2 * F * D
    up = gate + F * D
    token = x + (pair // K)[:, None] * D
    gate_sums = tl.zeros((ROWS, BF), tl.float32)
    up_sums = tl.zeros((ROWS, BF), tl.float32)
    for at in tl.range(0, D, BD, num_stages=STAGES):
        cols = at + tl.arange(0, BD)
        vector = tl.load(token + cols[None, :], mask=real[:, None] & (cols < D)[None, :], other=0.0)
        gate_sums = tl.dot(
            vector, _weight(gate, columns, cols, F, D), gate_sums, input_precision="ieee"
        )
        up_sums = tl.dot(vector, _weight(up, columns, cols, F, D), up_sums, input_precision="ieee")
    activated_gate = rounded(activated(rounded(gate_sums, x), ACTIVATION), x) * rounded(up_sums, x)
    tl.store(
        inner + pair[:, None] * F + columns[None, :],
        activated_gate.to(inner.dtype.element_ty),
        mask=real[:, None] & (columns < F)[None, :],
    )


@triton.jit
def down_project(
    inner, down, expert_out, pairs, blocks, total,
    D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """answers [pairs, D] = inner · downᵀ, each pair by its expert."""
    wait(PDL)
    block = tl.program_id(0)
    if block >= tl.load(total):
        return
    expert, pair, real = _load_block(pairs, blocks, block, ROWS)
    columns = tl.program_id(1) * BD + tl.arange(0, BD)
    matrix = down + expert * D * F
    sums = tl.zeros((ROWS, BD), tl.float32)
    for at in tl.range(0, F, BF, num_stages=STAGES):
        cols = at + tl.arange(0, BF)
        vector = tl.load(
            inner + pair[:, None] * F + cols[None, :],
            mask=real[:, None] & (cols < F)[None, :],
            other=0.0,
        )
        sums = tl.dot(vector, _weight(matrix, columns, cols, D, F), sums, input_precision="ieee")
    tl.store(
        expert_out + pair[:, None] * D + columns[None, :],
        sums.to(expert_out.dtype.element_ty),
        mask=real[:, None] & (columns < D)[None, :],
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
