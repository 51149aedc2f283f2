"""Masked models: predict the token at every position from both sides.

`MaskedModel` is the interface that infilling and editing need. `WholeText` implements it for a
loaded model with bidirectional attention: each row is a provisional branch, so all tokens attend to
each other and nothing is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unspool.backends.step import Logits
from unspool.engine.branch import Branch
from unspool.errors import SettingsError
from unspool.sampling.operations import array_operations
from unspool.sampling.scoring import Floats, log_softmax
from unspool.session import Session
from unspool.text.tokenizer.tokenizer import Tokenizer


@runtime_checkable
class MaskedModel(Protocol):
    """A model that predicts masked positions."""

    mask_id: int  # the mask token
    tokenizer: Tokenizer

    def logits(self, row: Sequence[int]) -> Logits:
        """Logits at each position of a row of tokens: [positions, vocabulary]."""


class WholeText:
    """A loaded model with bidirectional attention."""

    def __init__(self, lm: Session) -> None:
        mask = lm.config.mask_id
        if mask is None or lm.config.sight == "causal":
            raise SettingsError(
                "this model cannot fill masks: it has no mask token or is causal; use a masked "
                "model, such as a twin made by unspool train twin --kind fill"
            )
        self._lm, self.mask_id, self.tokenizer = lm, mask, lm.tokenizer

    def logits(self, row: Sequence[int]) -> Logits:
        lm, engine = self._lm, self._lm.engine

        def opened() -> Branch:
            number = engine.adapters.number(lm.adapter)
            branch = engine.tree.open((), cached=False, adapter=number)
            engine.tree.append(branch, row, provisional=True)
            return branch

        branch = engine.call(opened)
        try:
            logits: Any = engine.extend(branch, num_logits=len(row))
        finally:
            engine.release(branch)
        # If a hidden state predicts the next position, the first position has no prediction.
        shifted: Logits = logits[[0, *range(len(row) - 1)]] if lm.config.shifted else logits
        return shifted


def masked_model(model: Session | MaskedModel) -> MaskedModel:
    """Return a masked model; a loaded model is wrapped."""
    if isinstance(model, Session):
        return WholeText(model)
    if not hasattr(model, "mask_id") or not hasattr(model, "logits"):
        raise SettingsError(f"twin must be a loaded masked model, got {model!r}")
    return model


def add_special_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], int]:
    """Add the start and end tokens that the model expects; also returns how many come first."""
    before = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    after = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
    return [*before, *ids, *after], len(before)


def text_logprobs(model: MaskedModel, row: Sequence[int], places: Sequence[int]) -> Floats:
    """Log-probabilities at some positions, without special tokens: [positions, vocabulary]."""
    logits = model.logits(row)
    logprobs = array_operations(logits).to_numpy(log_softmax(logits[list(places)]))
    return _without(logprobs, [model.mask_id, *model.tokenizer.special_ids])


def _without(logprobs: Floats, tokens: Sequence[int]) -> Floats:
    logprobs = np.array(logprobs, np.float64)
    logprobs[:, [token for token in tokens if token < logprobs.shape[1]]] = -np.inf
    peak = logprobs.max(1, keepdims=True)
    normalized: Floats = logprobs - peak - np.log(np.exp(logprobs - peak).sum(1, keepdims=True))
    return normalized
