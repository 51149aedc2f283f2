"""Inputs of the stages besides the logits.

`RowInput` describes a row at one step. `RowSettings` holds the settings of many rows as columns,
built once per batch and used at every step. `Rows` combines the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.sampling.arrays import Array, array_operations, numpy_operations
from unspool.sampling.draw import uniforms
from unspool.sampling.settings import SamplingSettings

Tokens = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StageState:
    """State of a stage between tokens; stored per token, so that rewinding works."""

    mirostat_mu: float


@dataclass(frozen=True, slots=True)
class RowInput:
    """One row at one step.

    Attributes:
        history: all tokens so far, prompt first; a numpy array avoids a conversion per step.
        position: of the token to pick; None: the next one.
        canvas_pass: denoising step, if a position is sampled more than once.
        forbidden: tokens that must not be picked at this step.
        allowed: which tokens may be picked (a grammar's mask); logits beyond its end are padding.
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
    """Settings of many rows as columns, in the array type of the logits."""

    def __init__(self, settings: Sequence[SamplingSettings]) -> None:
        self.settings = tuple(settings)
        self._columns: dict[tuple[str, Any, Any], Array] = {}

    def column(self, name: str, logits: Array) -> Array:
        """A setting of every row, [rows, 1], in the dtype of `logits`."""
        key = (name, logits.dtype, getattr(logits, "device", None))
        if key not in self._columns:
            values = np.array([[float(getattr(s, name))] for s in self.settings])
            self._columns[key] = array_operations(logits).to_array_like(values, logits)
        return self._columns[key]


class Rows:
    """The rows of one step: settings and inputs."""

    def __init__(self, settings: RowSettings, inputs: Sequence[RowInput]) -> None:
        self._columns = settings
        self.settings = settings.settings
        self.inputs = inputs
        self._histories: list[Tokens] | None = None
        self._counts: tuple[Tokens, Tokens, Tokens] | None = None

    def column(self, name: str, logits: Array) -> Array:
        """A setting of every row, [rows, 1]."""
        return self._columns.column(name, logits)

    @property
    def histories(self) -> list[Tokens]:
        if self._histories is None:
            self._histories = [np.asarray(row.history, dtype=np.int64) for row in self.inputs]
        return self._histories

    def counts(self, vocabulary: int) -> tuple[Tokens, Tokens, Tokens]:
        """Tokens that penalties count, and how often: flat row numbers, tokens, counts."""
        if self._counts is None:
            row_counts = []
            for row, history in enumerate(self.histories):
                settings = self.settings[row]
                start = 0 if settings.penalize_prompt else self.inputs[row].prompt_length
                if settings.penalty_window >= 0:
                    start = max(start, len(history) - settings.penalty_window)
                row_counts.append(numpy_operations().count_tokens(history[start:], vocabulary))
            tokens, counts = row_counts[0]
            if len(row_counts) > 1:
                tokens = np.concatenate([tokens for tokens, _ in row_counts])
                counts = np.concatenate([counts for _, counts in row_counts])
            sizes = [tokens.size for tokens, _ in row_counts]
            self._counts = np.repeat(np.arange(len(sizes)), sizes), tokens, counts
        return self._counts

    def uniform(self, stream: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Random number of every row at its position; [rows]."""
        inputs = self.inputs
        seeds, samples = [s.seed for s in self.settings], [row.sample for row in inputs]
        positions = [len(row.history) if row.position is None else row.position for row in inputs]
        if all(row.canvas_pass is None for row in inputs):
            return uniforms(seeds, samples, positions, stream)
        return uniforms(seeds, samples, positions, stream, [row.canvas_pass for row in inputs])

    def mirostat_mu(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Mirostat's mu of every row, [rows, 1]: from the state, or 2·tau at the start."""
        pairs = zip(self.inputs, self.settings, strict=True)
        return np.array(
            [[r.state.mirostat_mu if r.state else 2.0 * s.mirostat_tau] for r, s in pairs]
        )
