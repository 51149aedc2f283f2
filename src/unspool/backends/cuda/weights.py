"""Weights of a model in the layout of the kernels: matrices with the same input are fused.

Query, key and value are one matrix, gate and up another. Norm gains are float32 and complete (a
stored w that means 1 + w is 1 + w here).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from unspool.backends.cuda.matmul import (
    Epilogue,
    NormWeights,
    PackedMatrix,
    exact_gemm,
    gemm,
    gemv,
)
from unspool.model.config import ModelConfig


class WeightMatrix(Protocol):
    """A weight matrix in any format: out = x · Wᵀ + bias."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def bias(self) -> Tensor | None: ...

    def gemv(self, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """Multiply x [columns], or each row of x [n, columns], with fused operations.

        A row's result does not depend on n.
        """

    def gemm(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        """out [M, rows] = x [M, columns] · Wᵀ + bias.

        `exact`: a row's result does not depend on M.
        """

    def float_rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainMatrix:
    """A matrix with weights in the dtype of the vectors."""

    weight: Tensor  # [rows, columns]
    bias: Tensor | None = None  # [rows]

    @property
    def rows(self) -> int:
        return int(self.weight.shape[0])

    @property
    def columns(self) -> int:
        return int(self.weight.shape[1])

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def gemv(self, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        gemv(self.weight, self.bias, x, out, epilogue)

    def gemm(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        if exact:
            exact_gemm(self.weight, self.bias, x, out, pdl=pdl)
        else:
            gemm(self.weight, self.bias, x, out)

    def float_rows(self, first: int, last: int) -> Tensor:
        return self.weight[first:last].float()


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrix:
    """Matrices of different formats, stacked by rows and multiplied one by one."""

    parts: tuple[WeightMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def bias(self) -> Tensor | None:
        biases = [part.bias for part in self.parts if part.bias is not None]
        return torch.cat(biases) if biases else None

    def _row_slices(self) -> Iterator[tuple[WeightMatrix, slice]]:
        first = 0
        for part in self.parts:
            yield part, slice(first, first + part.rows)
            first += part.rows

    def gemv(self, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """Never gated (see `WeightLoader`)."""
        for part, rows in self._row_slices():
            residual = None if epilogue.residual is None else epilogue.residual[..., rows]
            part.gemv(x, out[..., rows], replace(epilogue, residual=residual))

    def gemm(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        for part, rows in self._row_slices():
            part.gemm(x, out[:, rows], exact=exact, pdl=pdl)

    def float_rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` in float32."""
        blocks = [
            part.float_rows(max(first, rows.start) - rows.start, min(last, rows.stop) - rows.start)
            for part, rows in self._row_slices()
            if first < rows.stop and last > rows.start
        ]
        return torch.cat(blocks)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Weights of a mixture of experts. Matrices of all experts are stacked by rows."""

    router: Tensor  # [experts, width]
    # [experts * 2 * inner, width]: of each expert the rows of gate, then those of up; without a
    # gate [experts * inner, width].
    gate_up: PlainMatrix | PackedMatrix
    down: PlainMatrix | PackedMatrix  # [experts * width, inner]
    router_bias: Tensor | None = None  # [experts], float32, as the following
    selection_bias: Tensor | None = None  # added to the probabilities for the selection only
    scale: Tensor | None = None  # multiplies the gates of the selected experts


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """Weights of an attention layer."""

    # Rows: all query heads, then all key heads, all value heads and the gate, as far as the layer
    # has them.
    qkv: WeightMatrix
    out: WeightMatrix
    q_norm: NormWeights | None  # per head or over all heads (`config.qk_norm`)
    k_norm: NormWeights | None
    sinks: Tensor | None  # [heads], float32


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentWeights:
    """Weights of a recurrent layer (`model/layers/recurrent.py`). All vectors are float32."""

    kind: str  # conv, delta or mamba2
    projection: WeightMatrix  # all input projections
    out: WeightMatrix
    conv_weight: Tensor  # [kernel, channels]
    conv_bias: Tensor | None
    rate: Tensor | None  # [value_heads]: -exp(a_log)
    dt_bias: Tensor | None
    skip: Tensor | None  # Mamba-2's d
    norm_gain: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeights:
    """Weights of a dense feed-forward."""

    gate_up: WeightMatrix  # rows of gate, then rows of up; of up alone if the family has no gate
    down: WeightMatrix


@dataclass(frozen=True, slots=True, eq=False)
class ParallelNorms:
    """Norms of a dense feed-forward and experts in parallel."""

    dense: NormWeights
    dense_post: NormWeights
    experts: NormWeights
    experts_post: NormWeights
    router: NormWeights  # includes the scale of the router's input


@dataclass(frozen=True, slots=True, eq=False)
class FeedWeights:
    """Weights of a feed-forward: dense, experts, or both."""

    dense: DenseWeights | None  # beside experts: see `parallel`; else this is the shared expert
    experts: ExpertWeights | None
    shared_gate: Tensor | None  # [width]: gate of the shared expert
    parallel: ParallelNorms | None


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputWeights:
    """Weights that add a per-layer embedding to the residual stream."""

    gate: WeightMatrix
    out: WeightMatrix
    norm: NormWeights


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one layer; None for parts that the layer does not have."""

    attention_norm: NormWeights | None
    mixer: AttentionWeights | RecurrentWeights | None
    attention_post_norm: NormWeights | None
    feed_norm: NormWeights | None
    feed: FeedWeights | None
    feed_post_norm: NormWeights | None
    token_input: TokenInputWeights | None
    scale: float  # multiplies the layer's output


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputsWeights:
    """Per-layer embeddings of the tokens."""

    embed: PlainMatrix | PackedMatrix  # [vocabulary, layers * token width]
    project: WeightMatrix  # [layers * token width, width]
    norm: NormWeights


@dataclass(frozen=True, slots=True, eq=False)
class TransformWeights:
    """A dense layer between the last layer and the last norm."""

    norm: NormWeights | None
    dense: WeightMatrix


MatrixParts = tuple[tuple[str, int], ...]
"""Names of the weights that are stacked in a matrix, with their numbers of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of a model."""

    config: ModelConfig
    embed: PlainMatrix | PackedMatrix  # [vocabulary, width]
    position_embed: Tensor | None  # [context, width]
    embed_norm: NormWeights | None
    token_inputs: TokenInputsWeights | None
    layers: list[LayerWeights]
    transform: TransformWeights | None
    norm: NormWeights
    head: WeightMatrix  # the embedding itself where the two are tied
    parts: dict[WeightMatrix, MatrixParts]  # of every matrix that a product multiplies with
    precision: str  # format of most weights

    def matrices(self) -> Iterator[WeightMatrix]:
        """Yield all matrices; experts are stacked by rows."""
        yield self.embed
        yield from self.parts
        for layer in self.layers:
            if layer.feed is not None and layer.feed.experts is not None:
                yield PlainMatrix(layer.feed.experts.router)
                yield layer.feed.experts.gate_up
                yield layer.feed.experts.down

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device
