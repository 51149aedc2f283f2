"""A rank's part of one model: what every rank does when it is told to.

The same code runs on all ranks; what comes of it is whole on the first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from unspool.backends.step import Floats, Inside, StepBatch, StepResult
from unspool.backends.torch.loaded import on_host, sampled_places
from unspool.backends.torch.paged import TorchBackend, room_for
from unspool.backends.torch.parallel.messages import Message, adapter_in, step_in
from unspool.backends.torch.parallel.transformer import SplitTransformer
from unspool.errors import UnspoolError
from unspool.model.adapters import Adapter, LowRank
from unspool.model.fingerprint import hashed
from unspool.model.split import Ints, Share, cut_of, is_added_once, value_heads
from unspool.model.weights import shapes


class PartBackend(TorchBackend):
    """A rank's part of every step. Pages and slots have the same numbers everywhere, and hold the
    keys and values, and the states, of this rank's heads."""

    def __init__(self, model: SplitTransformer, memory: int | None, context: int) -> None:
        self._whole, self._ranks = model.whole, model.ranks
        count = self._ranks.share.ranks
        room = room_for(model, None if memory is None else memory // count)
        pages, states = self._ranks.groups.least(*room)
        super().__init__(model, page_count=pages, state_count=states, context=context)
        self.vocab_size = model.whole.vocab_size
        self.page_bytes, self.state_bytes = self.page_bytes * count, self.state_bytes * count

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        super().set_adapter(number, adapter and self._part_of(adapter))

    def _part_of(self, adapter: Adapter) -> Adapter:
        parts = dict(adapter.parts)
        for name, whole in adapter.parts.items():
            cut = cut_of(self._whole, name, self._ranks.share)
            if cut is not None and cut.axis == 0:
                parts[name] = LowRank(whole.down, whole.up[cut.places], whole.scale)
            elif cut is not None:
                parts[name] = LowRank(whole.down[:, cut.places], whole.up, whole.scale)
        return Adapter(parts)

    def _run(self, batch: StepBatch) -> StepResult:
        result = super()._run(batch)
        if result.inside is not None and result.inside.attention:
            result.inside = self._with_all_heads(result.inside)
        return result

    def _with_all_heads(self, inside: Inside) -> Inside:
        """What was seen of the heads of all ranks, on the first."""
        config, recurrent = self._whole, inside.recurrent

        def of_layer(share: Share, layer: int) -> Ints:
            return share.span(config.shape(layer).heads)

        attention = [self._joined(one, config.heads, of_layer) for one in inside.attention]
        states = config.recurrence
        if recurrent and states is not None and "delta" in config.mixers:
            heads = states.value_heads
            recurrent = [
                self._joined(one.swapaxes(1, 2), heads, lambda share, _: value_heads(states, share))
                for one in recurrent
            ]
            recurrent = [one.swapaxes(1, 2) for one in recurrent]
        return Inside(inside.residuals, attention, inside.parts, inside.first, recurrent)

    def _joined(self, part: Floats, heads: int, of_layer: Callable[[Share, int], Ints]) -> Floats:
        """Numbers of the heads of every layer, [layers, heads, ...], of all ranks together."""
        sent = torch.from_numpy(np.ascontiguousarray(part)).to(self._ranks.device)
        whole = np.zeros((part.shape[0], heads, *part.shape[2:]), np.float32)
        for share, one in zip(
            self._ranks.share.every, self._ranks.groups.gather(sent), strict=False
        ):
            for layer, numbers in enumerate(on_host(one)):
                places = of_layer(share, layer)
                whole[layer, places] = numbers[: len(places)]
        return whole


class HeldPart:
    """A rank's part of a model, and its part of the engine's steps once there is an engine."""

    def __init__(self, model: SplitTransformer) -> None:
        self.model = model
        self._backend: PartBackend | None = None

    def obey(self, message: Message) -> None:
        """What a rank does for the first one."""
        facts = message.facts
        if message.kind == "open":
            self._backend = PartBackend(self.model, facts["memory"], facts["context"])
        elif message.kind == "step" and self._backend is not None:
            self._backend.launch(step_in(message))
        elif message.kind == "adapter" and self._backend is not None:
            self._backend.set_adapter(facts["number"], adapter_in(message))
        elif message.kind == "logits":
            self.logits(message.arrays["vectors"])
        elif message.kind == "rows":
            self.rows(facts["name"], facts["start"], facts["stop"])
        elif message.kind == "fingerprint":
            self.fingerprint()
        else:
            raise UnspoolError(f"a rank was told to {message.kind!r}, which it cannot")

    @torch.inference_mode()
    def logits(self, vectors: Floats) -> Floats:
        weight = self.model.norm.weight
        given = torch.from_numpy(np.array(vectors)).to(weight.device, weight.dtype)
        return on_host(self.model.logits(given))

    def rows(self, name: str, start: int, stop: int) -> Floats:
        """Rows of a weight of which each rank has some."""
        weight = self.model.get_parameter(name)
        cut = cut_of(self.model.whole, name, self.model.ranks.share)
        assert cut is not None and cut.axis == 0
        found = weight.new_zeros(stop - start, *weight.shape[1:])
        ours = (cut.places >= start) & (cut.places < stop)
        found[torch.from_numpy(cut.places[ours] - start)] = weight[torch.from_numpy(ours)]
        return on_host(self.model.ranks.groups.sum(found))

    def fingerprint(self) -> str:
        """That of the whole model, whatever the number of ranks."""
        sizes = sorted(shapes(self.model.whole).items())
        own = np.stack([self._sampled(name, shape) for name, shape in sizes])
        found = own
        for one in self.model.ranks.groups.gather(
            torch.from_numpy(own).to(self.model.ranks.device)
        ):
            found = np.where(np.isnan(found), on_host(one), found)
        return hashed((name, shape, found[number]) for number, (name, shape) in enumerate(sizes))

    def _sampled(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Some numbers of a weight; not a number where it is elsewhere."""
        share, places = self.model.ranks.share, list(sampled_places(shape))
        here = np.full(len(places[0]), not (is_added_once(name) and share.rank))
        cut = cut_of(self.model.whole, name, share)
        if cut is not None:
            own = np.full(shape[cut.axis], -1)
            own[cut.places] = np.arange(len(cut.places))
            places[cut.axis] = own[places[cut.axis]]
            here &= places[cut.axis] >= 0
        found = np.full(len(here), np.nan, np.float32)
        at = tuple(torch.from_numpy(place[here]) for place in places)
        found[here] = on_host(self.model.get_parameter(name)[at])
        return found
