"""Recurrent layers: parameters of a layer, state slots, and the launches of their kernels.

A step without chunk tables (decode) neither allocates nor synchronizes if it gets a
`RecurrentScratch`, so it can be captured in a graph. Prompts run in chunks of tokens, unless the
step is exact or observed: then matrix states are updated token by token too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda.kernels import recurrent as kernels
from unspool.backends.cuda.step_io import to_device
from unspool.backends.step import Ints
from unspool.model.config import ModelConfig, Recurrence

# Token by token: value columns and warps of a program, by the largest number of sequences; the
# fastest measured. Exact results depend on both.
TOKEN_TILES = {4: (16, 1), 63: (32, 1), 1 << 30: (64, 2)}
EXACT_TILE = (32, 4)
NORM_COLUMNS, NORM_WARPS = 1024, 4  # gated norm: columns of a program, at least one group
CONV_CHANNELS, CONV_WARPS = 512, 4  # channels of a program that stores past inputs

# Chunks of prompts: tokens, and the tiles of the kernels.
CHUNK = 64
CONVOLVE_CHANNELS, CONVOLVE_WARPS = 64, 4
PREPARE_WARPS, PREPARE_STAGES = 4, 1
SCAN_BLOCK, SCAN_WARPS, SCAN_STAGES = 16, 4, 3
# In float32, without tensor cores: operands are in registers, which suffice for smaller chunks.
FLOAT_CHUNK, FLOAT_WARPS, FLOAT_STAGES = 32, 8, 1


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentLayer:
    """Parameters of one recurrent layer."""

    kind: str  # "conv", "delta" or "mamba2"
    recurrence: Recurrence
    channels: int  # of the convolution
    conv_weight: Tensor  # [kernel, channels], float32, as all parameters
    conv_bias: Tensor | None  # [channels]
    rate: Tensor | None  # [value_heads]: -exp(a_log)
    dt_bias: Tensor | None  # [value_heads]
    skip: Tensor | None  # [value_heads]: Mamba-2's d
    norm_gain: Tensor | None  # [value_width] (delta) or [value_dim] (mamba2)
    eps: float
    # [slots, floats] in float32: the past inputs of the convolution [kernel - 1, channels], then
    # the matrices [value_heads, key_width, value_width].
    states: Tensor

    @property
    def projected_width(self) -> int:
        """Columns of the fused input projection."""
        if self.kind == "conv":
            return 3 * self.channels
        shape = self.recurrence
        return self.channels + shape.value_dim + shape.value_heads * (1 + (self.kind == "delta"))

    @property
    def out_width(self) -> int:
        """Columns of the input of the output projection."""
        return self.channels if self.kind == "conv" else self.recurrence.value_dim

    @property
    def conv_constants(self) -> dict[str, Any]:
        """Compile-time constants of the convolution and its past inputs."""
        return {
            "C": self.channels,
            "K": self.recurrence.conv_kernel,
            "WIDTH": self.projected_width,
            "FLOATS": int(self.states.shape[1]),
        }

    @property
    def head_constants(self) -> dict[str, Any]:
        """Compile-time constants of the heads, except the column of the values."""
        shape, is_delta = self.recurrence, self.kind == "delta"
        return {
            "DELTA": is_delta,
            "VH": shape.value_heads,
            "KH": shape.key_heads,
            "DK": shape.key_width,
            "DV": shape.value_width,
            "DKP": _power_of_two(shape.key_width, 16),
            "Q_AT": 0 if is_delta else shape.value_dim + shape.key_dim,
            "K_AT": shape.key_dim if is_delta else shape.value_dim,
            "TILED": shape.tiled,
        }

    @property
    def value_column(self) -> int:
        """First column of the values in `projected`."""
        return 2 * self.recurrence.key_dim if self.kind == "delta" else 0

    @property
    def norm_groups(self) -> int:
        """Number of groups of the gated norm."""
        shape = self.recurrence
        return shape.value_heads if self.kind == "delta" else shape.norm_groups


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentScratch:
    """Outputs of the recurrence before the gated norm; all layers share it."""

    mixed: Tensor  # float32

    @classmethod
    def for_tokens(
        cls, tokens: int, config: ModelConfig | RecurrentLayer, device: torch.device
    ) -> RecurrentScratch:
        """Allocate for up to `tokens` tokens of a step."""
        width = config.recurrence.value_dim if config.recurrence else 0
        return cls(torch.empty(tokens * width, dtype=torch.float32, device=device))


# -- The sequences of a step


@dataclass(frozen=True, slots=True, eq=False)
class StateChunks:
    """Chunks of a prompt's tokens, cut at captured tokens; int32."""

    # [chunks, 5]: first token, number of tokens, first token of the sequence, slot before the
    # sequence, slot that receives the state after the chunk or -1.
    table: Tensor
    starts: Tensor  # [n + 1]: first chunk of each sequence
    size: int  # tokens of the longest chunk

    def __len__(self) -> int:
        return len(self.table)


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """The sequences of a step: their tokens and state slots; int32 on the device.

    An empty sequence reads and writes nothing.
    """

    starts: Tensor  # [n + 1]: first token of each sequence, and the end of the last
    reads: Tensor  # [n]: slot of the state before the first token, -1: a zero state
    writes: Tensor  # [n]: slot that receives the state after the last token
    captures: Tensor  # [tokens]: slot that receives the state after this token, -1: none
    chunks: StateChunks | None = None  # only for prompts

    def __len__(self) -> int:
        return len(self.reads)


