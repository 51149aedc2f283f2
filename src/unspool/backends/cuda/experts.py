"""Mixture of experts on the GPU: kernel launches, all of which can be captured in CUDA graphs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unspool.backends.cuda.kernels import experts as kernels
from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.matmul import PackedMatrix, next_power_of_two, num_multiprocessors
from unspool.backends.cuda.weights import ExpertWeights, PlainMatrix, Weights
from unspool.model.config import ModelConfig

# Pairs of a token and an expert, per expert of a layer, up to which GEMVs are used: they read only
# the rows of the selected experts. More pairs share what a GEMM reads.
MAX_GATHERED_PAIRS, MAX_GATHERED_PACKED_PAIRS = 1, 2
SMALL_BLOCK = 16  # rows of a block: the minimum of tensor cores
LARGE_BLOCK = 64  # rows of a block if experts have many tokens each
_COMBINE_COLUMNS = 1024  # columns per program

# GEMVs: loads in flight of a thread, and warps.
UNITS_PER_THREAD = 4  # of packed matrices
COLUMNS_PER_THREAD = 64  # of plain matrices
MAX_WARPS, WARPS_PER_SM = 8, 16
_MAX_REGISTERS = 128  # per thread, so that all these warps fit
_MAX_GATHERED = 1 << 16  # columns of a token's selected experts together that a program can hold

# GEMMs: rows of a matrix, columns per iteration, and stages of a program.
SMALL_TILE = (64, 64, 4)
LARGE_TILE = (128, 64, 3)
PACKED_TILE = (64, 128, 3)
_FLOAT32_TILE = (32, 32, 3)  # no tensor cores: small tiles save registers


@dataclass(frozen=True, slots=True, eq=False)
class ExpertScratch:
    """Buffers between the kernels."""

    scores: Tensor  # [tokens, experts], float32
    expert_ids: Tensor  # [tokens, experts a token]
    gates: Tensor  # [tokens, experts a token], float32
    arrived: Tensor  # [tokens]: all zero between launches
    counts: Tensor  # [experts]: all zero between launches
    pairs: Tensor  # (token, expert) pairs in blocks of one expert each
    blocks: Tensor  # each block's expert, and its number of pairs
    total: Tensor  # number of blocks
    inner: Tensor  # [pairs, expert width]
    expert_out: Tensor  # [pairs, width]

    @classmethod
    def for_tokens(cls, tokens: int, config: ModelConfig, weights: Weights) -> ExpertScratch:
        """Allocate for up to `tokens` tokens; empty for a model without experts."""
        tokens = tokens if config.experts else 0
        device, pairs = weights.device, tokens * config.experts_per_token

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            scores=new(tokens, config.experts, dtype=torch.float32),
            expert_ids=new(tokens, config.experts_per_token),
            gates=new(tokens, config.experts_per_token, dtype=torch.float32),
            arrived=new(tokens).zero_(),
            counts=new(config.experts).zero_(),
            pairs=new(
                max(_max_blocks(pairs, config, rows) * rows for rows in (SMALL_BLOCK, LARGE_BLOCK))
            ),
            blocks=new(_max_blocks(pairs, config, SMALL_BLOCK), 2),
            total=new(1),
            inner=new(pairs, config.expert_width, dtype=weights.dtype),
            expert_out=new(pairs, config.width, dtype=weights.dtype),
        )


def _max_blocks(pairs: int, config: ModelConfig, rows: int) -> int:
    """Upper bound of blocks: each chosen expert may have one that is not full."""
    return min(pairs, pairs // rows + config.experts)


def run_experts(
    x: Tensor,
    weights: ExpertWeights,
    config: ModelConfig,
    out: Tensor,
    scratch: ExpertScratch,
    *,
    pdl: bool,
    exact: bool = False,
    router_input: Tensor | None = None,
) -> None:
    """Route each x [n, width] to its experts; out [n, width] is their weighted sum.

    A token's result does not depend on other tokens; with `exact` it is bit-identical for any
    number of tokens.

    Args:
        pdl: programmatic dependent launch.
        router_input: input of the router [n, width]; None: x.
    """
    routed = x if router_input is None else router_input
    columns = config.experts_per_token * config.expert_width
    is_packed = isinstance(weights.gate_up, PackedMatrix)
    most = config.experts * (MAX_GATHERED_PACKED_PAIRS if is_packed else MAX_GATHERED_PAIRS)
    is_few = len(x) == 1 or len(x) * config.experts_per_token <= most
    if is_few and columns <= _MAX_GATHERED and not exact:
        _run_few(x, routed, weights, config, out, scratch, pdl)
    else:
        _run_many(x, routed, weights, config, out, scratch, pdl, exact)


def _run_few(
    x: Tensor, routed: Tensor, weights: ExpertWeights, config: ModelConfig, out: Tensor,
    scratch: ExpertScratch, pdl: bool,
) -> None:  # fmt: skip
    """Gathered GEMVs: three kernels."""
    n, top_k, width, inner = len(x), config.experts_per_token, config.width, config.expert_width
    experts_block = max(1, next_power_of_two(config.experts) // 128)
    kernels.route_few[(-(-config.experts // experts_block), n)](
        routed, weights.router, _or(weights.router_bias, x), _or(weights.selection_bias, x),
        _or(weights.scale, x), scratch.scores, scratch.arrived, scratch.expert_ids, scratch.gates,
        config.experts_scale, D=width, DP=next_power_of_two(width), BE=experts_block,
        BIAS=weights.router_bias is not None, **_router_constants(weights, config), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    tensors, constants = _layout(weights.gate_up)
    first, second = split_units(constants["U"])
    block_rows, warps, programs = gather_tiling(
        inner, first + second, 1 + config.gated, n * top_k, constants["BITS"] > 0, x.device
    )
    options = {"PDL": pdl, "launch_pdl": pdl, "NATIVE": x.is_cuda, "maxnreg": _MAX_REGISTERS}
    kernels.gather_up[(programs, n * top_k)](
        x, *tensors, _or(weights.gate_up.bias, x), scratch.expert_ids, scratch.inner, inner,
        D=width, K=top_k, **constants, UP=first, TAIL=second, BN=block_rows, GLU=config.gated,
        ACTIVATION=ACTIVATIONS[config.activation], LIMIT=config.activation_limit,
        BIAS=weights.gate_up.bias is not None, num_warps=warps, **options,
    )  # fmt: skip
    tensors, constants = _layout(weights.down)
    first, second = split_units(top_k * constants["U"])
    block_rows, warps, programs = gather_tiling(
        width, first + second, 1, n, constants["BITS"] > 0, x.device
    )
    kernels.gather_down[(programs, n)](
        scratch.inner, *tensors, _or(weights.down.bias, x), scratch.expert_ids, scratch.gates, out,
        width, F=inner, K=top_k, KP=next_power_of_two(top_k), **constants, UP=first, TAIL=second,
        BN=block_rows, BIAS=weights.down.bias is not None, num_warps=warps, **options,
    )  # fmt: skip


def _run_many(
    x: Tensor, routed: Tensor, weights: ExpertWeights, config: ModelConfig, out: Tensor,
    scratch: ExpertScratch, pdl: bool, exact: bool,
) -> None:  # fmt: skip
    """Pairs grouped by expert: six kernels."""
    n, top_k, width, inner = len(x), config.experts_per_token, config.width, config.expert_width
    pairs = n * top_k
    is_float32 = x.dtype == torch.float32
    large_blocks = not exact and not is_float32 and pairs >= config.experts * LARGE_BLOCK // 2
    rows = LARGE_BLOCK if large_blocks else SMALL_BLOCK
    expert_counts = {"E": config.experts, "EP": next_power_of_two(config.experts)}
    options = {"PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    block_args = (scratch.pairs, scratch.blocks, scratch.total)
    blocks = _max_blocks(pairs, config, rows)
    kernels.route[(-(-n // SMALL_BLOCK), -(-config.experts // 16))](
        routed, weights.router, _or(weights.router_bias, x), scratch.scores, n, D=width,
        E=config.experts, ROWS=SMALL_BLOCK, BE=16, BD=32 if is_float32 else 128,
        BIAS=weights.router_bias is not None, **options,
    )  # fmt: skip
    kernels.select_experts[(n,)](
        scratch.scores, _or(weights.selection_bias, x), _or(weights.scale, x), scratch.expert_ids,
        scratch.gates, scratch.counts, config.experts_scale, **_router_constants(weights, config),
        **options,
    )  # fmt: skip
    kernels.group_pairs[(config.experts,)](
        scratch.expert_ids, scratch.counts, *block_args, pairs, **expert_counts, ROWS=rows, BP=1024,
        **options,
    )  # fmt: skip
    tensors, constants = _layout(weights.gate_up)
    tile_rows, tile = _gemm_tile(weights.gate_up, large_blocks, is_float32)
    kernels.up_project[(blocks, -(-inner // tile_rows))](
        x, *tensors, _or(weights.gate_up.bias, x), scratch.inner, *block_args, inner,
        D=width, K=top_k, **constants, ROWS=rows, **tile, GLU=config.gated,
        ACTIVATION=ACTIVATIONS[config.activation], LIMIT=config.activation_limit,
        BIAS=weights.gate_up.bias is not None, **options,
    )  # fmt: skip
    tensors, constants = _layout(weights.down)
    tile_rows, tile = _gemm_tile(weights.down, large_blocks, is_float32)
    kernels.down_project[(blocks, -(-width // tile_rows))](
        scratch.inner, *tensors, _or(weights.down.bias, x), scratch.expert_out, *block_args, width,
        F=inner, **constants, ROWS=rows, **tile, BIAS=weights.down.bias is not None, **options,
    )  # fmt: skip
    kernels.combine[(n, -(-width // _COMBINE_COLUMNS))](
        scratch.expert_out, scratch.gates, scratch.counts, out,
        D=width, **expert_counts, K=top_k, BD=_COMBINE_COLUMNS, **options,
    )  # fmt: skip


def _or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Argument of a kernel that does not read it if there is no tensor."""
    return placeholder if tensor is None else tensor


