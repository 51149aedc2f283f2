"""A model's weights as the kernels want them: what multiplies the same vector lies together.

Query, key and value are one matrix, gate and up another. Gains of norms are 32-bit numbers that
are multiplied with as they are (a stored w that means 1 + w is 1 + w here).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unspool.backends.cuda.exact import exact_many
from unspool.backends.cuda.packed import PackedMatrix
from unspool.backends.cuda.products import Around, NormWeights, times_each, times_many
from unspool.model.config import ModelConfig
from unspool.model.layers.feed import Experts, FeedForward
from unspool.model.layers.parts import Norm
from unspool.model.transformer import Layer, Transformer


class Matrix(Protocol):
    """What vectors are multiplied with, however its weights are kept: out = x · Wᵀ + bias."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def bias(self) -> Tensor | None: ...

    def times_each(self, x: Tensor, out: Tensor, by: Around) -> None:
        """For one vector [columns], or each of a few [n, columns] as if it were alone, with what is
        folded into the product."""

    def times_many(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        """out [M, rows] = x [M, columns] · Wᵀ + bias. With `exact` each line's numbers are summed
        in the same order whatever M is."""

    def part(self, first: int, last: int) -> Tensor:
        """Some rows in 32 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainMatrix:
    """A matrix whose weights are in the type of the vectors."""

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

    def times_each(self, x: Tensor, out: Tensor, by: Around) -> None:
        times_each(self.weight, self.bias, x, out, by)

    def times_many(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        if exact:
            exact_many(self.weight, self.bias, x, out, pdl=pdl)
        else:
            times_many(self.weight, self.bias, x, out)

    def part(self, first: int, last: int) -> Tensor:
        return self.weight[first:last].float()


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The feed-forwards that a router chooses from."""

    router: Tensor  # [experts, width]
    gate_up: Tensor  # [experts, 2 * inner, width]: rows of gate, then rows of up
    down: Tensor  # [experts, width, inner]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. What a family does not have is None."""

    attention_norm: NormWeights | None
    qkv: Matrix  # rows: all query heads, then all key heads, then all value heads
    q_norm: NormWeights | None  # over a head, or over all of them (`config.qk_norm`)
    k_norm: NormWeights | None
    out: Matrix
    attention_post_norm: NormWeights | None
    feed_norm: NormWeights | None
    gate_up: Matrix | None  # rows of gate, then rows of up; of up alone if the family has no gate
    down: Matrix | None
    experts: ExpertWeights | None  # instead of the two above
    feed_post_norm: NormWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A whole model."""

    config: ModelConfig
    embed: PlainMatrix | PackedMatrix  # [vocabulary, width]
    position_embed: Tensor | None  # [context, width]
    layers: list[LayerWeights]
    norm: NormWeights
    head: Matrix  # the embedding itself where the two are tied
    precision: str = ""  # what most weights are kept in; empty: in the activations' type

    def matrices(self) -> Iterator[Matrix]:
        """All of them, in the order that the data meets them; experts one below the other."""
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


def fused(model: Transformer) -> Weights:
    """The weights of a plain transformer, which may be let go of afterwards."""
    embed = PlainMatrix(model.embed.weight)
    position = model.position_embed
    norm = _norm(model.norm)
    assert norm is not None
    return Weights(
        config=model.config,
        embed=embed,
        position_embed=None if position is None else position.weight,
        layers=[_layer(layer) for layer in model.layers if isinstance(layer, Layer)],
        norm=norm,
        head=embed if model.head is None else _stacked(model.head),
    )


def _layer(layer: Layer) -> LayerWeights:
    attention, feed = layer.attention, layer.feed
    assert attention.v is not None, "available.py refuses keys that are values too"
    return LayerWeights(
        attention_norm=_norm(layer.attention_norm),
        qkv=_stacked(attention.q, attention.k, attention.v),
        q_norm=_norm(attention.q_norm),
        k_norm=_norm(attention.k_norm),
        out=_stacked(attention.out),
        attention_post_norm=_norm(layer.attention_post_norm),
        feed_norm=_norm(layer.feed_norm),
        gate_up=_gate_up(feed) if isinstance(feed, FeedForward) else None,
        down=_stacked(feed.down) if isinstance(feed, FeedForward) else None,
        experts=_experts(feed) if isinstance(feed, Experts) else None,
        feed_post_norm=_norm(layer.feed_post_norm),
    )


def _gate_up(feed: FeedForward) -> Matrix:
    return _stacked(feed.up) if feed.gate is None else _stacked(feed.gate, feed.up)


def _experts(feed: Experts) -> ExpertWeights:
    assert feed.gate is not None, "experts without a gate are left to plain torch"
    both = torch.cat((feed.gate.weight, feed.up.weight), 1)
    return ExpertWeights(feed.router.weight, both, feed.down.weight)


def _stacked(*parts: torch.nn.Linear) -> PlainMatrix:
    if len(parts) == 1:  # some files have a matrix the other way round, and it is but seen turned
        weight = parts[0].weight.contiguous()
    else:
        weight = torch.cat([part.weight for part in parts])
    if parts[0].bias is None:
        return PlainMatrix(weight)
    return PlainMatrix(weight, torch.cat([part.bias for part in parts]))


def _norm(norm: torch.nn.Module | None) -> NormWeights | None:
    if not isinstance(norm, Norm):
        return None
    gain = norm.weight.float()
    return NormWeights(
        1 + gain if norm.plus_one else gain, None if norm.bias is None else norm.bias.float()
    )
