"""A run of the torch model over a whole text, through which gradients can be taken."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unspool.model.layers.recurrent import Mixer
from unspool.model.layers.transformer import Attention, BackendStep, Shared, SiteHook, Transformer

Place = tuple[str, int]


@dataclass(slots=True)
class DifferentiableRun:
    """The values of a text at some places, and the residual stream after the last layer."""

    final: Tensor  # [batch, count, width]
    values: dict[Place, Tensor]  # [batch, count, ...]


class _FullText(BackendStep):
    """Attention over a whole text; keeps the values at some places."""

    def __init__(self, places: Collection[Place]) -> None:
        self._places = places
        self.values: dict[Place, Tensor] = {}

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention.attend(query, key, value)

    def recur(self, layer: int, mixer: Mixer, x: Tensor) -> Tensor:
        parts = mixer.project(x)
        mixed, _ = mixer.recur(parts, mixer.zero_state(len(x), x.device))
        return mixer.finish(mixed, parts)

    @property
    def hook(self) -> SiteHook:
        return self.record

    def record(self, site: str, layer: int, x: Tensor) -> Tensor:
        if (site, layer) in self._places:
            self.values[site, layer] = x
        return x


def run_layers(
    model: Transformer,
    tokens: Sequence[int],
    places: Collection[Place] = (),
    embeddings: Tensor | None = None,
) -> DifferentiableRun:
    """Run the layers over a text, with gradients.

    Args:
        model: The torch module.
        tokens: The text.
        places: Sites and layers whose values are kept; ("resid", n) is before layer n.
        embeddings: [batch, count, width], in place of those of the tokens.
    """
    positions, step = np.arange(len(tokens)), _FullText(places)
    with torch.enable_grad():
        ids = torch.tensor([list(tokens)], device=model.embed.weight.device)
        token_embeddings = model.embed_tokens(ids, positions)
        layer_inputs = model.per_layer_embeddings(ids, token_embeddings)
        x = token_embeddings.detach().requires_grad_() if embeddings is None else embeddings
        angles, shared = model.rope_tables(positions, len(tokens)), Shared()
        step.record("resid", 0, x)
        for index, layer in enumerate(model.layers):
            x = layer(x, angles[index], None, step, shared, layer_inputs[index])
            step.record("resid", index + 1, x)
    return DifferentiableRun(x, step.values)
