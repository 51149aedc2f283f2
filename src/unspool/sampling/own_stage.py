"""A caller's function as a sampling stage.

    def only_short_words(tokens, logits):           # all tokens so far, one logit per token
        logits[long_words] = -np.inf
        return logits

    lm.generate(prompt, stages=[only_short_words, ...])        # `...`: the default stages

The function gets copies, so it may modify its arguments. -inf removes a token; tokens that an
earlier stage removed stay removed. It must be a pure function of its arguments: a position may be
sampled more than once, after a rejected draft or when a step is explained later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.sampling.candidates import INF, Candidates
from unspool.sampling.faults import StageError

StageFunction = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], npt.ArrayLike]
"""Maps the token ids so far (prompt first) and the logits of the vocabulary to new logits."""


class _Histories(Protocol):
    """The part of `Rows` that is used here."""

    @property
    def histories(self) -> Sequence[npt.NDArray[np.int64]]: ...


class CustomStage:
    """A caller's function as a stage. Pickling keeps only its name."""

    def __init__(self, function: StageFunction | None, name: str | None = None) -> None:
        self.function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))

    def __repr__(self) -> str:
        return f"<stage {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return CustomStage, (None, self.name)

    def apply(self, candidates: Candidates, rows: _Histories) -> Candidates:
        """Call the function for each row."""
        host = candidates.ops.to_numpy
        logits = host(candidates.logits).astype(np.float64)
        ids = None if candidates.ids is None else host(candidates.ids)
        for row, history in enumerate(rows.histories):
            mask = logits[row] > -INF
            tokens = mask.nonzero()[0] if ids is None else ids[row][mask]
            full_logits = np.full(candidates.vocabulary, -INF)
            full_logits[tokens] = logits[row][mask]
            logits[row][mask] = self._call(history.copy(), full_logits, row)[tokens]
        return candidates.with_logits(candidates.ops.to_array_like(logits, candidates.logits))

    def _call(
        self, history: npt.NDArray[np.int64], logits: npt.NDArray[np.float64], row: int
    ) -> npt.NDArray[np.float64]:
        if self.function is None:
            raise StageError(
                f"the stage {self.name!r} was a function, which is not pickled: pass stages again",
                [row],
            )
        size = len(logits)
        try:
            new_logits = np.asarray(self.function(history, logits), np.float64)
        except Exception as error:
            raise StageError(
                f"the stage {self.name!r} raised {type(error).__name__}: {error}", [row]
            ) from error
        if new_logits.shape != (size,):
            returned = (
                "nothing" if new_logits.shape == () else f"an array of shape {new_logits.shape}"
            )
            raise StageError(
                f"the stage {self.name!r} returned {returned}; it must return one logit for each "
                f"of the {size} tokens",
                [row],
            )
        if np.isnan(new_logits).any():
            raise StageError(
                f"the stage {self.name!r} returned NaN; use -inf to remove a token", [row]
            )
        return new_logits
