"""Weights of a model in the layout of the kernels: matrices with the same input are fused.

Query, key and value are one matrix, gate and up another. Norm gains are float32 and complete (a
stored w that means 1 + w is 1 + w here).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unspool.backends.cuda.exact import exact_gemm
from unspool.backends.cuda.packed import PackedMatrix
from unspool.backends.cuda.products import Epilogue, NormWeights, gemm, gemv
from unspool.model.config import ModelConfig
from unspool.model.layers.feed import Experts, FeedForward
from unspool.model.layers.parts import Norm
from unspool.model.transformer import Layer, Transformer


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
class ExpertWeights:
    """Weights of a mixture of experts."""

    router: Tensor  # [experts, width]
    gate_up: Tensor  # [experts, 2 * inner, width]: rows of gate, then rows of up
    down: Tensor  # [experts, width, inner]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one layer; None for parts that the model does not have."""

    attention_norm: NormWeights | None
    qkv: WeightMatrix  # rows: all query heads, then all key heads, then all value heads
    q_norm: NormWeights | None  # per head or over all heads (`config.qk_norm`)
    k_norm: NormWeights | None
    out: WeightMatrix
    attention_post_norm: NormWeights | None
    feed_norm: NormWeights | None
    gate_up: (
        WeightMatrix | None
    )  # rows of gate, then rows of up; of up alone if the family has no gate
    down: WeightMatrix | None
    experts: ExpertWeights | None  # instead of gate_up and down
    feed_post_norm: NormWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of a model."""

    config: ModelConfig
    embed: PlainMatrix | PackedMatrix  # [vocabulary, width]
    position_embed: Tensor | None  # [context, width]
    layers: list[LayerWeights]
    norm: NormWeights
    head: WeightMatrix  # the embedding itself where the two are tied
    precision: str = ""  # format of most weights; empty: dtype of the activations

    def matrices(self) -> Iterator[WeightMatrix]:
        """Yield all matrices in order of use; experts are stacked by rows."""
        yield self.embed
        for layer in self.layers:
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                if matrix is not None:
                    yield matrix
            if layer.experts is not None:
                yield PlainMatrix(layer.experts.router)
                yield PlainMatrix(layer.experts.gate_up.flatten(0, 1))
                yield PlainMatrix(layer.experts.down.flatten(0, 1))
        yield self.head

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device


def fuse_weights(model: Transformer) -> Weights:
    """Fuse the weights of a plain transformer; it may be freed afterwards."""
    embed = PlainMatrix(model.embed.weight)
    position = model.position_embed
    norm = _norm_weights(model.norm)
    assert norm is not None
    return Weights(
        config=model.config,
        embed=embed,
        position_embed=None if position is None else position.weight,
        layers=[_fuse_layer(layer) for layer in model.layers if isinstance(layer, Layer)],
        norm=norm,
        head=embed if model.head is None else _concat(model.head),
    )


def _fuse_layer(layer: Layer) -> LayerWeights:
    attention, feed = layer.attention, layer.feed
    assert attention.v is not None, "available.py rejects models whose keys are values"
    return LayerWeights(
        attention_norm=_norm_weights(layer.attention_norm),
        qkv=_concat(attention.q, attention.k, attention.v),
        q_norm=_norm_weights(attention.q_norm),
        k_norm=_norm_weights(attention.k_norm),
        out=_concat(attention.out),
        attention_post_norm=_norm_weights(layer.attention_post_norm),
        feed_norm=_norm_weights(layer.feed_norm),
        gate_up=_fuse_gate_up(feed) if isinstance(feed, FeedForward) else None,
        down=_concat(feed.down) if isinstance(feed, FeedForward) else None,
        experts=_fuse_experts(feed) if isinstance(feed, Experts) else None,
        feed_post_norm=_norm_weights(layer.feed_post_norm),
    )


def _fuse_gate_up(feed: FeedForward) -> WeightMatrix:
    return _concat(feed.up) if feed.gate is None else _concat(feed.gate, feed.up)


def _fuse_experts(feed: Experts) -> ExpertWeights:
    assert feed.gate is not None, "available.py rejects experts without a gate"
    gate_up = torch.cat((feed.gate.weight, feed.up.weight), 1)
    return ExpertWeights(feed.router.weight, gate_up, feed.down.weight)


def _concat(*parts: torch.nn.Linear) -> PlainMatrix:
    if len(parts) == 1:  # may be a transposed view
        weight = parts[0].weight.contiguous()
    else:
        weight = torch.cat([part.weight for part in parts])
    if parts[0].bias is None:
        return PlainMatrix(weight)
    return PlainMatrix(weight, torch.cat([part.bias for part in parts]))


def _norm_weights(norm: torch.nn.Module | None) -> NormWeights | None:
    if not isinstance(norm, Norm):
        return None
    gain = norm.weight.float()
    return NormWeights(
        1 + gain if norm.plus_one else gain, None if norm.bias is None else norm.bias.float()
    )
