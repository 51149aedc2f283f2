"""One rank's part of a transformer: the plain transformer with fewer heads.

The computation is that of the plain transformer; hooks sum over the ranks after the matrices whose
product is only a partial result (`attention.out`, `feed.down`, the experts).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.backends.torch.parallel.ranks import Ranks
from unspool.model.checkpoint import Checkpoint, load_weights_into
from unspool.model.config import ModelConfig
from unspool.model.layers.beside import DenseAndExperts
from unspool.model.layers.feed import Experts
from unspool.model.layers.parts import Norm
from unspool.model.split import check_shardable, shard_config
from unspool.model.transformer import Attention, Layer, Transformer


class SplitTransformer(Transformer):
    """A rank's part of the model of `full_config`. All ranks must run their parts together."""

    def __init__(self, full_config: ModelConfig, ranks: Ranks) -> None:
        super().__init__(shard_config(full_config, ranks.share))
        self.full_config, self.ranks = full_config, ranks
        self.embed = _SplitEmbedding(full_config, full_config.width, ranks)
        if self.token_inputs is not None:
            width = full_config.layers * full_config.token_width
            self.token_inputs.embed = _SplitEmbedding(full_config, width, ranks)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            _sum_over_ranks(layer, self.config, ranks)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of the full vocabulary on rank 0; of this rank's part on the others."""
        part = super().logits(x)
        sizes = [
            len(share.local_range(self.full_config.vocab_size))
            for share in self.ranks.share.all_ranks
        ]
        padded = functional.pad(part, (0, max(sizes) - part.shape[-1]))
        gathered = self.ranks.groups.gather(padded)
        parts = [logits[..., :size] for logits, size in zip(gathered, sizes, strict=False)]
        return torch.cat(parts, -1) if parts else part


class _SplitEmbedding(nn.Embedding):
    """This rank's rows of an embedding; tokens of other ranks are zero before the sum."""

    def __init__(self, full_config: ModelConfig, width: int, ranks: Ranks) -> None:
        rows = ranks.share.local_range(full_config.vocab_size)
        super().__init__(len(rows), width)
        self._first, self._sum = int(rows[0]), ranks.groups.sum

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens - self._first
        is_remote = (rows < 0) | (rows >= self.num_embeddings)
        vectors = super().forward(rows.masked_fill(is_remote, 0))
        return self._sum(vectors.masked_fill(is_remote[..., None], 0))


class _SplitNorm(Norm):
    """A norm over the heads of all ranks."""

    def __init__(self, config: ModelConfig, size: int, ranks: Ranks) -> None:
        super().__init__(config, size, "rms")
        self._ranks = ranks

    def mean_square(self, x: Tensor) -> Tensor:
        return self._ranks.groups.sum(super().mean_square(x)) / self._ranks.share.ranks


def _sum_over_ranks(layer: Layer, config: ModelConfig, ranks: Ranks) -> None:
    """Register the hooks of one layer that sum partial results over the ranks."""

    def sum_output(module: nn.Module) -> None:
        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return ranks.groups.sum(output)

        module.register_forward_hook(hook)

    def sum_input(module: nn.Module) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            return ranks.groups.sum(inputs[0])

        module.register_forward_pre_hook(hook)

    kind = config.mixer(layer.layer)
    if kind == "attention":
        sum_output(layer.attention.out)
        _split_norms(layer.attention, config, ranks)
    elif kind == "delta" and layer.mixer is not None:
        sum_output(layer.mixer.get_submodule("out"))
    if layer.feed is None:
        return
    if isinstance(layer.feed, DenseAndExperts):
        sum_output(layer.feed.dense.get_submodule("down"))
        sum_input(layer.feed.experts_post_norm)
    elif isinstance(layer.feed, Experts):
        sum_output(layer.feed)
    else:
        sum_output(layer.feed.get_submodule("down"))


def _split_norms(attention: Attention, config: ModelConfig, ranks: Ranks) -> None:
    if config.qk_norm != "whole":
        return
    attention.q_norm = _SplitNorm(config, attention.shape.out_width, ranks)
    if attention.k_norm is not None:
        attention.k_norm = _SplitNorm(config, attention.shape.kv_width, ranks)


def load_part(checkpoint: Checkpoint, ranks: Ranks, dtype: str) -> SplitTransformer:
    """Load this rank's part of a checkpoint; at most one full tensor is in memory at a time."""
    full_config, share = checkpoint.config, ranks.share
    check_shardable(full_config, share.ranks)
    with torch.device("meta"):
        model = SplitTransformer(full_config, ranks)
    load_weights_into(
        model,
        checkpoint,
        dtype=dtype,
        device_of=lambda name: str(ranks.device),
        part_of=lambda name, stored: share.local_part(full_config, name, stored),
    )
    return model
