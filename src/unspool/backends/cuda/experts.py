"""Routed feed-forwards on the GPU: the launches of their kernels, which can all be captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.backends.cuda.kernels import experts as kernels
from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.products import power_of_two
from unspool.backends.cuda.weights import ExpertWeights, Weights
from unspool.model.config import ModelConfig

FEW = 16  # rows of a block: what tensor cores want at least
MANY = 64  # where experts have many tokens each
STAGES = 3
_COMBINED = 1024  # numbers of a token that a program adds up


@dataclass(frozen=True, slots=True, eq=False)
class ExpertScratch:
    """What lies between the kernels, for a number of tokens."""

    scores: Tensor  # [tokens, experts], float32
    chosen: Tensor  # [tokens, experts a token]
    shares: Tensor  # [tokens, experts a token], float32
    counts: Tensor  # [experts]: all zero between launches
    pairs: Tensor  # pairs in blocks of one expert each
    blocks: Tensor  # each block's expert, and its rows that are pairs
    total: Tensor  # how many blocks there are
    inner: Tensor  # [pairs, expert width]
    answers: Tensor  # [pairs, width]

    @classmethod
    def for_lines(cls, lines: int, config: ModelConfig, weights: Weights) -> ExpertScratch:
        """Room for so many tokens at a time; none in a model without experts."""
        lines = lines if config.experts else 0
        device, pairs = weights.device, lines * config.experts_per_token

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            scores=new(lines, config.experts, dtype=torch.float32),
            chosen=new(lines, config.experts_per_token),
            shares=new(lines, config.experts_per_token, dtype=torch.float32),
            counts=new(config.experts).zero_(),
            pairs=new(max(_most_blocks(pairs, config, rows) * rows for rows in (FEW, MANY))),
            blocks=new(_most_blocks(pairs, config, FEW), 2),
            total=new(1),
            inner=new(pairs, config.expert_width, dtype=weights.dtype),
            answers=new(pairs, config.width, dtype=weights.dtype),
        )


def _most_blocks(pairs: int, config: ModelConfig, rows: int) -> int:
    """Each expert that is chosen may have one block that is not full."""
    return min(pairs, pairs // rows + config.experts)


def experts(
    x: Tensor,
    weights: ExpertWeights,
    config: ModelConfig,
    out: Tensor,
    scratch: ExpertScratch,
    *,
    pdl: bool,
    exact: bool = False,
) -> None:
    """out [n, width]: what the experts chosen for each x [n, width] say.

    A token's numbers do not depend on the others in the same step; with `exact` they are the same
    bits for any number of tokens.
    """
    n, each, width, inner = len(x), config.experts_per_token, config.width, config.expert_width
    pairs = n * each
    wide = x.dtype == torch.float32  # no tensor cores: small tiles, for the registers' sake
    crowded = not exact and not wide and pairs >= config.experts * MANY // 2
    rows = MANY if crowded else FEW
    columns, depth = (32, 32) if wide else (128 if crowded else 32, 64 if crowded else 128)
    sizes = {"E": config.experts, "EP": power_of_two(config.experts)}
    shared = {"PDL": pdl, "launch_pdl": pdl, "num_warps": 4}
    arranged = (scratch.pairs, scratch.blocks, scratch.total)
    blocks = _most_blocks(pairs, config, rows)
    kernels.route[(-(-n // FEW), -(-config.experts // 16))](
        x, weights.router, scratch.scores, n,
        D=width, E=config.experts, ROWS=FEW, SOME=16, BD=32 if wide else 128, **shared,
    )  # fmt: skip
    kernels.choose[(n,)](
        scratch.scores, scratch.chosen, scratch.shares, scratch.counts,
        **sizes, K=each, KP=power_of_two(each), NORMALIZE=config.normalize_experts, **shared,
    )  # fmt: skip
    kernels.arrange[(config.experts,)](
        scratch.chosen, scratch.counts, *arranged, pairs, **sizes, ROWS=rows, BP=1024, **shared
    )
    kernels.widen[(blocks, -(-inner // columns))](
        x, weights.gate_up, scratch.inner, *arranged,
        D=width, F=inner, K=each, ROWS=rows, BF=columns, BD=depth, STAGES=STAGES,
        ACTIVATION=ACTIVATIONS[config.activation], **shared,
    )  # fmt: skip
    kernels.narrow[(blocks, -(-width // columns))](
        scratch.inner, weights.down, scratch.answers, *arranged,
        D=width, F=inner, ROWS=rows, BD=columns, BF=depth, STAGES=STAGES, **shared,
    )  # fmt: skip
    kernels.combine[(n, -(-width // _COMBINED))](
        scratch.answers, scratch.shares, scratch.counts, out,
        D=width, **sizes, K=each, BD=_COMBINED, **shared,
    )  # fmt: skip
