"""Recurrent layers over state slots: gated convolution, gated delta rule, Mamba-2.

A row of `projected` has the C inputs of the convolution (queries, keys and values, in the order of
the model), the gate of the norm, and the columns from which write gates and decays are computed. A
state slot holds the K - 1 past inputs of the convolution, [K - 1, C], and then a matrix
[DK, DV] per value head, all in float32.

Decode and exact steps run token by token (`recur_tokens`). A prompt is cut into chunks, and inside
a chunk all products are matrix products (`prepare_chunks`, `scan_chunks`). `chunks` [n, 5]: first
token, number of tokens, first token of the sequence, slot before the sequence, slot that receives
the state after the chunk or -1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.backends.cuda.kernels.common import activated, rounded, wait

CHUNK_COLUMNS = tl.constexpr(5)
KEY_EPS = tl.constexpr(1e-6)  # of the L2 norm of keys and queries
SOLVE_BLOCK = tl.constexpr(16)  # rows that `inverse_of` solves one by one
# Rows of `scales`, [4, VH, tokens]: write gate; factors of key and query rows that read the state
# before the chunk; factor of a key row that writes to the state after it.
WRITE, READ_KEY, READ_QUERY, WRITE_KEY = (tl.constexpr(n) for n in range(4))

# Tables of a step are slices of one buffer: no kernel is compiled for their alignment.
TABLES = ["starts", "reads", "writes", "captures", "chunks", "chunk_starts"]

# -- Functions of the kernels


@triton.jit
def softplus(x):
    """log(1 + e^x) in float32; the series keeps small results precise."""
    e = tl.exp(tl.minimum(x, 20.0))
    s = tl.minimum(e, 1.0)
    series = s * (1.0 - s * (0.5 - s * (0.3333333333333333 - s * (0.25 - s * 0.2))))
    return tl.where(x > 20.0, x, tl.where(e < 0.015625, series, tl.log(1.0 + e)))


@triton.jit
def key_head_of(h, VH: tl.constexpr, KH: tl.constexpr, TILED: tl.constexpr):
    """Key head that value head `h` uses."""
    if TILED:
        return h % KH
    else:
        return h // (VH // KH)


@triton.jit
def write_gate_and_log_decay(gates, inside, rate, dt_bias, VH: tl.constexpr, DELTA: tl.constexpr):
    """Write gate of tokens in one head, and the logarithm of the decay before them.

    `gates` points to the head's first gate column: delta rule: b, and VH columns later a;
    Mamba-2: dt.
    """
    first = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        second = tl.load(gates + VH, mask=inside, other=0.0).to(tl.float32)
        return 1.0 / (1.0 + tl.exp(-first)), rate * softplus(second + dt_bias)
    else:
        step = softplus(first + dt_bias)
        return step, rate * step


@triton.jit
def conv_input(row, channels, inside, C: tl.constexpr, GATED: tl.constexpr):
    """Inputs of the convolution from rows of `projected`; GATED: columns are b, c and x, and the
    input is b * x."""
    x = tl.load(row + channels, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        x *= tl.load(row + 2 * C + channels, mask=inside, other=0.0).to(tl.float32)
        x = rounded(x, row)
    return x


@triton.jit
def conv_input_at(
    projected, past, token, first, channels, inside, has_past,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Inputs of the convolution at `token`, which may be before the `first` of the sequence:
    then from the `past` inputs in its state."""
    is_new = token >= first
    row = projected + tl.maximum(token, 0).to(tl.int64) * WIDTH
    x = conv_input(row, channels, inside & is_new, C, GATED)
    old = past + (token - first + K - 1) * C + channels
    before = tl.load(old, mask=inside & has_past & (token < first), other=0.0)
    return tl.where(is_new, x, before)


@triton.jit
def load_taps(weight, channels, inside, C: tl.constexpr, K: tl.constexpr):
    """Weights of the convolution: K vectors."""
    taps = ()
    for tap in tl.static_range(K):
        taps += (tl.load(weight + tap * C + channels, mask=inside, other=0.0),)
    return taps


