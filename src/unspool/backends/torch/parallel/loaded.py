"""A model split over several ranks, as rank 0 sees it."""

from __future__ import annotations

import hashlib
import json
import weakref
from contextlib import suppress

from unspool.backends.step import CompletedStep, Floats, StepBatch
from unspool.backends.torch.loaded import TorchModel
from unspool.backends.torch.parallel.held import ModelPart, PartBackend
from unspool.backends.torch.parallel.messages import RankMessage, adapter_message, step_message
from unspool.backends.torch.parallel.ranks import RankError, Ranks
from unspool.backends.torch.parallel.transformer import SplitTransformer, load_part
from unspool.model.adapters import Adapter
from unspool.model.checkpoint import Checkpoint
from unspool.model.config import ModelConfig
from unspool.model.split import check_shardable


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
    """`Loaded` for a model with tensor parallelism, on rank 0."""

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
