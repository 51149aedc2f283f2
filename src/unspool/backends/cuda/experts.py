"""Mixture of experts on the GPU: kernel launches, all of which can be captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.backends.cuda.kernels import experts as kernels
from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.products import next_power_of_two
from unspool.backends.cuda.weights import ExpertWeights, Weights
from unspool.model.config import ModelConfig

SMALL_BLOCK = 16  # rows of a block: the minimum of tensor cores
LARGE_BLOCK = 64  # rows of a block if experts have many tokens each
STAGES = 3
_COMBINE_COLUMNS = 1024  # columns per program


@dataclass(frozen=True, slots=True, eq=False)
class ExpertScratch:
    """Buffers between the kernels."""

    scores: Tensor  # [tokens, experts], float32
    expert_ids: Tensor  # [tokens, experts a token]
    gates: Tensor  # [tokens, experts a token], float32
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
) -> None:
    """Route each x [n, width] to its experts; out [n, width] is their weighted sum.

    A token's result does not depend on other tokens; with `exact` it is bit-identical for any
    number of tokens.
    """
    n, top_k, width, inner = len(x), config.experts_per_token, config.width, config.expert_width
    pairs = n * top_k
    is_float32 = x.dtype == torch.float32  # no tensor cores: small tiles save registers
    large_blocks = not exact and not is_float32 and pairs >= config.experts * LARGE_BLOCK // 2
    rows = LARGE_BLOCK if large_blocks else SMALL_BLOCK
    columns, depth = (
        (32, 32) if is_float32 else (128 if large_blocks else 32, 64 if large_blocks else 128)
    )
    expert_counts = {"E": config.experts, "EP": next_power_of_two(config.experts)}
    launch_options = {"PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    block_args = (scratch.pairs, scratch.blocks, scratch.total)
    blocks = _max_blocks(pairs, config, rows)
    kernels.route[(-(-n // SMALL_BLOCK), -(-config.experts // 16))](
        x, weights.router, scratch.scores, n, D=width, E=config.experts, ROWS=SMALL_BLOCK, BE=16,
        BD=32 if is_float32 else 128, **launch_options,
    )  # fmt: skip
    kernels.select_experts[(n,)](
        scratch.scores, scratch.expert_ids, scratch.gates, scratch.counts, **expert_counts, K=top_k,
        KP=next_power_of_two(top_k), NORMALIZE=config.normalize_experts, **launch_options,
    )  # fmt: skip
    kernels.group_pairs[(config.experts,)](
        scratch.expert_ids,
        scratch.counts,
        *block_args,
        pairs,
        **expert_counts,
        ROWS=rows,
        BP=1024,
        **launch_options,
    )
    kernels.up_project[(blocks, -(-inner // columns))](
        x, weights.gate_up, scratch.inner, *block_args,
        D=width, F=inner, K=top_k, ROWS=rows, BF=columns, BD=depth, STAGES=STAGES,
        ACTIVATION=ACTIVATIONS[config.activation], **launch_options,
    )  # fmt: skip
    kernels.down_project[(blocks, -(-width // columns))](
        scratch.inner, weights.down, scratch.expert_out, *block_args,
        D=width, F=inner, ROWS=rows, BD=columns, BF=depth, STAGES=STAGES, **launch_options,
    )  # fmt: skip
    kernels.combine[(n, -(-width // _COMBINE_COLUMNS))](
        scratch.expert_out, scratch.gates, scratch.counts, out,
        D=width, **expert_counts, K=top_k, BD=_COMBINE_COLUMNS, **launch_options,
    )  # fmt: skip
