"""LoRA adapters on plain torch: rows with different adapters share a step.

While a step with adapters runs, each adapted matrix has a forward hook that adds the low-rank
update of each row's adapter to the product.
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
        # By number and matrix: down [columns, rank] and up [rank, rows], which includes the scale.
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
        """Apply the adapters of a batch to the forward pass of this thread."""
        if not len(batch.adapters):
            yield
            return
        numbers = np.repeat(batch.adapters, np.diff(batch.row_starts))
        output_tokens = np.concatenate((batch.sample_indices, batch.logits_indices))
        layer_rows, head_rows = self._rows(numbers), self._rows(numbers[output_tokens])
        hooks = []
        try:
            for name in {name for number in layer_rows for name in self._parts[number]}:
                parts = {n: self._parts[n][name] for n in layer_rows if name in self._parts[n]}
                module = self._model.get_submodule(name.removesuffix(".weight"))
                rows = head_rows if name == "head.weight" else layer_rows
                # First of the hooks: before a split layer sums its product over the ranks.
                hooks.append(module.register_forward_hook(_add_updates(parts, rows), prepend=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _rows(self, numbers: Ints) -> dict[int, Tensor]:
        """Rows of a product by adapter number."""
        device = self._model.embed.weight.device
        return {
            int(number): torch.from_numpy(np.flatnonzero(numbers == number)).to(device)
            for number in np.unique(numbers)
            if number
        }


def _add_updates(
    parts: dict[int, tuple[Tensor, Tensor]], rows: dict[int, Tensor]
) -> Callable[[nn.Module, Any, Tensor], None]:
    """A forward hook that adds low-rank updates to the given rows of a product."""
    owner = threading.get_ident()  # another thread may use the same weights meanwhile

    def add(module: nn.Module, inputs: tuple[Tensor, ...], product: Tensor) -> None:
        if threading.get_ident() != owner:
            return
        x, out = inputs[0].flatten(0, -2), product.flatten(0, -2)
        for number, (down, up) in parts.items():
            if number in rows:
                indices = rows[number].to(out.device)
                out.index_add_(0, indices, x[indices] @ down @ up)

    return add
