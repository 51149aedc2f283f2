"""Feed-forwards that a router chooses from, for any number of tokens, without asking the host.

A pair is a token and one of its chosen experts, numbered token * K + place. Pairs are arranged by
expert in blocks of ROWS, so that a program multiplies one block with one expert's matrix. How many
blocks there are only the device knows: the grid has room for the most, and the rest end at once.
Sums over columns have one order whatever the block holds.
"""

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import activated, rounded, wait


@triton.jit
def route(
    x, router, scores, N,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, SOME: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """How well experts fit tokens: scores [N, E] = x · routerᵀ."""
    wait(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.program_id(1) * SOME + tl.arange(0, SOME)
    sums = tl.zeros((ROWS, SOME), tl.float32)
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
    places = rows.to(tl.int64)[:, None] * E + experts[None, :]
    tl.store(scores + places, rounded(sums, x), mask=(rows < N)[:, None] & (experts < E)[None, :])


@triton.jit
def choose(
    scores, chosen, shares, counts,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The K likeliest experts of a token, what each has to say, and how often each was chosen."""
    wait(PDL)
    n = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, EP), tl.arange(0, KP)
    score = tl.load(scores + n * E + experts, mask=experts < E, other=-float("inf"))
    chances = tl.exp(score - tl.max(score, 0))
    chances = chances / tl.sum(chances, 0)
    left = tl.where(experts < E, chances, -1.0)
    picked = tl.zeros((KP,), tl.int32)
    share = tl.zeros((KP,), tl.float32)
    for k in tl.static_range(K):
        best = tl.max(left, 0)
        expert = tl.min(tl.where(left == best, experts, E - 1), 0)  # of equals the first
        picked = tl.where(places == k, expert, picked)
        share = tl.where(places == k, best, share)
        left = tl.where(experts == expert, -2.0, left)
        tl.atomic_add(counts + expert, 1)
    if NORMALIZE:
        share = share / tl.sum(share, 0)
    tl.store(chosen + n * K + places, picked, mask=places < K)
    tl.store(shares + n * K + places, share, mask=places < K)


@triton.jit
def arrange(
    chosen, counts, pairs, blocks, total, PAIRS,
    E: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One expert: its pairs, in order, into blocks of their own. `blocks`: each one's expert and
    how many of its rows are pairs."""
    wait(PDL)
    expert, every, part = tl.program_id(0), tl.arange(0, EP), tl.arange(0, BP)
    count = tl.load(counts + every, mask=every < E, other=0)
    needed = (count + ROWS - 1) // ROWS
    first = tl.sum(tl.where(every < expert, needed, 0), 0)
    own = tl.sum(tl.where(every == expert, count, 0), 0)
    if expert == 0:
        tl.store(total, tl.sum(needed, 0))
    for at in range(0, (own + ROWS - 1) // ROWS, BP):
        block = at + part
        there = block * ROWS < own
        tl.store(blocks + 2 * (first + block), expert, mask=there)
        tl.store(blocks + 2 * (first + block) + 1, tl.minimum(own - block * ROWS, ROWS), mask=there)
    before = 0
    for at in range(0, PAIRS, BP):
        pair = at + part
        ours = tl.load(chosen + pair, mask=pair < PAIRS, other=-1) == expert
        rank = before + tl.cumsum(ours.to(tl.int32), 0) - 1
        tl.store(pairs + first * ROWS + rank, pair, mask=ours)
        before += tl.sum(ours.to(tl.int32), 0)


@triton.jit
def _rows(pairs, blocks, block, ROWS: tl.constexpr):
    """A block's expert, its pairs, and which of its rows are some."""
    rows = tl.arange(0, ROWS)
    real = rows < tl.load(blocks + 2 * block + 1)
    pair = tl.load(pairs + block * ROWS + rows, mask=real, other=0)
    return tl.load(blocks + 2 * block).to(tl.int64), pair.to(tl.int64), real


@triton.jit
def _weight(matrix, rows, cols, N: tl.constexpr, D: tl.constexpr):
    """A tile of a matrix [N, D], turned: [cols, rows]."""
    return tl.load(
        matrix + rows[None, :] * D + cols[:, None],
        mask=(rows < N)[None, :] & (cols < D)[:, None],
        other=0.0,
    )


@triton.jit
def widen(
    x, gate_up, inner, pairs, blocks, total,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BF: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner [pairs, F] = activation(x · gateᵀ) * (x · upᵀ), each pair by its expert."""
    wait(PDL)
    block = tl.program_id(0)
    if block >= tl.load(total):
        return
    expert, pair, real = _rows(pairs, blocks, block, ROWS)
    columns = tl.program_id(1) * BF + tl.arange(0, BF)
    gate = gate_up + expert * 2 * F * D
    up = gate + F * D
    token = x + (pair // K)[:, None] * D
    gates = tl.zeros((ROWS, BF), tl.float32)
    ups = tl.zeros((ROWS, BF), tl.float32)
    for at in tl.range(0, D, BD, num_stages=STAGES):
        cols = at + tl.arange(0, BD)
        vector = tl.load(token + cols[None, :], mask=real[:, None] & (cols < D)[None, :], other=0.0)
        gates = tl.dot(vector, _weight(gate, columns, cols, F, D), gates, input_precision="ieee")
        ups = tl.dot(vector, _weight(up, columns, cols, F, D), ups, input_precision="ieee")
    bent = rounded(activated(rounded(gates, x), ACTIVATION), x) * rounded(ups, x)
    tl.store(
        inner + pair[:, None] * F + columns[None, :],
        bent.to(inner.dtype.element_ty),
        mask=real[:, None] & (columns < F)[None, :],
    )


@triton.jit
def narrow(
    inner, down, answers, pairs, blocks, total,
    D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, BF: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """answers [pairs, D] = inner · downᵀ, each pair by its expert."""
    wait(PDL)
    block = tl.program_id(0)
    if block >= tl.load(total):
        return
    expert, pair, real = _rows(pairs, blocks, block, ROWS)
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
        answers + pair[:, None] * D + columns[None, :],
        sums.to(answers.dtype.element_ty),
        mask=real[:, None] & (columns < D)[None, :],
    )


@triton.jit
def combine(
    answers, shares, counts, out,
    D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What a token's experts say, by their shares; and the counts are zero again."""
    wait(PDL)
    n = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BD + tl.arange(0, BD)
    said = tl.zeros((BD,), tl.float32)
    for k in tl.static_range(K):
        answer = tl.load(answers + (n * K + k) * D + cols, mask=cols < D, other=0.0)
        said += answer.to(tl.float32) * rounded(tl.load(shares + n * K + k), out)
    tl.store(out + n * D + cols, said.to(out.dtype.element_ty), mask=cols < D)
    if tl.program_id(0) == 0 and tl.program_id(1) == 0:
        every = tl.arange(0, EP)
        tl.store(counts + every, tl.zeros((EP,), tl.int32), mask=every < E)
