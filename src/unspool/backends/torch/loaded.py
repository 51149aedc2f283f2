"""A torch transformer as the rest of Unspool sees a model: a backend, and numpy arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unspool.backends.step import Floats, Ints
from unspool.backends.torch.paged import TorchBackend, room_for
from unspool.model.config import ModelConfig
from unspool.model.fingerprint import hashed, places
from unspool.model.transformer import Transformer


class TorchModel:
    """The plain transformer, on any device that torch knows."""

    def __init__(self, transformer: Transformer) -> None:
        self.transformer = transformer

    @property
    def config(self) -> ModelConfig:
        return self.transformer.config

    @property
    def precision(self) -> str:
        return str(self.transformer.embed.weight.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self.transformer.embed.weight.device)

    def backend(self, *, memory: int | None, context: int) -> TorchBackend:
        pages, states = room_for(self.transformer, memory)
        return TorchBackend(self.transformer, page_count=pages, state_count=states, context=context)

    def logits(self, vectors: Floats) -> Floats:
        with torch.inference_mode():
            return on_host(self.transformer.logits(self._device_array(vectors)))

    def normed(self, vectors: Floats) -> Floats:
        with torch.inference_mode():
            return on_host(self.transformer.norm(self._device_array(vectors)))

    def vector(self, name: str) -> Floats | None:
        norm, head = self.transformer.norm, self.transformer.head
        if name == "norm.weight":
            weight = on_host(norm.weight)
            return 1 + weight if norm.plus_one else weight
        head_bias = head.bias if head is not None else self.transformer.head_bias
        found = {"norm.bias": norm.bias, "head.bias": head_bias}[name]
        return None if found is None else on_host(found)

    def rows(self, name: str, start: int, stop: int) -> Floats:
        model = self.transformer
        own_head = name == "head.weight" and model.head is not None
        table = model.head if own_head and model.head is not None else model.embed
        return on_host(table.weight[start:stop])

    def fingerprint(self) -> str:
        named = sorted(self.transformer.named_parameters())
        return hashed((name, tuple(tensor.shape), _sampled(tensor)) for name, tensor in named)

    def _device_array(self, vectors: Floats) -> Tensor:
        weight = self.transformer.embed.weight
        return torch.from_numpy(np.array(vectors)).to(weight.device, weight.dtype)


def sampled_places(shape: tuple[int, ...]) -> tuple[Ints, ...]:
    """Some places all over a tensor, by axis."""
    return np.unravel_index(places(shape), shape)


def _sampled(tensor: Tensor) -> Floats:
    places = sampled_places(tuple(tensor.shape))
    return on_host(tensor.detach()[tuple(torch.from_numpy(place) for place in places)])


def on_host(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().float().cpu().numpy())
