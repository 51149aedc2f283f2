"""Interventions and readings at the sites of a torch model, for the tokens of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.backends.interventions import (
    OUTPUT_SITES,
    Add,
    ClampFeature,
    Function,
    Intervention,
    Ints,
    MeanAblate,
    Op,
    ProjectOut,
    Replace,
    Scale,
    place_of,
)
from unspool.backends.step import Floats, StepBatch
from unspool.errors import UnspoolError
from unspool.model.layers.parts import FeedForward
from unspool.model.layers.transformer import Transformer


def apply_op(op: Op, x: Tensor, arrays: dict[str, Tensor]) -> Tensor:
    """Return the changed vectors `x` [tokens, width] in float32; the specification of each op."""
    if isinstance(op, Add):
        return x + op.scale * arrays["vector"]
    if isinstance(op, ProjectOut):
        direction = arrays["direction"]
        return x - (x @ direction)[:, None] * direction
    if isinstance(op, Replace | MeanAblate):
        return next(iter(arrays.values())).expand_as(x)
    if isinstance(op, Scale):
        return torch.zeros_like(x) if op.factor == 0 else x * op.factor
    if isinstance(op, ClampFeature):
        feature = x @ arrays["encoder"] + op.bias
        feature = torch.where(feature > op.threshold, feature, 0.0)
        return x + (op.value - feature)[:, None] * arrays["decoder"]
    return _checked(op, x)


def _checked(op: Function, x: Tensor) -> Tensor:
    out = op.function(x.clone())
    if not isinstance(out, Tensor) or out.shape != x.shape:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise UnspoolError(
            f"the function of an intervention must return a tensor {list(x.shape)}, got {got}"
        )
    return out.to(x)


class _Change:
    """One intervention in one layer, for the tokens of a step that it touches."""

    def __init__(
        self, intervention: Intervention, index: int, slices: list[slice], tokens: Ints, at: Ints
    ) -> None:
        self._op, self._slices = intervention.op, slices
        self._by_head = intervention.heads is not None
        self._tokens = torch.from_numpy(tokens)
        self._arrays: dict[str, Tensor] = {}
        for name, array in intervention.layer_arrays(index).items():
            values = array if array.ndim == 1 else array[at]  # one vector per position
            self._arrays[name] = torch.from_numpy(np.array(values))

    def apply(self, x: Tensor) -> Tensor:
        """Return `x` [tokens of the step, width] with the changed vectors."""
        tokens = self._tokens.to(x.device)
        arrays = {name: array.to(x.device) for name, array in self._arrays.items()}
        rows = x[tokens].float()
        if self._by_head and isinstance(self._op, Function):
            heads = torch.stack([rows[:, part] for part in self._slices], 1)
            changed = list(_checked(self._op, heads).unbind(1))
        else:
            changed = [apply_op(self._op, rows[:, part], arrays) for part in self._slices]
        for part, values in zip(self._slices, changed, strict=True):
            rows[:, part] = values
        x = x.clone()
        x[tokens] = rows.to(x.dtype)
        return x

    def apply_to_pattern(self, token: int, weights: Tensor) -> None:
        """Change the attention weights [heads, keys] of a token in place."""
        if token not in self._tokens.tolist():
            return
        heads = torch.tensor([part.start for part in self._slices], device=weights.device)
        if not self._by_head:
            heads = torch.arange(len(weights), device=weights.device)
        weights[heads] = apply_op(self._op, weights[heads].float(), {}).to(weights.dtype)


class SiteHooks:
    """Changes and reads values of one step; `BackendStep.hook` of the torch backend."""

    def __init__(self, model: Transformer, batch: StepBatch) -> None:
        self._model = model
        self.outputs = np.concatenate((batch.sample_indices, batch.logits_indices))
        self.num_outputs = len(self.outputs)
        look = batch.observe
        self._observed = None if look is None else torch.from_numpy(look.tokens)
        self._sites: dict[tuple[str, int], list[tuple[str, int]]] = {}  # by place
        for name in () if look is None else look.sites:
            self._sites.setdefault(place_of(*name), []).append(name)
        self._values: dict[tuple[str, int], Tensor] = {}
        if look is not None and look.reads_outputs:
            self.outputs = np.concatenate((self.outputs, look.tokens))
        self._changes: dict[tuple[str, int], list[_Change]] = {}
        self._collect(batch)

    def __bool__(self) -> bool:
        return bool(self._changes or self._sites)

    def _collect(self, batch: StepBatch) -> None:
        step = batch.interventions
        if step is None:
            return
        config = self._model.config
        spans = step.spans[np.argsort(step.spans[:, 2], kind="stable")]
        for first, end, number, offset in spans.tolist():
            intervention = step.table[number]
            tokens = np.arange(first, end)
            if intervention.site in OUTPUT_SITES:
                is_touched = (self.outputs >= first) & (self.outputs < end)
                tokens = self.outputs[is_touched]
            at = tokens - first + offset
            if intervention.site in OUTPUT_SITES:
                tokens = np.flatnonzero(is_touched)
            if not len(tokens):
                continue
            for index, layer in intervention.resolve_layers(config):
                slices = intervention.slices(config, layer)
                change = _Change(intervention, index, slices, tokens, at)
                place = place_of(intervention.site, layer)
                self._changes.setdefault(place, []).append(change)

    def __call__(self, site: str, layer: int, x: Tensor) -> Tensor:
        """Change and read a site: x is [1, tokens, width], or [outputs, width] after the layers."""
        flat = x.flatten(0, -2)
        for change in self._changes.get((site, layer), ()):
            flat = change.apply(flat)
        self._record(site, layer, flat)
        return flat.view_as(x)

    def between_layers(self, number: int, x: Tensor) -> Tensor:
        """Change and read the residual stream before layer `number`, and after the one before."""
        return self("resid", number, x)

    def change_pattern(self, layer: int, token: int, weights: Tensor) -> None:
        """Change a token's attention weights [heads, keys] in place."""
        for change in self._changes.get(("pattern", layer), ()):
            change.apply_to_pattern(token, weights)

    def changes_pattern(self, layer: int) -> bool:
        return ("pattern", layer) in self._changes

    def _record(self, site: str, layer: int, flat: Tensor) -> None:
        if (site, layer) in self._sites and self._observed is not None:
            is_output = site in OUTPUT_SITES
            rows = flat[self.num_outputs :] if is_output else flat[self._observed.to(flat.device)]
            for name in self._sites[site, layer]:
                self._values[name] = rows.clone()

    def values(self) -> dict[tuple[str, int], Floats]:
        """The values read, [observed tokens, width] by site and layer."""
        return {name: value.float().cpu().numpy() for name, value in self._values.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hook the feed-forwards whose inner activations are changed or read."""
        layers = {n for site, n in (*self._changes, *self._sites) if site == "mlp_hidden"}
        handles = []
        try:
            for layer in layers:
                feed = self._model.layers[layer].feed
                if not isinstance(feed, FeedForward):
                    raise UnspoolError(f"layer {layer} has no mlp_hidden")
                handles.append(feed.down.register_forward_pre_hook(self._hidden_hook(layer)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hidden_hook(self, layer: int) -> Callable[[Any, tuple[Tensor]], tuple[Tensor]]:
        def change(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (self("mlp_hidden", layer, inputs[0]),)

        return change
