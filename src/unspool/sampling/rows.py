"""What the stages know about each row of a batch besides its logits.

`RowInput` is what a caller says about a row at one step. `RowSettings` holds the settings of many
rows as columns, made once for a batch and used at every step. `Rows` is the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.sampling.arrays import Array
from unspool.sampling.draw import uniforms
from unspool.sampling.operations import on_host, operations
from unspool.sampling.settings import SamplingSettings

Tokens = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StageState:
    """What a stage carries from one token to the next; kept per token, so that rewinding works."""

    mirostat_mu: float


@dataclass(frozen=True, slots=True)
class RowInput:
    """One row at one step.

    `history` is every token so far, prompt first; a numpy array spares a conversion at each step.
    `position` is that of the token to be picked, by default the next one; `canvas_pass` is the pass
    in which it is, where positions are picked for more than once. `forbidden` are tokens
    that may not be picked at this step, whatever the settings say. `allowed`, where given, says of
    each token of the vocabulary whether it may be picked (a grammar's mask); columns of the logits
    beyond its end are padding, and may not.
    """

    history: Sequence[int] | Tokens = ()
    prompt_length: int = 0
    sample: int = 0
    position: int | None = None
    canvas_pass: int | None = None
    state: StageState | None = None
    forbidden: Sequence[int] = ()
    allowed: np.ndarray[Any, np.dtype[np.bool_]] | None = None


class RowSettings:
    """Many rows' settings, as columns in the kind of array that the logits are."""

    def __init__(self, settings: Sequence[SamplingSettings]) -> None:
        self.settings = tuple(settings)
        self._columns: dict[tuple[str, Any, Any], Array] = {}

    def column(self, name: str, like: Array) -> Array:
        """A setting of every row, [rows, 1], float in the type of `like`."""
        key = (name, like.dtype, getattr(like, "device", None))
        if key not in self._columns:
            values = np.array([[float(getattr(s, name))] for s in self.settings])
            self._columns[key] = operations(like).like(values, like)
        return self._columns[key]


class Rows:
    """The rows of one step: their settings, and what was said about them."""

    def __init__(self, settings: RowSettings, inputs: Sequence[RowInput]) -> None:
        self._columns = settings
        self.settings = settings.settings
        self.inputs = inputs
        self._histories: list[Tokens] | None = None
        self._counts: tuple[Tokens, Tokens, Tokens] | None = None

    def column(self, name: str, like: Array) -> Array:
        """A setting of every row, [rows, 1]."""
        return self._columns.column(name, like)

    @property
    def histories(self) -> list[Tokens]:
        if self._histories is None:
            self._histories = [np.asarray(row.history, dtype=np.int64) for row in self.inputs]
        return self._histories

    def counts(self, vocabulary: int) -> tuple[Tokens, Tokens, Tokens]:
        """Which tokens the penalties see, and how often: flat row numbers, tokens, counts."""
        if self._counts is None:
            found = []
            for row, history in enumerate(self.histories):
                settings = self.settings[row]
                start = 0 if settings.penalize_prompt else self.inputs[row].prompt_length
                if settings.penalty_window >= 0:
                    start = max(start, len(history) - settings.penalty_window)
                found.append(on_host().tally(history[start:], vocabulary))
            tokens, counts = found[0]
            if len(found) > 1:
                tokens = np.concatenate([tokens for tokens, _ in found])
                counts = np.concatenate([counts for _, counts in found])
            sizes = [tokens.size for tokens, _ in found]
            self._counts = np.repeat(np.arange(len(sizes)), sizes), tokens, counts
        return self._counts

    def uniform(self, stream: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The draw of every row at its position; [rows]."""
        inputs = self.inputs
        return uniforms(
            [s.seed for s in self.settings],
            [row.sample for row in inputs],
            [len(row.history) if row.position is None else row.position for row in inputs],
            stream,
            [row.canvas_pass for row in inputs],
        )

    def mirostat_mu(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Mirostat's bound of every row, [rows, 1]: what was carried here, or 2·tau at first."""
        pairs = zip(self.inputs, self.settings, strict=True)
        return np.array(
            [[r.state.mirostat_mu if r.state else 2.0 * s.mirostat_tau] for r, s in pairs]
        )
