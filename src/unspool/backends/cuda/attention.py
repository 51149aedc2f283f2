"""Attention over pages: what a layer needs to know, and the launches of its kernels.

Nothing here allocates or waits, so every launch can be captured in a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.cuda.kernels import attention as kernels
from unspool.backends.cuda.kernels import prefill as prefill_kernels
from unspool.backends.cuda.weights import Weights
from unspool.backends.step import Ints
from unspool.model.config import ModelConfig
from unspool.model.positions import Rotary

PAGE_SIZE = 16
TILE = 64  # keys that are looked at together
PIECES = 32  # into which a long text is cut
MOST_PIECES = PIECES + 1  # pieces begin at fixed places, so that a window may touch one more
ROWS = 16  # query heads of one key head that a program takes: what tensor cores want
MANY_PROGRAMS = 512  # with so many lines and heads, a program takes several pieces
SEVERAL = 8
# Tiles on their way at a time. Kernels of small batches stay below 48 KB of shared memory: beyond,
# the driver empties a multiprocessor before they may run, and the products beside them wait.
STAGES = 4
WARPS, NEW_WARPS, MANY_WARPS = 4, 4, 2  # of a program

# Prompts: rows (tokens times query heads of a key head) and keys that a program takes at once.
PREFILL_ROWS, PREFILL_TILE = 128, 64
PREFILL_STAGES, PREFILL_WARPS = 4, 8
EXACT_ROWS = 32  # so few that the compiler chooses the instructions of decoding

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """How one layer attends; the same for all steps."""

    heads: int
    kv_heads: int
    head_width: int
    scale: float
    softcap: float
    window: int  # how many last tokens are seen; 0: all
    norm_eps: float
    q_norm: Tensor | None  # [head_width]: gains of a norm over each head
    k_norm: Tensor | None
    cosine: Tensor | None  # [context, rotary width / 2], float32
    sine: Tensor | None
    sinks: Tensor | None = None  # [heads]: a score that takes weight and gives nothing

    @property
    def rotary_width(self) -> int:
        return 0 if self.cosine is None else 2 * int(self.cosine.shape[1])

    @property
    def score_scale(self) -> float:
        """What the kernels multiply query times key with, to get powers of two."""
        return self.scale * LOG2_E * (2 / self.softcap if self.softcap else 1)

    @property
    def shape(self) -> dict[str, Any]:
        """What all kernels of the layer are compiled for."""
        return {
            "H": self.heads,
            "KV": self.kv_heads,
            "HD": self.head_width,
            "WIDE": power_of_two(self.head_width),
            "PAGE": PAGE_SIZE,
        }

    @property
    def preparing(self) -> dict[str, Any]:
        """How queries and keys are prepared."""
        return {"ROTARY": self.rotary_width, "NORM": self.q_norm is not None}

    @property
    def looking(self) -> dict[str, Any]:
        """How scores become weights."""
        return {
            "WINDOW": self.window,
            "SOFTCAP": self.softcap,
            "SINKS": self.sinks is not None,
            "TILE": TILE,
            "PIECES": PIECES,
        }


def attention_layers(weights: Weights, context: int) -> list[AttentionLayer]:
    """All layers of a model; those that turn alike share their tables."""
    config, tables = weights.config, {}
    for rotary in {config.layer_rotary(layer) for layer in range(config.layers)}:
        tables[rotary] = _tables(rotary, context, weights.device)
    by_head = config.qk_norm == "head"
    return [
        AttentionLayer(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_width=config.head_width,
            scale=config.score_scale(number),
            softcap=config.attention_softcap,
            window=config.window(number),
            norm_eps=config.norm_eps,
            q_norm=layer.q_norm.gain if by_head and layer.q_norm else None,
            k_norm=layer.k_norm.gain if by_head and layer.k_norm else None,
            cosine=tables[config.layer_rotary(number)][0],
            sine=tables[config.layer_rotary(number)][1],
        )
        for number, layer in enumerate(weights.layers)
    ]


def _tables(
    rotary: Rotary | None, context: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    if rotary is None:
        return None, None
    cosine, sine = rotary.tables(np.arange(context), context)
    return torch.from_numpy(cosine).to(device), torch.from_numpy(sine).to(device)


def power_of_two(size: int) -> int:
    """The size of a tile that holds so much: tensor cores take sixteen at least."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """New tokens, one a line: where their texts' pages are, where they stand, what they see."""

    table: Tensor  # [lines, columns]: pages
    lines: Tensor  # [n]: which line of the table
    positions: Tensor  # [n]
    ends: Tensor  # [n]: positions before this one are seen

    def __len__(self) -> int:
        return len(self.lines)


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Where programs leave what they found in their pieces, for whoever joins them."""

    parts: Tensor
    stats: Tensor
    arrived: Tensor  # all zero between launches

    @classmethod
    def for_lines(
        cls, lines: int, config: ModelConfig | AttentionLayer, device: torch.device
    ) -> Scratch:
        """Room for so many lines at a time, whatever their lengths."""
        groups = lines * config.kv_heads * -(-config.heads // config.kv_heads // ROWS)
        rows = groups * MOST_PIECES * min(ROWS, config.heads // config.kv_heads)
        width = power_of_two(config.head_width)
        return cls(
            torch.empty(rows * width, dtype=torch.float32, device=device),
            torch.empty(rows * 2, dtype=torch.float32, device=device),
            torch.zeros(groups, dtype=torch.int32, device=device),
        )


def pieces_for(layer: AttentionLayer, longest: int) -> int:
    """How many pieces a text of up to `longest` tokens may have."""
    seen = min(longest, layer.window + TILE) if layer.window else longest
    return min(MOST_PIECES, -(-seen // TILE) + (1 if layer.window else 0))


def store_keys(
    qkv: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, lines: Lines, *, pdl: bool
) -> None:
    """Norm and turn queries in place and keys into the pages, where the values go too.

    qkv: [n, (heads + 2 * kv_heads) * head_width]; keys, values: [slots, kv_heads, head_width].
    """
    heads = layer.heads + layer.kv_heads
    kernels.store_keys[(len(lines), -(-heads // ROWS))](
        qkv, keys, values, lines.table, lines.lines, lines.positions,
        *_tables_or(layer, qkv), layer.norm_eps, lines.table.shape[1],
        **layer.shape, **layer.preparing, ROWS=ROWS, PDL=pdl, num_warps=4, **_launch(pdl),
    )  # fmt: skip


def attend(
    qkv: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: AttentionLayer,
    lines: Lines,
    scratch: Scratch,
    *,
    new: bool,
    pdl: bool,
    pieces: int = MOST_PIECES,
) -> None:
    """What each line's heads gather from its text: out [n, heads * head_width].

    With `new` the lines are single new tokens whose keys and values are still in `qkv`: they are
    prepared and stored on the way. Without, `store_keys` has done that. `pieces`: how many the
    longest text may have.
    """
    groups = layer.kv_heads * -(-layer.heads // layer.kv_heads // ROWS)
    many = len(lines) * groups >= MANY_PROGRAMS
    if new and (many or pieces == MOST_PIECES):
        # Preparing is better done once than by every program; and a program has several tiles.
        store_keys(qkv, keys, values, layer, lines, pdl=pdl)
        new = False
    kept = min(ROWS, layer.heads // layer.kv_heads)
    each = SEVERAL if many else 1
    warps = NEW_WARPS if new else MANY_WARPS if many else WARPS
    kernels.attend[(len(lines), groups, -(-pieces // each))](
        qkv, out, keys, values, lines.table, lines.lines, lines.positions, lines.ends,
        *_tables_or(layer, qkv), qkv if layer.sinks is None else layer.sinks,
        scratch.parts, scratch.stats, scratch.arrived,
        layer.score_scale, layer.norm_eps, lines.table.shape[1], MOST_PIECES, each,
        **layer.shape, **layer.preparing, **layer.looking,
        ROWS=ROWS, KEPT=kept, SOME=1 << (kept - 1).bit_length(), STAGES=STAGES, NEW=new, PDL=pdl,
        num_warps=warps, **_launch(pdl),
    )  # fmt: skip


def chunk_tiles(
    starts: Ints, slots: Ints, ends: Ints, config: ModelConfig | AttentionLayer, rows: int
) -> npt.NDArray[np.int32]:
    """The programs of `prefill`, those with most to see first: [programs, 4].

    starts: [chunks + 1], where each chunk's tokens begin; slots: [chunks], lines of the table;
    ends: [tokens]. Each program takes `rows` rows (see `prefill_rows`).
    """
    counts, group = np.diff(starts), config.heads // config.kv_heads
    programs = -(-counts * group // rows)
    chunk = np.repeat(np.arange(len(counts)), programs)
    block = np.arange(len(chunk)) - np.repeat(np.cumsum(programs) - programs, programs)
    newest = np.minimum(((block + 1) * rows - 1) // group, counts[chunk] - 1)
    order = np.argsort(-ends[starts[chunk] + newest], kind="stable")
    columns = (starts[chunk], counts[chunk], block * rows, slots[chunk])
    return np.stack(columns, 1)[order].astype(np.int32)


def prefill_rows(dtype: torch.dtype, exact: bool) -> int:
    """How many rows (tokens times query heads of a key head) a program of `prefill` takes."""
    if dtype == torch.float32:
        return ROWS
    return EXACT_ROWS if exact else PREFILL_ROWS


def prefill(
    qkv: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: AttentionLayer,
    lines: Lines,
    tiles: Tensor,
    *,
    exact: bool,
) -> None:
    """As `attend`, for chunks of many tokens that `store_keys` has prepared. The tokens of a chunk
    stand one after the other in `qkv` and in `lines`; tiles: `chunk_tiles` on the device."""
    exact = exact or qkv.dtype == torch.float32
    shape = {**layer.shape, **layer.looking, "ROWS": prefill_rows(qkv.dtype, exact)}
    if not exact:
        shape["TILE"] = PREFILL_TILE
    prefill_kernels.prefill[(layer.kv_heads, len(tiles))](
        qkv, out, keys, values, lines.table, tiles, lines.positions, lines.ends,
        qkv if layer.sinks is None else layer.sinks, layer.score_scale, lines.table.shape[1],
        **shape, STAGES=STAGES if exact else PREFILL_STAGES, EXACT=exact,
        num_warps=WARPS if exact else PREFILL_WARPS, enable_fp_fusion=not exact,
    )  # fmt: skip


def _tables_or(layer: AttentionLayer, stand_in: Tensor) -> tuple[Tensor, ...]:
    """Cosine, sine and the gains of the norms; something that is not read where there is none."""
    optional = (layer.cosine, layer.sine, layer.q_norm, layer.k_norm)
    return tuple(stand_in if tensor is None else tensor for tensor in optional)


def _launch(pdl: bool) -> dict[str, Any]:
    # Products and sums stay apart, so that every kernel rounds them alike.
    return {"enable_fp_fusion": False, **({"launch_pdl": True} if pdl else {})}
