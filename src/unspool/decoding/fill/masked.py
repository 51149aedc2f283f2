"""A masked model: of every place of a text it says what could stand there, from both sides.

`MaskedModel` is all that filling and doubting need of one. `WholeText` makes one of a loaded model
whose tokens see the whole text: each row of tokens is a branch that is provisional from its first
token on, so all of them see each other, and nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unspool.backends.step import Logits
from unspool.engine.branch import Branch
from unspool.errors import SettingsError
from unspool.sampling.operations import operations
from unspool.sampling.scoring import Floats, log_softmax
from unspool.session import Session
from unspool.text.tokenizer.tokenizer import Tokenizer


@runtime_checkable
class MaskedModel(Protocol):
    """What is asked of a model that fills places in any order."""

    mask_id: int  # the token that stands for "not known yet"
    tokenizer: Tokenizer

    def logits(self, row: Sequence[int]) -> Logits:
        """What could stand at each place of a row of tokens: [places, vocabulary]."""


class WholeText:
    """A loaded model whose tokens see the whole text."""

    def __init__(self, lm: Session) -> None:
        mask = lm.config.mask_id
        if mask is None or lm.config.sight == "causal":
            raise SettingsError(
                "this model fills no places: it has no mask token, or its tokens look back only; "
                "name a masked model, such as a twin made by unspool train twin --kind fill"
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
            found: Any = engine.extend(branch, wanted=len(row))
        finally:
            engine.release(branch)
        # Where a vector guesses the token behind its own place, the first place has none.
        moved: Logits = found[[0, *range(len(row) - 1)]] if lm.config.shifted else found
        return moved


def masked_model(given: Session | MaskedModel) -> MaskedModel:
    """What a caller gave as a masked model: a loaded one, or anything that answers as one does."""
    if isinstance(given, Session):
        return WholeText(given)
    if not hasattr(given, "mask_id") or not hasattr(given, "logits"):
        raise SettingsError(f"twin must be a loaded masked model, got {given!r}")
    return given


def framed(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], int]:
    """A text's tokens with what the model wants around them, and how many stand before."""
    before = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    after = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
    return [*before, *ids, *after], len(before)


def text_logprobs(model: MaskedModel, row: Sequence[int], places: Sequence[int]) -> Floats:
    """Log-probabilities of the tokens at some places, among those that are text: [places, V]."""
    logits = model.logits(row)
    own = operations(logits).host(log_softmax(logits[list(places)]))
    return _without(own, [model.mask_id, *model.tokenizer.special_ids])


def _without(own: Floats, tokens: Sequence[int]) -> Floats:
    own = np.array(own, np.float64)
    own[:, [token for token in tokens if token < own.shape[1]]] = -np.inf
    peak = own.max(1, keepdims=True)
    found: Floats = own - peak - np.log(np.exp(own - peak).sum(1, keepdims=True))
    return found