def prefill_state_rows(
    row_starts: Ints,
    state_slots: Ints,
    captures: Ints,
    device: torch.device,
    dtype: torch.dtype,
) -> StateRows:
    """Tables of a step whose rows have many tokens.

    Args:
        row_starts: [rows + 1], from 0.
        state_slots: `StepBatch.state_slots`.
        captures: `StepBatch.state_captures`.
        dtype: of the model.
    """
    size = FLOAT_CHUNK if dtype == torch.float32 else CHUNK
    capture_slots = np.full(int(row_starts[-1]), -1, np.int64)
    capture_slots[captures[:, 0]] = captures[:, 1]

    ends = np.unique(np.concatenate((row_starts[1:], captures[:, 0] + 1)))
    ends = ends[ends > 0]
    lengths = np.diff(ends, prepend=0)
    counts = -(-lengths // size)
    segment = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = (ends - lengths)[segment] + number * size
    end = np.minimum(first + size, ends[segment])
    row = np.searchsorted(row_starts, first, side="right") - 1
    table = (first, end - first, row_starts[row], state_slots[row, 0], capture_slots[end - 1])

    arrays = (
        row_starts, state_slots[:, 0], state_slots[:, 1], capture_slots,
        np.stack(table, 1).reshape(-1), np.searchsorted(first, row_starts),
    )  # fmt: skip
    buffer = to_device(np.concatenate(arrays).astype(np.int32), device)  # one copy for all
    starts, reads, writes, per_token, chunks, chunk_starts = buffer.split(
        [len(array) for array in arrays]
    )
    return StateRows(
        starts, reads, writes, per_token, StateChunks(chunks.view(-1, 5), chunk_starts, size)
    )


# -- Launches


def recur(
    projected: Tensor,
    out: Tensor,
    layer: RecurrentLayer,
    rows: StateRows,
    *,
    pdl: bool,
    exact: bool = False,
    stats: Tensor | None = None,
    scratch: RecurrentScratch | None = None,
) -> None:
    """Run a recurrent layer on the tokens of a step, from its fused input projection to the input
    of its output projection; update the states.

    Args:
        projected: [tokens, projected_width]. Columns: delta: qkv, z, b, a; mamba2: vkq, z, dt;
            conv: b, c, x.
        out: [tokens, out_width], of the same dtype.
        pdl: programmatic dependent launch. Kernels that wait must have run since the last call for
            this layer.
        exact: a token's bits depend neither on how its sequence is cut into steps nor on other
            rows: delta and mamba2 run token by token.
        stats: [tokens, 3, heads] in float32: receives gate, decay and norm of the new state of each
            token and head (conv: of one head); runs token by token.
        scratch: None: allocate.
    """
    if not len(projected) or not len(rows):
        return
    if layer.kind == "conv":
        # No sums over channels: chunks have the bits of single tokens.
        _run_short_conv(projected, out, layer, rows, rows.chunks, pdl, stats)
    else:
        mixed = _mixed_buffer(len(projected), layer, scratch)
        if rows.chunks is None or exact or stats is not None:
            _recur_tokens(projected, mixed, layer, rows, pdl, exact, stats)
            _finish(projected, mixed, out, layer, rows, None, pdl)
        else:
            _scan_chunks(projected, mixed, layer, rows, rows.chunks)
            _finish(projected, mixed, out, layer, rows, rows.chunks, False)


def _recur_tokens(
    projected: Tensor,
    mixed: Tensor,
    layer: RecurrentLayer,
    rows: StateRows,
    pdl: bool,
    exact: bool,
    stats: Tensor | None,
) -> None:
    shape = layer.recurrence
    tile = next(tile for largest, tile in TOKEN_TILES.items() if len(rows) <= largest)
    value_block, warps = EXACT_TILE if exact else tile
    value_block = min(value_block, _power_of_two(shape.value_width, 16))
    blocks = -(-shape.value_width // value_block)
    norms = projected
    if stats is not None:
        norms = mixed.new_empty(len(projected), shape.value_heads, blocks)
    kernels.recur_tokens[(len(rows), shape.value_heads, blocks)](
        projected, mixed, layer.states, layer.conv_weight, _or_any(layer.conv_bias, layer),
        layer.rate, layer.dt_bias, _or_any(layer.skip, layer), rows.starts, rows.reads, rows.writes,
        rows.captures, projected if stats is None else stats, norms,
        0 if stats is None else stats.shape[2], **layer.conv_constants, **layer.head_constants,
        V_AT=layer.value_column, BIAS=layer.conv_bias is not None, BV=value_block,
        STATS=stats is not None, PDL=pdl, num_warps=warps, **_launch_options(pdl),
    )  # fmt: skip
    if stats is not None:
        stats[:, 2, : shape.value_heads] = norms.sum(-1).sqrt()


def _finish(
    projected: Tensor,
    mixed: Tensor,
    out: Tensor,
    layer: RecurrentLayer,
    rows: StateRows,
    chunks: StateChunks | None,
    pdl: bool,
) -> None:
    groups, tokens = layer.norm_groups, len(projected)
    width = layer.out_width // groups
    padded_width = _power_of_two(width)
    groups_per_program = min(max(1, NORM_COLUMNS // padded_width), _power_of_two(groups))
    norm_programs = tokens * -(-groups // groups_per_program)
    channels = min(CONV_CHANNELS, _power_of_two(layer.channels))
    conv_programs = len(rows) * -(-layer.channels // channels)
    table, starts = (
        (rows.captures, rows.starts) if chunks is None else (chunks.table, chunks.starts)
    )
    kernels.finish[(norm_programs + conv_programs,)](
        projected, mixed, out, layer.norm_gain, layer.states, rows.starts, rows.reads, rows.writes,
        rows.captures, table, starts, layer.eps, tokens, len(rows), **layer.conv_constants,
        DELTA=layer.kind == "delta", VD=layer.out_width, GROUPS=groups, GW=width, GWP=padded_width,
        ROWS=groups_per_program, BC=channels, CHUNKED=chunks is not None, PDL=pdl,
        num_warps=NORM_WARPS, **_launch_options(pdl),
    )  # fmt: skip


def _run_short_conv(
    projected: Tensor,
    out: Tensor,
    layer: RecurrentLayer,
    rows: StateRows,
    chunks: StateChunks | None,
    pdl: bool,
    stats: Tensor | None,
) -> None:
    constants, bias = layer.conv_constants, _or_any(layer.conv_bias, layer)
    if stats is not None:
        kernels.short_conv_stats[(len(rows),)](
            projected, layer.states, rows.starts, rows.reads, stats, stats.shape[2], **constants,
            BC=min(1024, _power_of_two(layer.channels)), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    channels = min(CONV_CHANNELS, _power_of_two(layer.channels))
    blocks, has_bias = -(-layer.channels // channels), layer.conv_bias is not None
    if chunks is None:
        kernels.short_conv[(len(rows), blocks)](
            projected, out, layer.states, layer.conv_weight, bias, rows.starts, rows.reads,
            rows.writes, rows.captures, **constants, BIAS=has_bias, BC=channels, PDL=pdl,
            num_warps=CONV_WARPS, **_launch_options(pdl),
        )  # fmt: skip
        return
    _convolve(projected, out, layer, chunks)
    kernels.store_conv[(len(rows), blocks)](
        projected, layer.states, rows.starts, rows.reads, rows.writes, chunks.table, chunks.starts,
        **constants, BC=channels, num_warps=CONV_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _convolve(
    projected: Tensor, convolved: Tensor, layer: RecurrentLayer, chunks: StateChunks
) -> None:
    channels = min(CONVOLVE_CHANNELS, _power_of_two(layer.channels))
    kernels.convolve[(len(chunks), -(-layer.channels // channels))](
        projected, convolved, layer.states, layer.conv_weight, _or_any(layer.conv_bias, layer),
        chunks.table, **layer.conv_constants, BIAS=layer.conv_bias is not None,
        GATED=layer.kind == "conv", CHUNK=chunks.size, BC=channels, num_warps=CONVOLVE_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def _scan_chunks(
    projected: Tensor,
    mixed: Tensor,
    layer: RecurrentLayer,
    rows: StateRows,
    chunks: StateChunks,
) -> None:
    shape, tokens, heads = layer.recurrence, len(projected), layer.recurrence.value_heads
    convolved = projected.new_empty(tokens, layer.channels)
    _convolve(projected, convolved, layer, chunks)
    # Products in float16 would overflow where a state is large: TF32 is as precise.
    is_bfloat = projected.dtype == torch.bfloat16
    is_float = projected.dtype == torch.float32
    overlaps = torch.empty(
        len(chunks) * heads * chunks.size**2,
        dtype=torch.bfloat16 if is_bfloat else torch.float32,
        device=projected.device,
    )
    inverses = torch.empty_like(overlaps) if layer.kind == "delta" else overlaps
    scales, decays = mixed.new_empty(4 * heads * tokens), mixed.new_empty(len(chunks) * heads)
    constants = {**layer.head_constants, "CHUNK": chunks.size}
    constants["PRECISION"] = "ieee" if is_float else "tf32"
    conv = layer.conv_constants
    kernels.prepare_chunks[(len(chunks), heads)](
        projected, convolved, layer.rate, layer.dt_bias, chunks.table, inverses, overlaps, scales,
        decays, tokens, **constants, C=conv["C"], WIDTH=conv["WIDTH"],
        num_warps=FLOAT_WARPS if is_float else PREPARE_WARPS, num_stages=PREPARE_STAGES,
    )  # fmt: skip
    value_block = min(SCAN_BLOCK, _power_of_two(shape.value_width, 16))
    kernels.scan_chunks[(len(rows), heads, -(-shape.value_width // value_block))](
        convolved, mixed, layer.states, _or_any(layer.skip, layer), rows.reads, rows.writes,
        chunks.table, chunks.starts, inverses, overlaps, scales, decays, tokens, **constants,
        C=conv["C"], K=conv["K"], FLOATS=conv["FLOATS"], V_AT=layer.value_column, BV=value_block,
        STAGES=FLOAT_STAGES if is_float else SCAN_STAGES,
        num_warps=FLOAT_WARPS if is_float else SCAN_WARPS,
    )  # fmt: skip


def _mixed_buffer(tokens: int, layer: RecurrentLayer, scratch: RecurrentScratch | None) -> Tensor:
    size = tokens * layer.out_width
    if scratch is not None and scratch.mixed.numel() >= size:
        return scratch.mixed[:size]
    return torch.empty(size, dtype=torch.float32, device=layer.states.device)


def _power_of_two(size: int, smallest: int = 1) -> int:
    return max(smallest, 1 << (size - 1).bit_length())


def _or_any(tensor: Tensor | None, layer: RecurrentLayer) -> Tensor:
    """A tensor, or another (never read) in place of a missing one."""
    return layer.conv_weight if tensor is None else tensor


def _launch_options(pdl: bool) -> dict[str, Any]:
    # No fused multiply-add, so that all kernels round alike.
    return {"enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}
