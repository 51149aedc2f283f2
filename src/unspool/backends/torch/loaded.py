"""A torch transformer as a loaded model: it creates backends and returns numpy arrays."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unspool.backends.step import Floats, Ints
from unspool.backends.torch.paged import TorchBackend, cache_size
from unspool.model.config import ModelConfig
from unspool.model.fingerprint import hash_weights, sample_indices
from unspool.model.transformer import Transformer


class TorchModel:
    """`Loaded` for the plain transformer, on any torch device."""

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
        pages, states = cache_size(self.transformer, memory)
        return TorchBackend(self.transformer, page_count=pages, state_count=states, context=context)

    def logits(self, vectors: Floats) -> Floats:
        with torch.inference_mode():
            return to_numpy(self.transformer.logits(self._device_array(vectors)))

    def normed(self, vectors: Floats) -> Floats:
        with torch.inference_mode():
            return to_numpy(self.transformer.norm(self._device_array(vectors)))

    def vector(self, name: str) -> Floats | None:
        norm, head = self.transformer.norm, self.transformer.head
        if name == "norm.weight":
            weight = to_numpy(norm.weight)
            return 1 + weight if norm.plus_one else weight
        head_bias = head.bias if head is not None else self.transformer.head_bias
        bias = {"norm.bias": norm.bias, "head.bias": head_bias}[name]
        return None if bias is None else to_numpy(bias)

    def rows(self, name: str, start: int, stop: int) -> Floats:
        model = self.transformer
        table = model.embed if name != "head.weight" or model.head is None else model.head
        return to_numpy(table.weight[start:stop])

    def fingerprint(self) -> str:
        named = sorted(self.transformer.named_parameters())
        return hash_weights(
            (name, tuple(tensor.shape), _sample_values(tensor)) for name, tensor in named
        )

    def _device_array(self, vectors: Floats) -> Tensor:
        weight = self.transformer.embed.weight
        return torch.from_numpy(np.array(vectors)).to(weight.device, weight.dtype)


def fingerprint_indices(shape: tuple[int, ...]) -> tuple[Ints, ...]:
    """Indices, one array per axis, of the values that a fingerprint includes."""
    return np.unravel_index(sample_indices(shape), shape)


def _sample_values(tensor: Tensor) -> Floats:
    indices = fingerprint_indices(tuple(tensor.shape))
    return to_numpy(tensor.detach()[tuple(torch.from_numpy(axis) for axis in indices)])


def to_numpy(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().float().cpu().numpy())