@triton.jit
def load_inputs_before(
    projected, past, end, first, channels, inside, has_past,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The K - 1 inputs of the convolution before token `end`."""
    inputs = ()
    for i in tl.static_range(K - 1):
        inputs += (
            conv_input_at(
                projected, past, end - (K - 1) + i, first, channels, inside, has_past,
                C, K, WIDTH, GATED,
            ),
        )  # fmt: skip
    return inputs


@triton.jit
def load_past(past, channels, inside, C: tl.constexpr, K: tl.constexpr):
    """The K - 1 past inputs of the convolution in a state."""
    inputs = ()
    for i in tl.static_range(K - 1):
        inputs += (tl.load(past + i * C + channels, mask=inside, other=0.0),)
    return inputs


@triton.jit
def store_inputs(target, inputs, channels, inside, C: tl.constexpr, K: tl.constexpr):
    for i in tl.static_range(K - 1):
        tl.store(target + i * C + channels, inputs[i], mask=inside)


@triton.jit
def load_bias(bias, channels, inside, BIAS: tl.constexpr):
    """Bias of the convolution; zeros if it has none."""
    if BIAS:
        return tl.load(bias + channels, mask=inside, other=0.0)
    else:
        return channels.to(tl.float32) * 0.0


@triton.jit
def convolve_inputs(inputs, x, taps, shift, K: tl.constexpr):
    """Output of the convolution at a token with input `x`, before the activation; and the K - 1
    inputs before the next token."""
    total = tl.zeros_like(x)
    for i in tl.static_range(K - 1):
        total += inputs[i] * taps[i]
    next_inputs = ()
    for i in tl.static_range(1, K - 1):
        next_inputs += (inputs[i],)
    return total + x * taps[K - 1] + shift, next_inputs + (x,)  # noqa: RUF005


@triton.jit
def store_conv_states(
    n, channels, projected, states, starts, reads, writes, captures, chunks, chunk_starts,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, FLOATS: tl.constexpr,
    GATED: tl.constexpr, CHUNKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the past inputs of the convolution for sequence `n`: after its captured tokens, and
    after its last. CHUNKED: captured tokens are at the end of chunks."""
    first, end = tl.load(starts + n), tl.load(starts + n + 1)
    slot, last_slot = tl.load(reads + n).to(tl.int64), tl.load(writes + n).to(tl.int64)
    wait(PDL)
    if first < end:
        inside, has_past = channels < C, slot >= 0
        past = states + tl.maximum(slot, 0) * FLOATS
        last_inputs = load_inputs_before(
            projected, past, end, first, channels, inside, has_past, C, K, WIDTH, GATED
        )
        if CHUNKED:
            segment, end_segment = tl.load(chunk_starts + n), tl.load(chunk_starts + n + 1)
        else:
            segment, end_segment = first, end
        for step in range(end_segment - segment):
            number = segment + step
            if CHUNKED:
                row = chunks + number * CHUNK_COLUMNS
                target, segment_end = tl.load(row + 4), tl.load(row) + tl.load(row + 1)
            else:
                target, segment_end = tl.load(captures + number), number + 1
            if target >= 0:
                inputs = load_inputs_before(
                    projected, past, segment_end, first, channels, inside, has_past,
                    C, K, WIDTH, GATED,
                )  # fmt: skip
                captured = states + target.to(tl.int64) * FLOATS
                store_inputs(captured, inputs, channels, inside, C, K)
        tl.debug_barrier()  # all threads have read before the past inputs are overwritten
        store_inputs(states + last_slot * FLOATS, last_inputs, channels, inside, C, K)


# -- Token by token


@triton.jit(do_not_specialize_on_alignment=TABLES)
def recur_tokens(
    projected, mixed, states, weight, bias, rate, dt_bias, skip, starts, reads, writes, captures,
    stats, norms, STATS_HEADS,
    DELTA: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    FLOATS: tl.constexpr, VH: tl.constexpr, KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    TILED: tl.constexpr, BIAS: tl.constexpr, BV: tl.constexpr, STATS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Convolution and recurrence of one sequence, value head and block of BV value columns.

    Writes `mixed` [tokens, VH * DV] in float32 and the matrices of the state; `finish` stores the
    inputs of the convolution, since other programs read them here.

    The state is loaded before the PDL wait: an earlier step wrote it, and kernels that wait have
    run since.

    STATS: also write gate and decay to `stats` [tokens, 3, STATS_HEADS], and the squared norm of
    this block of the new matrix to `norms` [tokens, VH, blocks].
    """
    n, h, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(starts + n), tl.load(starts + n + 1)
    slot = tl.load(reads + n).to(tl.int64)
    has_past = slot >= 0
    past = states + tl.maximum(slot, 0) * FLOATS
    i, j = tl.arange(0, DKP), block * BV + tl.arange(0, BV)
    in_key, in_value = i < DK, j < DV
    inside = in_key[:, None] & in_value[None, :]
    at = (K - 1) * C + h * DK * DV + i[:, None] * DV + j[None, :]
    has_matrix = has_past & (first < end)
    matrix = tl.load(past + at, mask=inside & has_matrix, other=0.0)
    key_head = key_head_of(h, VH, KH, TILED)
    q_channels, k_channels = Q_AT + key_head * DK + i, K_AT + key_head * DK + i
    v_channels = V_AT + h * DV + j
    q_taps = load_taps(weight, q_channels, in_key, C, K)
    k_taps = load_taps(weight, k_channels, in_key, C, K)
    v_taps = load_taps(weight, v_channels, in_value, C, K)
    q_shift = load_bias(bias, q_channels, in_key, BIAS)
    k_shift = load_bias(bias, k_channels, in_key, BIAS)
    v_shift = load_bias(bias, v_channels, in_value, BIAS)
    head_rate, head_bias = tl.load(rate + h), tl.load(dt_bias + h)
    head_skip = tl.load(skip + h) if not DELTA else 0.0
    last_slot = tl.load(writes + n).to(tl.int64)
    q_inputs = load_past(past, q_channels, in_key & has_matrix, C, K)
    k_inputs = load_past(past, k_channels, in_key & has_matrix, C, K)
    v_inputs = load_past(past, v_channels, in_value & has_matrix, C, K)
    wait(PDL)
    for step in range(end - first):
        token = first + step
        row = projected + token.to(tl.int64) * WIDTH
        target = tl.load(captures + token).to(tl.int64)
        query = conv_input(row, q_channels, in_key, C, False)
        key = conv_input(row, k_channels, in_key, C, False)
        value = conv_input(row, v_channels, in_value, C, False)
        query, q_inputs = convolve_inputs(q_inputs, query, q_taps, q_shift, K)
        key, k_inputs = convolve_inputs(k_inputs, key, k_taps, k_shift, K)
        value, v_inputs = convolve_inputs(v_inputs, value, v_taps, v_shift, K)
        query, key, value = activated(query, 1), activated(key, 1), activated(value, 1)
        gate, log_decay = write_gate_and_log_decay(
            row + C + VH * DV + h, token >= first, head_rate, head_bias, VH, DELTA
        )
        decay = tl.exp(log_decay)
        # All sums over keys are of the old matrix, so that none waits for another; joined, they
        # share the exchange between warps.
        if DELTA:
            products = tl.join(tl.join(query * query, key * key), tl.join(query * key, query * key))
            squares, overlaps = tl.split(tl.sum(products, 0))
            query_square, key_square = tl.split(squares)
            overlap, _ = tl.split(overlaps)
            query_scale = tl.rsqrt(query_square + KEY_EPS) * DK**-0.5
            key_scale = tl.rsqrt(key_square + KEY_EPS)
            sums = tl.sum(tl.join(matrix * query[:, None], matrix * key[:, None]), 0)
            from_past, predicted = tl.split(sums)
            written = (value - predicted * (decay * key_scale)) * gate
            result = (from_past * decay + written * (overlap * key_scale)) * query_scale
            update = written * key_scale
        else:
            from_past = tl.sum(matrix * query[:, None], 0)
            written = value * gate
            result = from_past * decay + written * tl.sum(query * key, 0)
            update = written
        matrix = matrix * decay + key[:, None] * update[None, :]
        if not DELTA:
            result += head_skip * value
        tl.store(mixed + token.to(tl.int64) * VH * DV + h * DV + j, result, mask=in_value)
        if STATS:
            row_stats = stats + token.to(tl.int64) * 3 * STATS_HEADS + h
            if block == 0:
                tl.store(row_stats, gate)
                tl.store(row_stats + STATS_HEADS, decay)
            square = tl.sum(tl.sum(matrix * matrix, 1), 0)
            blocks = tl.num_programs(2)
            tl.store(norms + (token.to(tl.int64) * VH + h) * blocks + block, square)
        if target >= 0:
            tl.store(states + target * FLOATS + at, matrix, mask=inside)
    if first < end:
        tl.debug_barrier()  # all threads have read before the matrix is overwritten
        tl.store(states + last_slot * FLOATS + at, matrix, mask=inside)


@triton.jit(do_not_specialize=["tokens", "num_rows"], do_not_specialize_on_alignment=TABLES)
def finish(
    projected, mixed, out, gain, states, starts, reads, writes, captures, chunks, chunk_starts,
    eps, tokens, num_rows,
    DELTA: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr,
    FLOATS: tl.constexpr, VD: tl.constexpr, GROUPS: tl.constexpr, GW: tl.constexpr,
    GWP: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr, CHUNKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Gated RMSNorm of `mixed`, and the past inputs of the convolution in the states.

    The first programs normalize ROWS of the GROUPS of a token, GW columns each. The others store
    BC channels of a sequence's past inputs, which `recur_tokens` has read by now.
    """
    BLOCKS: tl.constexpr = (GROUPS + ROWS - 1) // ROWS
    program = tl.program_id(0)
    if program < tokens * BLOCKS:
        token = program // BLOCKS
        group = (program % BLOCKS) * ROWS + tl.arange(0, ROWS)[:, None]
        in_group = tl.arange(0, GWP)[None, :]
        inside = (group < GROUPS) & (in_group < GW)
        cols = group * GW + in_group
        factor = tl.load(gain + (in_group if DELTA else cols), mask=inside, other=0.0)
        end = tl.load(starts + num_rows)
        wait(PDL)
        if token < end:
            x = tl.load(mixed + token.to(tl.int64) * VD + cols, mask=inside, other=0.0)
            gates = projected + token.to(tl.int64) * WIDTH + C
            z = tl.load(gates + cols, mask=inside, other=0.0).to(tl.float32)
            gate = activated(z, 1)
            if not DELTA:
                x *= gate
            x = x * tl.rsqrt(tl.sum(x * x, 1) / GW + eps)[:, None] * factor
            if DELTA:
                x *= gate
            result = x.to(out.dtype.element_ty)
            tl.store(out + token.to(tl.int64) * VD + cols, result, mask=inside)
    else:
        CONV_BLOCKS: tl.constexpr = (C + BC - 1) // BC
        program -= tokens * BLOCKS
        store_conv_states(
            program // CONV_BLOCKS, (program % CONV_BLOCKS) * BC + tl.arange(0, BC), projected,
            states, starts, reads, writes, captures, chunks, chunk_starts, C, K, WIDTH, FLOATS,
            False, CHUNKED, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=TABLES)
def short_conv(
    projected, out, states, weight, bias, starts, reads, writes, captures,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, FLOATS: tl.constexpr,
    BIAS: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gated convolution of one sequence and BC channels, token by token, and its states."""
    n, channels = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channels < C
    first, end = tl.load(starts + n), tl.load(starts + n + 1)
    slot = tl.load(reads + n).to(tl.int64)
    has_past = slot >= 0
    past = states + tl.maximum(slot, 0) * FLOATS
    taps = load_taps(weight, channels, inside, C, K)
    shift = load_bias(bias, channels, inside, BIAS)
    inputs = load_past(past, channels, inside & has_past & (first < end), C, K)
    wait(PDL)
    for step in range(end - first):
        token = first + step
        row = projected + token.to(tl.int64) * WIDTH
        x = conv_input(row, channels, inside, C, True)
        total, inputs = convolve_inputs(inputs, x, taps, shift, K)
        gate = tl.load(row + C + channels, mask=inside, other=0.0).to(tl.float32)
        result = (gate * rounded(total, out)).to(out.dtype.element_ty)
        tl.store(out + token.to(tl.int64) * C + channels, result, mask=inside)
        target = tl.load(captures + token).to(tl.int64)
        if target >= 0:
            store_inputs(states + target * FLOATS, inputs, channels, inside, C, K)
    if first < end:
        tl.debug_barrier()
        last = states + tl.load(writes + n).to(tl.int64) * FLOATS
        store_inputs(last, inputs, channels, inside, C, K)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def short_conv_stats(
    projected, states, starts, reads, stats, STATS_HEADS,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, FLOATS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Per token of one sequence: root mean square of the gate, 0, norm of the past inputs."""
    n = tl.program_id(0)
    first, end = tl.load(starts + n), tl.load(starts + n + 1)
    slot = tl.load(reads + n).to(tl.int64)
    past = states + tl.maximum(slot, 0) * FLOATS
    for step in range(end - first):
        token = first + step
        gate_squares, input_squares = tl.zeros((BC,), tl.float32), tl.zeros((BC,), tl.float32)
        for start in range(0, C, BC):
            channels = start + tl.arange(0, BC)
            inside = channels < C
            gates = projected + token.to(tl.int64) * WIDTH + C
            gate = tl.load(gates + channels, mask=inside, other=0.0).to(tl.float32)
            gate_squares += gate * gate
            for i in range(K - 1):
                x = conv_input_at(
                    projected, past, token + 2 - K + i, first, channels, inside, slot >= 0,
                    C, K, WIDTH, True,
                )  # fmt: skip
                input_squares += x * x
        row_stats = stats + token.to(tl.int64) * 3 * STATS_HEADS
        tl.store(row_stats, tl.sqrt(tl.sum(gate_squares, 0) / C))
        tl.store(row_stats + STATS_HEADS, 0.0)
        tl.store(row_stats + 2 * STATS_HEADS, tl.sqrt(tl.sum(input_squares, 0)))


# -- Prompts, in chunks of tokens


@triton.jit(do_not_specialize_on_alignment=TABLES)
def convolve(
    projected, convolved, states, weight, bias, chunks,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, FLOATS: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Convolution of one chunk and BC channels: convolved [tokens, C], after SiLU; or GATED: the
    output of a short convolution."""
    task, rows = chunks + tl.program_id(0) * CHUNK_COLUMNS, tl.arange(0, CHUNK)
    channels = (tl.program_id(1) * BC + tl.arange(0, BC))[None, :]
    token = (tl.load(task) + rows)[:, None]
    first, slot = tl.load(task + 2), tl.load(task + 3).to(tl.int64)
    past = states + tl.maximum(slot, 0) * FLOATS
    inside = (rows < tl.load(task + 1))[:, None] & (channels < C)
    total = tl.zeros((CHUNK, BC), tl.float32)
    for tap in tl.static_range(K):
        x = conv_input_at(
            projected, past, token - (K - 1) + tap, first, channels, inside, slot >= 0,
            C, K, WIDTH, GATED,
        )  # fmt: skip
        total += x * tl.load(weight + tap * C + channels, mask=channels < C, other=0.0)
    total += load_bias(bias, channels, channels < C, BIAS)
    if GATED:
        gates = projected + token.to(tl.int64) * WIDTH + C
        gate = tl.load(gates + channels, mask=inside, other=0.0).to(tl.float32)
        total = gate * rounded(total, convolved)
    else:
        total = activated(total, 1)
    result = total.to(convolved.dtype.element_ty)
    tl.store(convolved + token.to(tl.int64) * C + channels, result, mask=inside)


@triton.jit(do_not_specialize_on_alignment=TABLES)
def store_conv(
    projected, states, starts, reads, writes, chunks, chunk_starts,
    C: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, FLOATS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Store the states of a short convolution, after `convolve`."""
    store_conv_states(
        tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC), projected, states, starts,
        reads, writes, chunks, chunks, chunk_starts, C, K, WIDTH, FLOATS, True, True, False,
    )  # fmt: skip


@triton.jit
def as_operand(x, target):
    """Operand of a matrix product: bfloat16 where the model has it. Otherwise float32, since
    values of a state may exceed the range of float16."""
    if target.dtype.element_ty == tl.bfloat16:
        return x.to(tl.bfloat16)
    else:
        return x.to(tl.float32)


@triton.jit
def inverse_of(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of I + `lower`, which is strictly lower triangular, by forward substitution: row by
    row inside of the diagonal blocks, then block by block."""
    BLOCKS: tl.constexpr = CHUNK // SOLVE_BLOCK
    r = tl.arange(0, SOLVE_BLOCK)
    numbers = tl.arange(0, BLOCKS)
    is_diagonal = numbers[:, None, None, None] == numbers[None, None, :, None]
    blocks = tl.reshape(lower, (BLOCKS, SOLVE_BLOCK, BLOCKS, SOLVE_BLOCK))
    diagonal = tl.sum(tl.where(is_diagonal, blocks, 0.0), 2)
    transposed = tl.permute(diagonal, (0, 2, 1))
    identity = tl.where(r[None, :, None] == r[None, None, :], 1.0, 0.0)
    solved = tl.zeros((BLOCKS, SOLVE_BLOCK, SOLVE_BLOCK), tl.float32) + identity
    for n in range(1, SOLVE_BLOCK):
        row = tl.sum(tl.where(r[None, None, :] == n, transposed, 0.0), 2)
        earlier = tl.sum(row[:, :, None] * solved, 1)
        solved = tl.where(r[None, :, None] == n, solved - earlier[:, None, :], solved)
    expanded = tl.broadcast_to(solved[:, :, None, :], (BLOCKS, SOLVE_BLOCK, BLOCKS, SOLVE_BLOCK))
    inverse = tl.reshape(tl.where(is_diagonal, expanded, 0.0), (CHUNK, CHUNK))
    block = tl.arange(0, CHUNK) // SOLVE_BLOCK
    below = tl.where(block[:, None] > block[None, :], lower, 0.0)
    coupling = tl.dot(inverse, below, input_precision=PRECISION)
    for n in tl.static_range(1, BLOCKS):
        update = tl.dot(coupling, inverse, input_precision=PRECISION)
        inverse = tl.where((block == n)[:, None], inverse - update, inverse)
    return inverse


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=TABLES)
def prepare_chunks(
    projected, convolved, rate, dt_bias, chunks, inverses, overlaps, scales, decays, tokens,
    DELTA: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, VH: tl.constexpr, KH: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr,
    TILED: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk and value head needs besides the state before it.

    Token t of the delta rule writes w_t = beta_t (v_t - k_t S_t), where S_t includes what earlier
    tokens of the chunk wrote: a triangular system, whose inverse goes to `inverses`
    [chunks, VH, CHUNK, CHUNK]. `overlaps`, of the same shape: queries times earlier keys, with
    decay. `decays` [chunks, VH]: decay of the state over the chunk. See WRITE for `scales`.
    """
    chunk, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    task, rows, i = chunks + chunk * CHUNK_COLUMNS, tl.arange(0, CHUNK), tl.arange(0, DKP)
    is_token = rows < tl.load(task + 1)
    token = (tl.load(task) + rows).to(tl.int64)
    gates = projected + token * WIDTH + C + VH * DV + h
    gate, log_decay = write_gate_and_log_decay(
        gates, is_token, tl.load(rate + h), tl.load(dt_bias + h), VH, DELTA
    )
    gate = tl.where(is_token, gate, 0.0)
    total = tl.cumsum(tl.where(is_token, log_decay, 0.0), 0)
    last = tl.sum(tl.where(rows == CHUNK - 1, total, 0.0), 0)
    inside = is_token[:, None] & (i < DK)[None, :]
    heads = convolved + (token * C + key_head_of(h, VH, KH, TILED) * DK)[:, None] + i[None, :]
    query = tl.load(heads + Q_AT, mask=inside, other=0.0)
    key = tl.load(heads + K_AT, mask=inside, other=0.0)
    query_scale, key_scale = tl.full((CHUNK,), 1.0, tl.float32), tl.full((CHUNK,), 1.0, tl.float32)
    if DELTA:
        wide = query.to(tl.float32)
        query_scale = tl.rsqrt(tl.sum(wide * wide, 1) + KEY_EPS) * DK**-0.5
        wide = key.to(tl.float32)
        key_scale = tl.rsqrt(tl.sum(wide * wide, 1) + KEY_EPS)
    query, key = as_operand(query, convolved), as_operand(key, convolved)
    is_earlier = rows[:, None] >= rows[None, :]
    between = tl.exp(tl.where(is_earlier, total[:, None] - total[None, :], 0.0))
    between = tl.where(is_earlier, between * key_scale[None, :], 0.0)
    square = (chunk * VH + h) * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
    overlap = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    overlap = overlap * between * query_scale[:, None]
    tl.store(overlaps + square, overlap.to(overlaps.dtype.element_ty))
    if DELTA:
        lower = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        lower = lower * between * (key_scale * gate)[:, None]
        lower = tl.where(rows[:, None] > rows[None, :], lower, 0.0)
        inverse = inverse_of(lower, CHUNK, PRECISION)
        tl.store(inverses + square, inverse.to(inverses.dtype.element_ty))
    before = tl.exp(total)
    vectors = scales + h * tokens.to(tl.int64) + token
    SIZE = VH * tokens.to(tl.int64)
    tl.store(vectors + WRITE * SIZE, gate, mask=is_token)
    tl.store(vectors + READ_KEY * SIZE, gate * before * key_scale, mask=is_token)
    tl.store(vectors + READ_QUERY * SIZE, before * query_scale, mask=is_token)
    tl.store(vectors + WRITE_KEY * SIZE, tl.exp(last - total) * key_scale, mask=is_token)
    tl.store(decays + chunk * VH + h, tl.exp(last))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=TABLES)
def scan_chunks(
    convolved, mixed, states, skip, reads, writes, chunks, chunk_starts, inverses, overlaps, scales,
    decays, tokens,
    DELTA: tl.constexpr, C: tl.constexpr, K: tl.constexpr, FLOATS: tl.constexpr, VH: tl.constexpr,
    KH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, Q_AT: tl.constexpr,
    K_AT: tl.constexpr, V_AT: tl.constexpr, TILED: tl.constexpr, BV: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Recurrence of one sequence, value head and block of BV value columns, chunk by chunk: the
    same results as `recur_tokens`, up to rounding."""
    n, h, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_chunk, end_chunk = tl.load(chunk_starts + n), tl.load(chunk_starts + n + 1)
    slot = tl.load(reads + n).to(tl.int64)
    rows, i, j = tl.arange(0, CHUNK), tl.arange(0, DKP), block * BV + tl.arange(0, BV)
    in_key, in_value = i < DK, j < DV
    inside = in_key[:, None] & in_value[None, :]
    at = (K - 1) * C + h * DK * DV + i[:, None] * DV + j[None, :]
    past = states + tl.maximum(slot, 0) * FLOATS
    matrix = tl.load(past + at, mask=inside & (slot >= 0) & (first_chunk < end_chunk), other=0.0)
    head = convolved + key_head_of(h, VH, KH, TILED) * DK
    head_skip = tl.load(skip + h) if not DELTA else 0.0
    SIZE = VH * tokens.to(tl.int64)
    for step in tl.range(0, end_chunk - first_chunk, num_stages=STAGES):
        chunk = first_chunk + step
        task = chunks + chunk * CHUNK_COLUMNS
        is_token = rows < tl.load(task + 1)
        token = (tl.load(task) + rows).to(tl.int64)
        in_head = is_token[:, None] & in_key[None, :]
        in_block = is_token[:, None] & in_value[None, :]
        key = tl.load(head + (token * C)[:, None] + K_AT + i[None, :], mask=in_head, other=0.0)
        query = tl.load(head + (token * C)[:, None] + Q_AT + i[None, :], mask=in_head, other=0.0)
        values = convolved + (token * C)[:, None] + V_AT + h * DV + j[None, :]
        value = tl.load(values, mask=in_block, other=0.0).to(tl.float32)
        vectors = scales + h * tokens.to(tl.int64) + token
        gate = tl.load(vectors + WRITE * SIZE, mask=is_token, other=0.0)
        read_query = tl.load(vectors + READ_QUERY * SIZE, mask=is_token, other=0.0)
        write_key = tl.load(vectors + WRITE_KEY * SIZE, mask=is_token, other=0.0)
        head_chunk = chunk.to(tl.int64) * VH + h
        square = head_chunk * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
        key, query = as_operand(key, convolved), as_operand(query, convolved)
        operand = as_operand(matrix, convolved)
        written = value * gate[:, None]
        if DELTA:
            read_key = tl.load(vectors + READ_KEY * SIZE, mask=is_token, other=0.0)
            predicted = tl.dot(key, operand, input_precision=PRECISION)
            error = as_operand(written - predicted * read_key[:, None], convolved)
            written = tl.dot(tl.load(inverses + square), error, input_precision=PRECISION)
        result = tl.dot(query, operand, input_precision=PRECISION) * read_query[:, None]
        overlap = tl.load(overlaps + square)
        result = tl.dot(overlap, as_operand(written, convolved), result, input_precision=PRECISION)
        if not DELTA:
            result += head_skip * value
        outputs = mixed + (token * VH * DV + h * DV)[:, None] + j[None, :]
        tl.store(outputs, result, mask=in_block)
        update = as_operand(written * write_key[:, None], convolved)
        matrix = matrix * tl.load(decays + head_chunk)
        matrix = tl.dot(tl.trans(key), update, matrix, input_precision=PRECISION)
        target = tl.load(task + 4).to(tl.int64)
        if target >= 0:
            tl.store(states + target * FLOATS + at, matrix, mask=inside)
    if first_chunk < end_chunk:
        tl.debug_barrier()
        last = states + tl.load(writes + n).to(tl.int64) * FLOATS
        tl.store(last + at, matrix, mask=inside)
