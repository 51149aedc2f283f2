"""Paged attention: parameters of a layer, and the launches of its kernels.

Nothing here allocates or synchronizes, so every launch can be captured in a graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.cuda.kernels import attention as kernels
from unspool.backends.cuda.weights import AttentionWeights, Weights
from unspool.backends.step import Ints
from unspool.model.config import Rotary

PAGE_SIZE = 16
TILE = 64  # keys per tile; fewer if heads are wide
PIECES = 32  # pieces (splits) of a long context, which are processed in parallel
MOST_PIECES = PIECES + 1  # pieces begin at fixed positions: a window may touch one more
ROWS = 16  # query heads of one key head per program: the minimum of tensor cores
MANY_PROGRAMS = 512  # from this many rows times heads on, a program processes several pieces
SEVERAL = 16
# Pipeline stages. Kernels of small batches stay below 48 KB of shared memory: above, the driver
# drains a multiprocessor before they may run, and concurrent GEMMs wait.
STAGES = 4
COMBINED = 4096  # numbers that are loaded together when pieces are combined
WARPS, NEW_WARPS, MANY_WARPS = 4, 4, 2  # per program

# Prefill: rows (tokens times query heads of a key head) and keys per program, pipeline stages; by
# the largest head width.
PREFILL_TILES = {128: (128, 64, 4), 256: (128, 64, 2), 1 << 30: (64, 32, 2)}
PREFILL_WARPS = 8
EXACT_ROWS = 64  # rows of an exact program; fewer if heads are wide
# Fewest tokens of a chunk, and fewest products of a query and a key, for which cuDNN's attention is
# faster than `prefill`, and the widest heads that this was measured for.
LONG_CHUNK, LONG_PRODUCTS, LONG_HEAD = 1024, 1 << 23, 128
LONG_BLOCK = 1024  # it is given multiples of this: it plans for 40 ms when a shape is new

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """Attention parameters of one layer."""

    heads: int
    kv_heads: int
    head_width: int
    scale: float
    softcap: float
    window: int  # sliding window in tokens; 0: none
    norm_eps: float
    q_norm: Tensor | None  # [head_width]: gain of the norm over each head
    k_norm: Tensor | None
    cosine: Tensor | None  # [context, rotary width / 2], float32
    sine: Tensor | None
    sinks: Tensor | None = None  # [heads]: attention sink, one score per head
    growth: Tensor | None = None  # [context]: scale of the queries by position, float32
    has_keys: bool = True  # whether it stores keys and values; else it reads another layer's
    keys_are_values: bool = False
    value_norm: bool = False
    gated: bool = False  # whether `qkv` ends with a gate, as wide as the queries
    looks_ahead: bool = False  # whether the window counts in both directions

    @property
    def out_width(self) -> int:
        return self.heads * self.head_width

    @property
    def value_at(self) -> int:
        """First column of the values in `qkv`."""
        return (self.heads + (0 if self.keys_are_values else self.kv_heads)) * self.head_width

    @property
    def gate_at(self) -> int:
        """First column of the gate in `qkv`, or the end of the values."""
        if not self.has_keys:
            return self.out_width
        return self.value_at + self.kv_heads * self.head_width

    @property
    def qkv_width(self) -> int:
        return self.gate_at + self.gated * self.out_width

    @property
    def tile(self) -> int:
        """Keys per tile, in decode and in exact prefill."""
        return max(16, TILE * 128 // max(128, tile_width(self.head_width)))

    @property
    def rotary_width(self) -> int:
        return 0 if self.cosine is None else 2 * int(self.cosine.shape[1])

    @property
    def score_scale(self) -> float:
        """Scale of query times key in the kernels, which use exp2."""
        return self.scale * LOG2_E * (2 / self.softcap if self.softcap else 1)

    @property
    def shape(self) -> dict[str, Any]:
        """Compile-time constants of all kernels."""
        return {
            "H": self.heads,
            "KV": self.kv_heads,
            "HD": self.head_width,
            "WIDE": tile_width(self.head_width),
            "STRIDE": self.qkv_width,
            "PAGE": PAGE_SIZE,
        }

    @property
    def qk_constants(self) -> dict[str, Any]:
        """Compile-time constants of new queries, keys and values."""
        return {
            "ROTARY": self.rotary_width,
            "NORM": self.q_norm is not None,
            "GROWTH": self.growth is not None,
            "KEYS": self.has_keys,
            "VALUE_AT": self.value_at,
            "VALUE_NORM": self.value_norm,
        }

    @property
    def softmax_constants(self) -> dict[str, Any]:
        """Compile-time constants of mask and softmax."""
        return {
            "WINDOW": self.window,
            "AHEAD": self.looks_ahead,
            "SOFTCAP": self.softcap,
            "SINKS": self.sinks is not None,
            "TILE": self.tile,
            "PIECES": PIECES,
        }


def attention_layers(weights: Weights, context: int) -> dict[int, AttentionLayer]:
    """Attention parameters by layer. Layers with the same RoPE share its tables."""
    config, rope_tables = weights.config, {}
    for rotary in {config.layer_rope(layer) for layer in range(config.layers)}:
        rope_tables[rotary] = _rope_tables(rotary, context, weights.device)
    growth = None
    if config.query_growth:
        steps = np.log1p(np.arange(context) // config.query_span) * config.query_growth
        growth = torch.from_numpy(1 + steps.astype(np.float32)).to(weights.device)
    layers = {}
    for number, layer in enumerate(weights.layers):
        mixer, shape = layer.mixer, config.shape(number)
        if not isinstance(mixer, AttentionWeights):
            continue
        per_head = config.qk_norm == "head"
        cosine, sine = rope_tables[config.layer_rope(number)]
        layers[number] = AttentionLayer(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_width=shape.head_width,
            scale=config.score_scale(number),
            softcap=config.attention_softcap,
            window=config.window(number),
            norm_eps=config.norm_eps,
            q_norm=mixer.q_norm.gain if per_head and mixer.q_norm else None,
            k_norm=mixer.k_norm.gain if per_head and mixer.k_norm else None,
            cosine=cosine,
            sine=sine,
            sinks=mixer.sinks,
            growth=growth if cosine is not None else None,
            has_keys=config.kv_source(number) == number,
            keys_are_values=not config.has_values(number),
            value_norm=config.value_norm,
            gated=config.attention_gate,
            looks_ahead=config.sight == "whole" and config.window(number) > 0,
        )
    return layers


def _rope_tables(
    rotary: Rotary | None, context: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if rotary is None:
        return None, None
    cosine, sine = rotary.tables(np.arange(context), context)
    return torch.from_numpy(cosine).to(device), torch.from_numpy(sine).to(device)


def tile_width(size: int) -> int:
    """Smallest power of two >= size, at least 16 (the minimum of tensor cores)."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """New tokens, one per row: their block tables, positions and visible context."""

    table: Tensor  # [sequences, columns]: block table of pages
    table_rows: Tensor  # [n]: row of the block table
    positions: Tensor  # [n]
    ends: Tensor  # [n]: positions before this one are visible

    def __len__(self) -> int:
        return len(self.table_rows)

    def at(self, index: Tensor) -> DecodeRows:
        """The rows of `index`."""
        ints = (self.table_rows, self.positions, self.ends)
        return DecodeRows(self.table, *(x[index] for x in ints))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScratch:
    """Partial results of the pieces, which the last program of a row combines."""

    parts: Tensor
    stats: Tensor
    arrived: Tensor  # all zero between launches

    @classmethod
    def for_rows(
        cls, lines: int, layers: Iterable[AttentionLayer], device: torch.device
    ) -> AttentionScratch:
        """Allocate for up to `lines` rows of any context length, in any of the layers."""
        parts = stats = most_groups = 0
        for layer in layers:
            groups = lines * layer.kv_heads * -(-layer.heads // layer.kv_heads // ROWS)
            rows = groups * MOST_PIECES * min(ROWS, layer.heads // layer.kv_heads)
            parts = max(parts, rows * tile_width(layer.head_width))
            stats, most_groups = max(stats, rows * 2), max(most_groups, groups)
        return cls(
            torch.empty(parts, dtype=torch.float32, device=device),
            torch.empty(stats, dtype=torch.float32, device=device),
            torch.zeros(most_groups, dtype=torch.int32, device=device),
        )


def num_pieces(layer: AttentionLayer, longest: int) -> int:
    """Number of pieces of a context of up to `longest` tokens."""
    reach = layer.window * (1 + layer.looks_ahead)
    visible = min(longest, reach + layer.tile) if layer.window else longest
    return min(MOST_PIECES, -(-visible // layer.tile) + (1 if layer.window else 0))


def store_keys(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: AttentionLayer,
    lines: DecodeRows,
    *,
    pdl: bool,
) -> None:
    """Apply QK norm and RoPE: queries in place; keys are stored in the pages, as are values.

    qkv: [n, layer.qkv_width]; keys, values: [slots, kv_heads, head_width].
    """
    heads = layer.heads + layer.has_keys * layer.kv_heads
    kernels.store_keys[(len(lines), -(-heads // ROWS))](
        qkv, keys, values, lines.table, lines.table_rows, lines.positions,
        *_optional_tensors(layer, qkv), layer.norm_eps, lines.table.shape[1], **layer.shape,
        **layer.qk_constants, ROWS=ROWS, PDL=pdl, num_warps=4, **_launch_options(pdl),
    )  # fmt: skip


def decode_attention(
    qkv: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: AttentionLayer,
    lines: DecodeRows,
    scratch: AttentionScratch,
    *,
    new: bool,
    pdl: bool,
    pieces: int = MOST_PIECES,
    exact: bool = False,
) -> None:
    """Decode attention: out [n, heads * head_width].

    Args:
        new: each row is the only new token of its sequence, and its key and value are still in
            `qkv`: they are normalized, rotated and stored here. Otherwise `store_keys` did that.
        pieces: number of pieces of the longest context.
        exact: a row's bits do not depend on the number of rows.
    """
    groups = layer.kv_heads * -(-layer.heads // layer.kv_heads // ROWS)
    many = len(lines) * groups >= MANY_PROGRAMS
    # The norm of a head adds in an order that depends on the kernel, so an exact one is always in
    # the same kernel.
    is_ordered = exact and (layer.q_norm is not None or layer.value_norm)
    if new and (many or pieces == MOST_PIECES or is_ordered):
        # `store_keys` does it once, not in every program; and a program may have several tiles.
        store_keys(qkv, keys, values, layer, lines, pdl=pdl)
        new = False
    group_heads = min(ROWS, layer.heads // layer.kv_heads)
    heads_p2 = 1 << (group_heads - 1).bit_length()
    at_once = max(1, min(8, COMBINED // (heads_p2 * tile_width(layer.head_width))))
    pieces_per_program = SEVERAL if many else 1
    warps = NEW_WARPS if new else MANY_WARPS if many else WARPS
    kernels.attend[(len(lines), groups, -(-pieces // pieces_per_program))](
        qkv, out, keys, values, lines.table, lines.table_rows, lines.positions, lines.ends,
        *_optional_tensors(layer, qkv), qkv if layer.sinks is None else layer.sinks, scratch.parts,
        scratch.stats, scratch.arrived, layer.score_scale, layer.norm_eps, lines.table.shape[1],
        MOST_PIECES, pieces_per_program, **layer.shape, **layer.qk_constants,
        **layer.softmax_constants, ROWS=ROWS, NUM_HEADS=group_heads, HEADS_P2=heads_p2,
        AT_ONCE=at_once, STAGES=STAGES, NEW=new, PDL=pdl, num_warps=warps, **_launch_options(pdl),
    )  # fmt: skip


class PrefillShape(NamedTuple):
    """What the work list of `prefill` depends on."""

    group: int  # query heads per key head
    rows: int  # tokens times these heads per program
    skips_long: bool = False  # whether `attend_long` serves long chunks


def prefill_shape(
    layer: AttentionLayer, dtype: torch.dtype, device: torch.device, exact: bool
) -> PrefillShape:
    rows, is_float32 = _prefill_tile(layer)[0], dtype == torch.float32
    if is_float32:
        rows = ROWS
    elif exact:
        rows = max(ROWS, EXACT_ROWS * 128 // max(128, tile_width(layer.head_width)))
    is_plain = not (layer.window or layer.softcap or layer.sinks is not None)
    fits = layer.head_width <= LONG_HEAD and layer.head_width % 8 == 0
    has_library = is_plain and fits and _has_fast_cudnn(device)
    return PrefillShape(
        layer.heads // layer.kv_heads, rows, has_library and not (exact or is_float32)
    )


@functools.cache
def _has_fast_cudnn(device: torch.device) -> bool:
    """Whether cuDNN has attention kernels for this GPU that are faster than ours (Hopper's)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    return bool(torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled())


def long_chunks(starts: Ints, positions: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
    """Which chunks are long, and each of their tokens sees all tokens up to itself."""
    is_causal, counts = np.minimum.reduceat(ends == positions + 1, starts[:-1]), np.diff(starts)
    return is_causal & (counts >= LONG_CHUNK) & (counts * ends[starts[1:] - 1] >= LONG_PRODUCTS)


def chunk_tiles(
    starts: Ints,
    slots: Ints,
    ends: Ints,
    shape: PrefillShape,
    is_long: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.int32]:
    """Work list of `prefill`, programs with the longest context first: [programs, 4].

    Args:
        starts: [chunks + 1]: first token of each chunk.
        slots: [chunks]: row of the block table of each chunk.
        ends: [tokens]: end of the visible context.
        is_long: [chunks]: see `long_chunks`.
    """
    group, rows, skips_long = shape
    counts = np.diff(starts)
    if skips_long and is_long is not None:
        counts = np.where(is_long, 0, counts)
    programs = -(-counts * group // rows)
    chunk = np.repeat(np.arange(len(counts)), programs)
    block = np.arange(len(chunk)) - np.repeat(np.cumsum(programs) - programs, programs)
    last_token = np.minimum(((block + 1) * rows - 1) // group, counts[chunk] - 1)
    order = np.argsort(-ends[starts[chunk] + last_token], kind="stable")
    columns = (starts[chunk], counts[chunk], block * rows, slots[chunk])
    return np.stack(columns, 1)[order].astype(np.int32)


def _prefill_tile(layer: AttentionLayer) -> tuple[int, int, int]:
    width = tile_width(layer.head_width)
    return next(tile for largest, tile in PREFILL_TILES.items() if width <= largest)


def prefill_attention(
    qkv: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: AttentionLayer,
    lines: DecodeRows,
    tiles: Tensor,
    *,
    exact: bool,
) -> None:
    """Prefill attention, after `store_keys`: out [n, heads * head_width].

    The tokens of a chunk are contiguous in `qkv` and `lines`; tiles: `chunk_tiles` on the device.
    """
    if not len(tiles):
        return
    exact = exact or qkv.dtype == torch.float32
    shape = {**layer.shape, **layer.softmax_constants}
    shape["ROWS"], stages = prefill_shape(layer, qkv.dtype, qkv.device, exact).rows, STAGES
    if not exact:
        _, shape["TILE"], stages = _prefill_tile(layer)
    kernels.prefill[(layer.kv_heads, len(tiles))](
        qkv, out, keys, values, lines.table, tiles, lines.positions, lines.ends,
        qkv if layer.sinks is None else layer.sinks, layer.score_scale, lines.table.shape[1],
        **shape, STAGES=stages, EXACT=exact,
        num_warps=WARPS if exact else PREFILL_WARPS, enable_fp_fusion=not exact,
    )  # fmt: skip


# -- Long chunks by cuDNN
#
# It has no kernel for queries in the middle of a text. So the keys before a chunk and its own are
# two products, each with the logarithms of its sums of weights, from which they are merged. The
# chunk begins a bit earlier and ends a bit later than it does, so that both have whole blocks.


@dataclass(frozen=True, slots=True, eq=False)
class LongChunk:
    """Consecutive tokens of one text, each of which sees all tokens up to itself."""

    first: int  # of the step's tokens
    count: int
    past: int  # tokens of the text before them
    pages: Tensor  # of the text, up to the last of them

    def tokens_of(self, cache: Tensor, count: int) -> Tensor:
        """Keys or values of the text in one tensor [count, kv_heads, head_width], then zeros."""
        tokens = cache.new_empty(count, *cache.shape[1:])
        paged, shape = tokens[: len(self.pages) * PAGE_SIZE], (-1, PAGE_SIZE, *cache.shape[1:])
        torch.index_select(cache.view(shape), 0, self.pages, out=paged.view(shape))
        tokens[self.past + self.count :].zero_()
        return tokens


def attend_long(
    qkv: Tensor, out: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, chunk: LongChunk
) -> None:
    """Prefill attention of a long chunk, after `store_keys`; arguments: see `prefill_attention`."""
    heads = layer.heads, layer.head_width
    target = out[chunk.first : chunk.first + chunk.count].unflatten(1, heads)
    lead = chunk.past % LONG_BLOCK
    start, size = chunk.past - lead, -(-(lead + chunk.count) // LONG_BLOCK) * LONG_BLOCK
    mine = slice(lead, lead + chunk.count)
    stride, first = qkv.stride(0), chunk.first - lead
    at = qkv.storage_offset() + first * stride
    if first >= 0 and at + size * stride <= qkv.untyped_storage().nbytes() // qkv.itemsize:
        # With the rows before and after the chunk, whose results are not used.
        query = qkv.as_strided((size, *heads), (stride, layer.head_width, 1), at)
    else:
        query = qkv.new_zeros(size, *heads)
        query[mine] = qkv[chunk.first :][: chunk.count, : layer.out_width].unflatten(1, heads)
    key, value = (chunk.tokens_of(cache, start + size) for cache in (keys, values))
    inner, inner_sums = _library_attention(query, key[start:], value[start:], layer.scale, True)
    if not start:
        target.copy_(inner[mine])
        return
    past, past_sums = _library_attention(query, key[:start], value[:start], layer.scale, False)
    inner, inner_sums, past, past_sums = (x[mine] for x in (inner, inner_sums, past, past_sums))
    kernels.merge_parts[(chunk.count,)](
        inner, past, inner_sums, past_sums, target, *inner.stride()[:2], *past.stride()[:2],
        *inner_sums.stride(), *past_sums.stride(), target.stride(0), H=layer.heads,
        HD=layer.head_width, HEADS=tile_width(layer.heads), WIDE=tile_width(layer.head_width),
        num_warps=4,
    )  # fmt: skip


def _library_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of tokens [n, heads, width], and the logarithms of their sums of weights
    [n, heads]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), sums[0, :, :, 0].transpose(0, 1)


def _optional_tensors(layer: AttentionLayer, placeholder: Tensor) -> tuple[Tensor, ...]:
    """Cosine, sine, norm gains and growth; `placeholder` (never read) for missing ones."""
    k_norm = layer.q_norm if layer.k_norm is None else layer.k_norm
    optional = (layer.cosine, layer.sine, layer.q_norm, k_norm, layer.growth)
    return tuple(placeholder if tensor is None else tensor for tensor in optional)


def _launch_options(pdl: bool) -> dict[str, Any]:
    # No fused multiply-add, so that all kernels round alike.
    return {"enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}
