"""Adapters on plain torch: rows of a step go through their own, all in the same products.

While a step with adapters runs, each matrix that one of them adds to has a hook: behind the
product, what the row's adapter says is added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unspool.backends.step import Ints, StepBatch
from unspool.model.adapters import Adapter
from unspool.model.transformer import Transformer


class TorchAdapters:
    """The adapters of one backend."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        # By number and matrix: down [columns, rank] and up [rank, rows], the scale multiplied in.
        self._parts: dict[int, dict[str, tuple[Tensor, Tensor]]] = {}

    def set(self, number: int, adapter: Adapter | None) -> None:
        if adapter is None:
            self._parts.pop(number, None)
            return
        self._parts[number] = {
            name: (
                torch.from_numpy(part.down.T.copy()).to(self._model.get_parameter(name)),
                torch.from_numpy(part.up.T * np.float32(part.scale)).to(
                    self._model.get_parameter(name)
                ),
            )
            for name, part in adapter.parts.items()
        }

    @contextmanager
    def applied(self, batch: StepBatch) -> Iterator[None]:
        """For the run of one step, on this thread."""
        if not len(batch.adapters):
            yield
            return
        of_tokens = np.repeat(batch.adapters, np.diff(batch.starts))
        wanted = np.concatenate((batch.sampled, batch.logits))
        layers, head = self._places(of_tokens), self._places(of_tokens[wanted])
        hooks = []
        try:
            for name in {name for number in layers for name in self._parts[number]}:
                parts = {n: self._parts[n][name] for n in layers if name in self._parts[n]}
                module = self._model.get_submodule(name.removesuffix(".weight"))
                places = head if name == "head.weight" else layers
                # Before what else is done to the product, where only a part of it is here.
                hooks.append(module.register_forward_hook(_adding(parts, places), prepend=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _places(self, numbers: Ints) -> dict[int, Tensor]:
        """Which rows of a product have which adapter."""
        device = self._model.embed.weight.device
        return {
            int(number): torch.from_numpy(np.flatnonzero(numbers == number)).to(device)
            for number in np.unique(numbers)
            if number
        }


def _adding(
    parts: dict[int, tuple[Tensor, Tensor]], places: dict[int, Tensor]
) -> Callable[[nn.Module, Any, Tensor], None]:
    owner = threading.get_ident()  # the same weights may be run for somebody else meanwhile

    def add(module: nn.Module, given: tuple[Tensor, ...], product: Tensor) -> None:
        if threading.get_ident() != owner:
            return
        rows, out = given[0].flatten(0, -2), product.flatten(0, -2)
        for number, (down, up) in parts.items():
            if number in places:
                at = places[number].to(out.device)
                out.index_add_(0, at, rows[at] @ down @ up)

    return add
