"""One text at a time through the plain transformer: the simplest thing that can run a model.

It keeps the keys and values of its text, so a new token costs one token's work. The batched,
paged backends are tested against it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from unspool.model.transformer import Transformer

# A processor without bfloat16 computes it another way; torch says so in forty lines.
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")

Logits = npt.NDArray[np.float32]


class PlainText:
    """A text the model is reading: append tokens, get logits, take tokens back."""

    def __init__(self, model: Transformer, capacity: int) -> None:
        self._model = model
        self._device = model.embed.weight.device
        self._cache = model.new_cache(capacity)

    def __len__(self) -> int:
        return self._cache.length

    def append(self, tokens: Sequence[int]) -> Logits:
        """What the model says comes after these tokens: one logit for each of its vocabulary."""
        last: Logits = self._run(tokens, last_only=True)[-1]
        return last

    def append_all(self, tokens: Sequence[int]) -> Logits:
        """What it says after each of these tokens: a row for every one."""
        return self._run(tokens, last_only=False)

    def rewind(self, length: int) -> None:
        """Forget every token from position `length` on."""
        self._cache.rewind(length)

    @torch.inference_mode()
    def _run(self, tokens: Sequence[int], *, last_only: bool) -> Logits:
        row = torch.tensor([list(tokens)], dtype=torch.long, device=self._device)
        logits = self._model(row, self._cache, last_only=last_only)
        found: Logits = logits[0].float().cpu().numpy()
        return found
