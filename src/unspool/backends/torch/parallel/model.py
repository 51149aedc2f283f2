"""Tensor parallelism: the part of a model on each rank, and rank 0, which the engine drives."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.backends.step import CompletedStep, Floats, Observations, StepBatch, StepResult
from unspool.backends.torch.backend import (
    TorchBackend,
    TorchModel,
    cache_size,
    fingerprint_indices,
    to_numpy,
)
from unspool.backends.torch.parallel.ranks import (
    RankError,
    RankMessage,
    Ranks,
    adapter_message,
    parse_adapter,
    parse_step,
    step_message,
)
from unspool.errors import UnspoolError
from unspool.model.adapters import Adapter, LowRank
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import Checkpoint, hash_weights, load_weights_into
from unspool.model.files.sharding import (
    Ints,
    TensorParallelRank,
    check_shardable,
    is_added_once,
    local_value_heads,
    shard_config,
    shard_of,
)
from unspool.model.layers.parts import DenseAndExperts, Experts, Norm
from unspool.model.layers.transformer import Attention, Layer, Transformer
from unspool.model.weights import weight_shapes

# -- One rank's part of a transformer: the plain transformer with fewer heads
#
# The computation is that of the plain transformer; hooks sum over the ranks after the matrices
# whose product is only a partial result (`attention.out`, `feed.down`, the experts).


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


# -- A rank's part of one model, and its handling of messages


class PartBackend(TorchBackend):
    """A rank's part of every step. Page and slot numbers are the same on all ranks; they hold the
    keys, values and states of this rank's heads."""

    sites: frozenset[str] = frozenset()  # a rank has only a part of each value

    def __init__(self, model: SplitTransformer, memory: int | None, context: int) -> None:
        self._full_config, self._ranks = model.full_config, model.ranks
        count = self._ranks.share.ranks
        size = cache_size(model, None if memory is None else memory // count)
        pages, states = self._ranks.groups.minimum(*size)
        super().__init__(model, page_count=pages, state_count=states, context=context)
        self.vocab_size = model.full_config.vocab_size
        self.page_bytes, self.state_bytes = self.page_bytes * count, self.state_bytes * count

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        super().set_adapter(number, adapter and self._split_adapter(adapter))

    def _split_adapter(self, adapter: Adapter) -> Adapter:
        """This rank's part of an adapter."""
        parts = dict(adapter.parts)
        for name, full in adapter.parts.items():
            cut = shard_of(self._full_config, name, self._ranks.share)
            if cut is not None and cut.axis == 0:
                parts[name] = LowRank(full.down, full.up[cut.indices], full.scale)
            elif cut is not None:
                parts[name] = LowRank(full.down[:, cut.indices], full.up, full.scale)
        return Adapter(parts)

    def _run(self, batch: StepBatch) -> StepResult:
        result = super()._run(batch)
        if result.observations is not None and result.observations.attention:
            result.observations = self._gather_heads(result.observations)
        return result

    def _gather_heads(self, inside: Observations) -> Observations:
        """Gather the observed heads of all ranks on rank 0."""
        config, recurrent = self._full_config, inside.recurrent

        def attention_heads(share: TensorParallelRank, layer: int) -> Ints:
            return share.local_range(config.shape(layer).heads)

        attention = [
            self._gather(weights, config.heads, attention_heads) for weights in inside.attention
        ]
        shape = config.recurrence
        if recurrent and shape is not None and "delta" in config.mixers:

            def recurrent_heads(share: TensorParallelRank, layer: int) -> Ints:
                return local_value_heads(shape, share)

            recurrent = [
                self._gather(stats.swapaxes(1, 2), shape.value_heads, recurrent_heads)
                for stats in recurrent
            ]
            recurrent = [stats.swapaxes(1, 2) for stats in recurrent]
        return Observations(
            inside.residuals, attention, inside.parts, inside.first_position, recurrent
        )

    def _gather(
        self, part: Floats, heads: int, heads_of_share: Callable[[TensorParallelRank, int], Ints]
    ) -> Floats:
        """Gather values [layers, local heads, ...] of all ranks into [layers, heads, ...]."""
        tensor = torch.from_numpy(np.ascontiguousarray(part)).to(self._ranks.device)
        full = np.zeros((part.shape[0], heads, *part.shape[2:]), np.float32)
        gathered = self._ranks.groups.gather(tensor)
        for share, rank_part in zip(self._ranks.share.all_ranks, gathered, strict=False):
            for layer, values in enumerate(to_numpy(rank_part)):
                indices = heads_of_share(share, layer)
                full[layer, indices] = values[: len(indices)]
        return full


class ModelPart:
    """A rank's part of a model, and of the backend once the engine has one."""

    def __init__(self, model: SplitTransformer) -> None:
        self.model = model
        self._backend: PartBackend | None = None

    def handle(self, message: RankMessage) -> None:
        """Run a message of rank 0."""
        facts = message.facts
        if message.kind == "open":
            self._backend = PartBackend(self.model, facts["memory"], facts["context"])
        elif message.kind == "step" and self._backend is not None:
            self._backend.launch(parse_step(message))
        elif message.kind == "adapter" and self._backend is not None:
            self._backend.set_adapter(facts["number"], parse_adapter(message))
        elif message.kind == "logits":
            self.logits(message.arrays["vectors"])
        elif message.kind == "rows":
            self.rows(facts["name"], facts["start"], facts["stop"])
        elif message.kind == "fingerprint":
            self.fingerprint()
        else:
            raise UnspoolError(f"unknown rank message: {message.kind!r}")

    @torch.inference_mode()
    def logits(self, vectors: Floats) -> Floats:
        weight = self.model.norm.weight
        tensor = torch.from_numpy(np.array(vectors)).to(weight.device, weight.dtype)
        return to_numpy(self.model.logits(tensor))

    def rows(self, name: str, start: int, stop: int) -> Floats:
        """Rows of a weight whose rows are split over the ranks."""
        weight = self.model.get_parameter(name)
        cut = shard_of(self.model.full_config, name, self.model.ranks.share)
        assert cut is not None and cut.axis == 0
        rows = weight.new_zeros(stop - start, *weight.shape[1:])
        is_local = (cut.indices >= start) & (cut.indices < stop)
        rows[torch.from_numpy(cut.indices[is_local] - start)] = weight[torch.from_numpy(is_local)]
        return to_numpy(self.model.ranks.groups.sum(rows))

    def fingerprint(self) -> str:
        """Fingerprint of the full model, independent of the number of ranks."""
        ranks, sizes = self.model.ranks, sorted(weight_shapes(self.model.full_config).items())
        values = np.stack([self._sample_values(name, shape) for name, shape in sizes])
        for part in ranks.groups.gather(torch.from_numpy(values).to(ranks.device)):
            values = np.where(np.isnan(values), to_numpy(part), values)
        return hash_weights(
            (name, shape, values[index]) for index, (name, shape) in enumerate(sizes)
        )

    def _sample_values(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Some values of a weight; NaN where another rank has them."""
        share, indices = self.model.ranks.share, list(fingerprint_indices(shape))
        is_local = np.full(len(indices[0]), not (is_added_once(name) and share.rank))
        cut = shard_of(self.model.full_config, name, share)
        if cut is not None:
            local_index = np.full(shape[cut.axis], -1)
            local_index[cut.indices] = np.arange(len(cut.indices))
            indices[cut.axis] = local_index[indices[cut.axis]]
            is_local &= indices[cut.axis] >= 0
        values = np.full(len(is_local), np.nan, np.float32)
        local = tuple(torch.from_numpy(axis[is_local]) for axis in indices)
        values[is_local] = to_numpy(self.model.get_parameter(name)[local])
        return values


# -- A model split over several ranks, as rank 0 sees it


class RankZeroBackend(PartBackend):
    """The backend on rank 0: sends each step to the other ranks, and samples from the logits."""

    def __init__(
        self, model: SplitTransformer, number: int, memory: int | None, context: int
    ) -> None:
        self._number = number
        message = RankMessage("open", number, {"memory": memory, "context": context})
        with model.ranks.run_on_all(message):
            super().__init__(model, memory, context)

    def launch(self, batch: StepBatch) -> CompletedStep:
        with self._ranks.run_on_all(step_message(self._number, batch)):
            return super().launch(batch)

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        with self._ranks.run_on_all(adapter_message(self._number, number, adapter)):
            super().set_adapter(number, adapter)


class SplitModel:
    """`LoadedModel` for a model with tensor parallelism, on rank 0."""

    def __init__(self, part: SplitTransformer, number: int, *, own_ranks: bool) -> None:
        self._transformer, self._number, self._part = part, number, ModelPart(part)
        self.ranks = part.ranks
        # Processes that serve this model only end with it.
        self._finalizer = weakref.finalize(self, _release, part.ranks, number, own_ranks)

    @property
    def config(self) -> ModelConfig:
        return self._transformer.full_config

    @property
    def precision(self) -> str:
        return TorchModel(self._transformer).precision

    @property
    def device(self) -> str:
        return TorchModel(self._transformer).device

    @property
    def numerics(self) -> str:
        numerics = TorchModel(self._transformer).numerics
        return f"{numerics} tensor_parallel={self._transformer.ranks.share.ranks}"

    def backend(self, *, memory: int | None, context: int) -> RankZeroBackend:
        return RankZeroBackend(self._transformer, self._number, memory, context)

    def logits(self, vectors: Floats) -> Floats:
        message = RankMessage("logits", self._number, arrays={"vectors": vectors})
        with self.ranks.run_on_all(message):
            return self._part.logits(vectors)

    def normed(self, vectors: Floats) -> Floats:
        return TorchModel(self._transformer).normed(vectors)

    def vector(self, name: str) -> Floats | None:
        if name != "head.bias" or not self.config.head_bias:
            return TorchModel(self._transformer).vector(name)
        return self._rows("head_bias" if self.config.tied else name, 0, self.config.vocab_size)

    def rows(self, name: str, start: int, stop: int) -> Floats:
        table = "embed.weight" if self.config.tied else name
        return self._rows(table, start, min(stop, self.config.vocab_size))

    def _rows(self, name: str, start: int, stop: int) -> Floats:
        facts = {"name": name, "start": start, "stop": stop}
        with self.ranks.run_on_all(RankMessage("rows", self._number, facts)):
            return self._part.rows(name, start, stop)

    def fingerprint(self) -> str:
        with self.ranks.run_on_all(RankMessage("fingerprint", self._number)):
            return self._part.fingerprint()

    def close(self) -> None:
        """Stop the other processes, or only unload the model there if they serve others too."""
        self._finalizer()


def _release(ranks: Ranks, number: int, own_ranks: bool) -> None:
    if own_ranks:
        ranks.close()
        return
    with suppress(RankError), ranks.run_on_all(RankMessage("forget", number)):
        pass


def split_model(
    checkpoint: Checkpoint, ranks: Ranks, dtype: str, *, name: str = "", own_ranks: bool = False
) -> SplitModel:
    """Load a model on all ranks, each its part.

    Args:
        checkpoint: the model.
        ranks: the processes.
        dtype: precision of the weights.
        name: name by which other machines find the model if the path does not exist there.
        own_ranks: the processes serve this model only, and end with it.
    """
    check_shardable(checkpoint.config, ranks.share.ranks)
    number = ranks.new_model()
    facts = {
        "path": str(checkpoint.path.absolute()),
        "name": name,
        "dtype": dtype,
        "config": digest(checkpoint.config),
    }
    with ranks.run_on_all(RankMessage("load", number, facts)):
        part = load_part(checkpoint, ranks, dtype)
        ranks.groups.minimum(0)  # wait for all ranks
    return SplitModel(part, number, own_ranks=own_ranks)


def digest(config: ModelConfig) -> str:
    """Hash by which ranks check that they load the same model."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()
