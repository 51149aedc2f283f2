"""A rank's part of one model, and its handling of messages.

The same code runs on all ranks; complete results exist on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from unspool.backends.step import Floats, Observations, StepBatch, StepResult
from unspool.backends.torch.loaded import fingerprint_indices, to_numpy
from unspool.backends.torch.paged import TorchBackend, cache_size
from unspool.backends.torch.parallel.messages import RankMessage, parse_adapter, parse_step
from unspool.backends.torch.parallel.transformer import SplitTransformer
from unspool.errors import UnspoolError
from unspool.model.adapters import Adapter, LowRank
from unspool.model.fingerprint import hash_weights
from unspool.model.split import Ints, TensorParallelRank, is_added_once, local_value_heads, shard_of
from unspool.model.weights import weight_shapes


class PartBackend(TorchBackend):
    """A rank's part of every step. Page and slot numbers are the same on all ranks; they hold the
    keys, values and states of this rank's heads."""

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
