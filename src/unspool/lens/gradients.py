"""Gradients inside the model: which tokens and which activations a logit depends on.

    result = token_attribution(lm, "The capital of Italy is", token=" Rome")
    result.strongest(3)                       # tokens, by integrated gradients
    lm.patch(clean, corrupted, answer=" Rome", approximate=True)      # attribution patching

These need the model as a torch module: `unspool.load(backend="torch")`. They run the whole text
again, on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from unspool.backends.interventions import place_of
from unspool.backends.step import Floats
from unspool.errors import SettingsError, check_int, count
from unspool.lens.activations import (
    TextLike,
    adapter_name,
    resolve_token,
    text_interventions,
    to_token_ids,
)
from unspool.notebook import note_html, notebook_html, tinted_html
from unspool.session import Session

if TYPE_CHECKING:
    from torch import Tensor

    from unspool.model.layers.transformer import Transformer

Place = tuple[str, int]
Method = Literal["integrated", "gradient_x_input"]
METHODS: tuple[str, ...] = get_args(Method)
# Sites whose values a gradient can be taken of.
GRADIENT_SITES = (
    "embedding", "resid_pre", "resid_mid", "resid_post", "attn_out", "head_out", "mlp_out",
    "recurrent_out",
)  # fmt: skip

_MAX_STEPS = 1024
_BATCH_TOKENS = 512  # of all points of the path that are computed together


@dataclass(slots=True)
class DifferentiableRun:
    """The values of a text at some places, and the residual stream after the last layer."""

    final: Tensor  # [batch, count, width]
    values: dict[Place, Tensor] = field(default_factory=dict)  # [batch, count, ...]


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
    import torch

    from unspool.model.layers.transformer import Attention, BackendStep, Shared, SiteHook

    values: dict[Place, Tensor] = {}

    def record(site: str, layer: int, x: Tensor) -> Tensor:
        if (site, layer) in places:
            values[site, layer] = x
        return x

    class FullTexts(BackendStep):
        def __call__(self, attention: Attention, query: Any, key: Any, value: Any) -> Any:
            return attention.attend(query, key, value)

        def recur(self, layer: int, mixer: Any, x: Tensor) -> Any:
            parts = mixer.project(x)
            mixed, _ = mixer.recur(parts, mixer.zero_state(len(x), x.device))
            return mixer.finish(mixed, parts)

        @property
        def hook(self) -> SiteHook:
            return record

    positions = np.arange(len(tokens))
    with torch.enable_grad():
        ids = torch.tensor([list(tokens)], device=model.embed.weight.device)
        own = model.embed_tokens(ids, positions)
        layer_inputs = model.per_layer_embeddings(ids, own)
        x = own.detach().requires_grad_() if embeddings is None else embeddings
        angles, shared, step = model.rope_tables(positions, len(tokens)), Shared(), FullTexts()
        record("resid", 0, x)
        for index, layer in enumerate(model.layers):
            x = layer(x, angles[index], None, step, shared, layer_inputs[index])
            record("resid", index + 1, x)
    return DifferentiableRun(x, values)