def _router_constants(weights: ExpertWeights, config: ModelConfig) -> dict[str, Any]:
    experts, top_k = config.experts, config.experts_per_token
    return {
        "E": experts, "EP": next_power_of_two(experts), "K": top_k,
        "KP": next_power_of_two(top_k), "SIGMOID": config.router == "sigmoid",
        "NORMALIZE": config.normalize_experts, "BIASED": weights.selection_bias is not None,
        "SCALED": weights.scale is not None,
    }  # fmt: skip


def _layout(matrix: PlainMatrix | PackedMatrix) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Tensors and constants of a matrix for the kernels; BITS 0: not packed."""
    if isinstance(matrix, PackedMatrix):
        return matrix.kernel_tensors(), matrix.kernel_constants()
    constants = {"U": matrix.columns, "BITS": 0, "KIND": 0, "OFFSET": 0, "SHARE": 1}
    return (matrix.weight,) * 3, constants


def _gemm_tile(
    matrix: PlainMatrix | PackedMatrix, large_blocks: bool, is_float32: bool
) -> tuple[int, dict[str, int]]:
    """Rows of the matrix per program, and constants of a GEMM kernel."""
    unit = matrix.packing.unit if isinstance(matrix, PackedMatrix) else 1
    if is_float32:
        rows, columns, stages = _FLOAT32_TILE
    elif isinstance(matrix, PackedMatrix):
        rows, columns, stages = PACKED_TILE
    else:
        rows, columns, stages = LARGE_TILE if large_blocks else SMALL_TILE
    return rows, {"BN": rows, "BU": columns // unit, "SIZE": unit, "STAGES": stages}


@functools.cache
def split_units(units: int) -> tuple[int, int]:
    """Powers of two that together cover the units of a row; the second may be 0.

    Tiles are powers of two. Two of them have fewer unused units than one: 64 + 32 for 90.
    """
    padded = next_power_of_two(units)
    if padded == units:
        return units, 0
    second = next_power_of_two(units - padded // 2)
    return (padded, 0) if second == padded // 2 else (padded // 2, second)


def gather_tiling(
    rows: int, units: int, tiles: int, vectors: int, packed: bool, device: torch.device
) -> tuple[int, int, int]:
    """Rows per iteration and warps of a program, and programs per vector.

    All programs run at the same time: each iterates over its share of the rows.
    """
    if device.type != "cuda":
        return 32, 1, min(-(-rows // 32), 2)  # few launches and loops: the interpreter is slow
    per_thread = UNITS_PER_THREAD if packed else COLUMNS_PER_THREAD
    threads = units if packed else units * 2 / per_thread  # two rows: gate and up, or of down
    warps = max(1, min(MAX_WARPS, 1 << round(math.log2(max(1, threads / 32)))))
    block_rows = max(1, per_thread * 32 * warps // (units * tiles))
    block_rows = 1 << (block_rows.bit_length() - 1)
    blocks = -(-rows // block_rows)
    programs = max(1, num_multiprocessors(device) * (WARPS_PER_SM // warps) // vectors)
    iterations = -(-blocks // programs)
    return block_rows, warps, -(-blocks // iterations)
