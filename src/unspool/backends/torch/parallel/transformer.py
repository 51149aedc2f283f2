"""One rank's part of a transformer: the plain one with fewer heads, whose ranks sum what they find.

What the plain transformer computes stays as it is; sums over the ranks are put behind the matrices
whose outcome is only a part of it (`attention.out`, `feed.down`, the experts' answers).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.backends.torch.parallel.ranks import Ranks
from unspool.model.checkpoint import Checkpoint, fill_transformer
from unspool.model.config import ModelConfig
from unspool.model.layers.beside import DenseAndExperts
from unspool.model.layers.feed import Experts
from unspool.model.layers.parts import Norm
from unspool.model.split import check_split, part_config
from unspool.model.transformer import Attention, Layer, Transformer


class SplitTransformer(Transformer):
    """A rank's part of the model that `whole` describes; runs when all ranks run theirs."""

    def __init__(self, whole: ModelConfig, ranks: Ranks) -> None:
        super().__init__(part_config(whole, ranks.share))
        self.whole, self.ranks = whole, ranks
        self.embed = _SplitEmbedding(whole, whole.width, ranks)
        if self.token_inputs is not None:
            every = whole.layers * whole.token_width
            self.token_inputs.embed = _SplitEmbedding(whole, every, ranks)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            _sum_over_ranks(layer, self.config, ranks)

    def logits(self, x: Tensor) -> Tensor:
        """Those of the whole vocabulary on the first rank; the others give theirs to it."""
        own = super().logits(x)
        sizes = [len(one.span(self.whole.vocab_size)) for one in self.ranks.share.every]
        filled = functional.pad(own, (0, max(sizes) - own.shape[-1]))
        every = self.ranks.groups.gather(filled)
        parts = [one[..., :size] for one, size in zip(every, sizes, strict=False)]
        return torch.cat(parts, -1) if parts else own


class _SplitEmbedding(nn.Embedding):
    """Some rows of a table; what the tokens of others are, the others say."""

    def __init__(self, whole: ModelConfig, width: int, ranks: Ranks) -> None:
        rows = ranks.share.span(whole.vocab_size)
        super().__init__(len(rows), width)
        self._first, self._sum = int(rows[0]), ranks.groups.sum

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self._first
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        found = super().forward(own.masked_fill(elsewhere, 0))
        return self._sum(found.masked_fill(elsewhere[..., None], 0))


class _SplitNorm(Norm):
    """Over the heads of all ranks."""

    def __init__(self, config: ModelConfig, size: int, ranks: Ranks) -> None:
        super().__init__(config, size, "rms")
        self._ranks = ranks

    def mean_square(self, x: Tensor) -> Tensor:
        return self._ranks.groups.sum(super().mean_square(x)) / self._ranks.share.ranks


def _sum_over_ranks(layer: Layer, config: ModelConfig, ranks: Ranks) -> None:
    """Put the sums into one layer."""

    def behind(module: nn.Module) -> None:
        def summed(_: nn.Module, __: Any, found: Tensor) -> Tensor:
            return ranks.groups.sum(found)

        module.register_forward_hook(summed)

    def before(module: nn.Module) -> None:
        def summed(_: nn.Module, given: tuple[Tensor]) -> Tensor:
            return ranks.groups.sum(given[0])

        module.register_forward_pre_hook(summed)

    kind = config.mixer(layer.layer)
    if kind == "attention":
        behind(layer.attention.out)
        _split_norms(layer.attention, config, ranks)
    elif kind == "delta" and layer.mixer is not None:
        behind(layer.mixer.get_submodule("out"))
    if layer.feed is None:
        return
    if isinstance(layer.feed, DenseAndExperts):
        behind(layer.feed.dense.get_submodule("down"))
        before(layer.feed.experts_post_norm)
    elif isinstance(layer.feed, Experts):
        behind(layer.feed)
    else:
        behind(layer.feed.get_submodule("down"))


def _split_norms(attention: Attention, config: ModelConfig, ranks: Ranks) -> None:
    if config.qk_norm != "whole":
        return
    attention.q_norm = _SplitNorm(config, attention.shape.out_width, ranks)
    if attention.k_norm is not None:
        attention.k_norm = _SplitNorm(config, attention.shape.kv_width, ranks)


def load_part(checkpoint: Checkpoint, ranks: Ranks, dtype: str) -> SplitTransformer:
    """This rank's part of a checkpoint; no more of it is ever in memory than one whole tensor."""
    whole, share = checkpoint.config, ranks.share
    check_split(whole, share.ranks)
    with torch.device("meta"):
        model = SplitTransformer(whole, ranks)
    fill_transformer(
        model,
        checkpoint,
        dtype=dtype,
        device_of=lambda name: str(ranks.device),
        part_of=lambda name, stored: share.part_of(whole, name, stored),
    )
    return model
