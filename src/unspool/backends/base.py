"""The contract between Unspool and whatever keeps and runs a model.

A `Loaded` is a model with its weights in memory. It makes a `Backend` for the engine, and lets the
lenses read what they need of its weights, without saying how they are kept.

The engine keeps texts as lists of pages. A backend owns the pages' memory (keys and values of
`page_size` tokens each, in every layer) and runs a ragged batch: some rows bring a chunk of a
prompt, others a single next token. Everything crosses as flat integer arrays, so that a native
backend or a captured GPU graph can take the same call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.model.config import ModelConfig

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """New tokens of several texts, to be read in one run.

    The new tokens of row r are `tokens[starts[r]:starts[r + 1]]` and stand at the positions
    given. `pages[r]` lists the pages of the row from its beginning, filled up with -1.
    """

    tokens: Ints  # [n]
    positions: Ints  # [n]
    starts: Ints  # [rows + 1]
    pages: Ints  # [rows, most pages of a row]
    wanted: Ints  # which of the n tokens need logits


@dataclass(frozen=True, slots=True)
class Taps:
    """What to look at inside, for which of the batch's tokens; empty: nothing, at no cost."""

    residuals: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    attention: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    parts: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def __bool__(self) -> bool:
        return bool(len(self.residuals) or len(self.attention) or len(self.parts))


@dataclass(slots=True)
class Inside:
    """What the taps saw, taken from the same run that gave the logits."""

    # [layers + 1, tokens, width]: the vector before the first layer and after each
    residuals: Floats | None = None
    # for each tapped token: [layers, heads, length of its past, itself included]
    attention: list[Floats] = field(default_factory=list)
    # [layers, 2, tokens, width]: what attention and feed-forward added
    parts: Floats | None = None


@dataclass(slots=True)
class Ran:
    """The outcome of a run: a row of logits for each wanted token (numpy, or a device's array)."""

    logits: Any
    inside: Inside | None = None


class Backend(Protocol):
    """What the engine needs of whoever runs the model."""

    page_size: int  # tokens
    page_count: int
    page_bytes: int
    vocab_size: int
    context: int

    def run(self, batch: Batch, taps: Taps | None = None) -> Ran:
        """Read the batch's tokens: write their keys and values, give the wanted logits."""

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page's keys and values; the engine does this before a shared page is written."""


class Loaded(Protocol):
    """A model with its weights in memory, whichever way they are kept."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def precision(self) -> str:
        """What the weights are in: float32, bfloat16, Q4_1, ..."""

    @property
    def device(self) -> str:
        """Where they lie: cpu, cuda:0, ..."""

    def backend(self, *, memory: int | None, context: int) -> Backend:
        """Pages for keys and values in so many bytes (None: a share of what is free)."""

    def logits(self, vectors: Floats) -> Floats:
        """What final norm and head make of vectors: [n, width] to [n, vocabulary]."""

    def normed(self, vectors: Floats) -> Floats:
        """What the final norm alone makes of them: [n, width]."""

    def vector(self, name: str) -> Floats | None:
        """norm.weight (what is multiplied with), norm.bias or head.bias; None: it has none."""

    def rows(self, name: str, start: int, stop: int) -> Floats:
        """Some rows of embed.weight or head.weight, which may be the same table."""

    def fingerprint(self) -> str:
        """A cheap hash of the weights."""
