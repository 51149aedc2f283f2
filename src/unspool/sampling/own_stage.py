"""A caller's own function as a sampling stage.

    def only_short_words(tokens, logits):           # every token so far, and a logit for each token
        logits[long_words] = -np.inf
        return logits

    lm.generate(prompt, stages=[only_short_words, ...])        # `...`: the usual stages

The function gets copies, so it may change what it is given. What it gives -inf is removed, and what
a stage before it has removed stays so. It must depend on nothing but what it is given: a position
may be picked at more than once, when a draft was wrong or when a step is explained afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.sampling.candidates import INF, Candidates
from unspool.sampling.faults import StageError

StageFunction = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], npt.ArrayLike]
"""From the token ids so far, prompt first, and the logits of the whole vocabulary to new logits."""


class _Histories(Protocol):
    """What is read of the rows."""

    @property
    def histories(self) -> Sequence[npt.NDArray[np.int64]]: ...


class OwnStage:
    """A stage of the chain that a caller wrote. A pickle of it holds its name alone."""

    def __init__(self, function: StageFunction | None, name: str | None = None) -> None:
        self.function = function
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))

    def __repr__(self) -> str:
        return f"<stage {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnStage, (None, self.name)

    def apply(self, candidates: Candidates, rows: _Histories) -> Candidates:
        """The candidates with the logits that the function gives, row by row."""
        host = candidates.ops.host
        logits = host(candidates.logits).astype(np.float64)
        ids = None if candidates.ids is None else host(candidates.ids)
        for row, history in enumerate(rows.histories):
            there = logits[row] > -INF
            tokens = there.nonzero()[0] if ids is None else ids[row][there]
            whole = np.full(candidates.vocabulary, -INF)
            whole[tokens] = logits[row][there]
            logits[row][there] = self._asked(history.copy(), whole, row)[tokens]
        return candidates.with_logits(candidates.ops.like(logits, candidates.logits))

    def _asked(
        self, history: npt.NDArray[np.int64], logits: npt.NDArray[np.float64], row: int
    ) -> npt.NDArray[np.float64]:
        if self.function is None:
            raise StageError(
                f"the stage {self.name!r} was a function, and pickles hold none: give stages again",
                [row],
            )
        size = len(logits)
        try:
            given = np.asarray(self.function(history, logits), np.float64)
        except Exception as error:
            raise StageError(
                f"the stage {self.name!r} raised {type(error).__name__}: {error}", [row]
            ) from error
        if given.shape != (size,):
            found = "nothing" if given.shape == () else f"an array of shape {given.shape}"
            raise StageError(
                f"the stage {self.name!r} gave {found}; it must return one logit for each of the "
                f"{size} tokens",
                [row],
            )
        if np.isnan(given).any():
            raise StageError(f"the stage {self.name!r} gave NaN; -inf removes a token", [row])
        return given
