"""A model split over several ranks, as the rest of Unspool sees a model: on rank 0."""

from __future__ import annotations

import hashlib
import json
import weakref
from contextlib import suppress

from unspool.backends.step import Done, Floats, StepBatch
from unspool.backends.torch.loaded import TorchModel
from unspool.backends.torch.parallel.held import HeldPart, PartBackend
from unspool.backends.torch.parallel.messages import Message, of_adapter, of_step
from unspool.backends.torch.parallel.ranks import RankError, Ranks
from unspool.backends.torch.parallel.transformer import SplitTransformer, load_part
from unspool.model.adapters import Adapter
from unspool.model.checkpoint import Checkpoint
from unspool.model.config import ModelConfig
from unspool.model.split import check_split


class FirstBackend(PartBackend):
    """Rank 0's part of every step, of which it tells the others; what was asked for is picked from
    the logits here."""

    def __init__(
        self, model: SplitTransformer, number: int, memory: int | None, context: int
    ) -> None:
        self._number = number
        told = Message("open", number, {"memory": memory, "context": context})
        with model.ranks.together(told):
            super().__init__(model, memory, context)

    def launch(self, batch: StepBatch) -> Done:
        with self._ranks.together(of_step(self._number, batch)):
            return super().launch(batch)

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        with self._ranks.together(of_adapter(self._number, number, adapter)):
            super().set_adapter(number, adapter)


class SplitModel:
    """A model of which every rank holds a part."""

    def __init__(self, part: SplitTransformer, number: int, *, own_ranks: bool) -> None:
        self._part, self._number, self._held = part, number, HeldPart(part)
        self.ranks = part.ranks
        # Whoever lets go of the model lets go of the processes that are there for it alone.
        self._ending = weakref.finalize(self, _let_go, part.ranks, number, own_ranks)

    @property
    def config(self) -> ModelConfig:
        return self._part.whole

    @property
    def precision(self) -> str:
        return TorchModel(self._part).precision

    @property
    def device(self) -> str:
        return TorchModel(self._part).device

    def backend(self, *, memory: int | None, context: int) -> FirstBackend:
        return FirstBackend(self._part, self._number, memory, context)

    def logits(self, vectors: Floats) -> Floats:
        with self.ranks.together(Message("logits", self._number, arrays={"vectors": vectors})):
            return self._held.logits(vectors)

    def normed(self, vectors: Floats) -> Floats:
        return TorchModel(self._part).normed(vectors)

    def vector(self, name: str) -> Floats | None:
        if name != "head.bias" or not self.config.head_bias:
            return TorchModel(self._part).vector(name)
        return self._rows("head_bias" if self.config.tied else name, 0, self.config.vocab_size)

    def rows(self, name: str, start: int, stop: int) -> Floats:
        table = "embed.weight" if self.config.tied else name
        return self._rows(table, start, min(stop, self.config.vocab_size))

    def _rows(self, name: str, start: int, stop: int) -> Floats:
        facts = {"name": name, "start": start, "stop": stop}
        with self.ranks.together(Message("rows", self._number, facts)):
            return self._held.rows(name, start, stop)

    def fingerprint(self) -> str:
        with self.ranks.together(Message("fingerprint", self._number)):
            return self._held.fingerprint()

    def close(self) -> None:
        """End the other processes, or have them forget the model where they hold others too."""
        self._ending()


def _let_go(ranks: Ranks, number: int, own_ranks: bool) -> None:
    if own_ranks:
        ranks.close()
        return
    with suppress(RankError), ranks.together(Message("forget", number)):  # unless they are gone
        pass


def split_model(
    checkpoint: Checkpoint, ranks: Ranks, dtype: str, *, name: str = "", own_ranks: bool = False
) -> SplitModel:
    """Have all ranks load their part. `name` is what the model is called where its files may lie
    elsewhere, on another machine; `own_ranks`: they are there for this model alone."""
    check_split(checkpoint.config, ranks.share.ranks)
    number = ranks.new_model()
    facts = {
        "path": str(checkpoint.path.absolute()),
        "name": name,
        "dtype": dtype,
        "config": digest(checkpoint.config),
    }
    with ranks.together(Message("load", number, facts)):
        part = load_part(checkpoint, ranks, dtype)
        ranks.groups.least(0)  # all have it
    return SplitModel(part, number, own_ranks=own_ranks)


def digest(config: ModelConfig) -> str:
    """By which ranks know that they have found the same model."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()
