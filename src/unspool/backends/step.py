"""The step: the one message that goes to a backend, and what comes back.

A `StepBatch` says which tokens of which texts are to be read, where their keys and values go, and
what is wanted of the outcome. A backend launches it and gives a `Handle` at once; the handle's
result holds the picked tokens with their log-probabilities, and logits or looks only where they
were asked for. So a device can begin the next step before the last one has been read: a token may
be given as "pick number n of the step before".

Everything in it is a flat array. A step can be sent to another process, written down and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from unspool.errors import UnspoolError
from unspool.sampling.picker import PickRows

if TYPE_CHECKING:
    from torch import Tensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Logits: TypeAlias = "Floats | Tensor"  # rows of a vocabulary each, where the backend has them


_LARGEST_TABLE = 1 << 28  # entries


RECURRENT_LOOK = 3  # numbers of a head in `Inside.recurrent`


_FEW = 64  # numbers: Python goes through so many in less time than numpy takes to begin


def no_ints() -> Ints:
    return np.empty(0, np.int64)


def largest(numbers: Ints) -> int:
    return max(numbers.tolist()) if len(numbers) <= _FEW else int(numbers.max())


def smallest(numbers: Ints) -> int:
    return min(numbers.tolist()) if len(numbers) <= _FEW else int(numbers.min())


@dataclass(frozen=True, slots=True)
class Look:
    """What to look at inside, for which of the batch's tokens."""

    residuals: Ints = field(default_factory=no_ints)
    # Of which of the vectors: n is the one before layer n; None: of all.
    layers: tuple[int, ...] | None = None
    attention: Ints = field(default_factory=no_ints)
    parts: Ints = field(default_factory=no_ints)

    def __bool__(self) -> bool:
        return bool(len(self.residuals) or len(self.attention) or len(self.parts))

    @property
    def is_tap(self) -> bool:
        """Whether only the vectors before named layers are wanted, as drafting heads want them."""
        return self.layers is not None and not len(self.attention) and not len(self.parts)

    def chosen(self, vectors: list[Tensor]) -> list[Tensor]:
        """Of the vectors before the first layer and after each, those that are asked for."""
        return vectors if self.layers is None else [vectors[layer] for layer in self.layers]


@dataclass(frozen=True, slots=True)
class Inside:
    """What was seen, taken from the same run that gave the logits."""

    # [layers + 1, tokens, width]: the vector before the first layer and after each; or those that
    # were asked for, in their order: on a GPU a tensor there, since only drafting heads ask so
    residuals: Floats | None = None
    # for each token looked at: [layers, heads, how far it may see]; zeros in recurrent layers,
    # which have no attention
    attention: list[Floats] = field(default_factory=list)
    # [layers, 2, tokens, width]: what attention and feed-forward added
    parts: Floats | None = None
    first: int = 0  # position of the first token that was looked at
    # for each token whose attention is looked at, of a model with recurrent layers: [layers, 3,
    # heads], the gate (how much is written, or let out), the decay of what was known, and the norm
    # of the state behind it; not a number where a layer has attention instead
    recurrent: list[Floats] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TableUpdates:
    """Changes of the block table, to be made in this order: table[slots, columns] = pages.

    The block table has a row (a slot) for each text that runs; column c holds the page with the
    keys and values of the positions from c * page_size on. It is kept by the backend from step to
    step, so only what changed is sent.
    """

    slots: Ints = field(default_factory=no_ints)
    columns: Ints = field(default_factory=no_ints)
    pages: Ints = field(default_factory=no_ints)


@dataclass(slots=True)  # frozen, it would take three times as long to make, at every step
class StepBatch:
    """New tokens of several texts, to be read together. Nobody changes it.

    The new tokens of row r are `tokens[starts[r]:starts[r + 1]]`, at consecutive positions. A
    negative token -1 - n, there and in the history that penalties see, stands for pick number n of
    the step that was launched before this one.
    """

    tokens: Ints  # [n]
    positions: Ints  # [n]
    visible_end: Ints  # [n]: each token sees the positions before this one; its own + 1 if causal
    starts: Ints  # [rows + 1]
    slots: Ints  # [rows]: each row's line of the block table
    updates: TableUpdates = field(default_factory=TableUpdates)  # made first
    # Pages copied next, [n, 2]: source, target. No source is a target and no target occurs twice,
    # so a backend may copy in any order, or all at once.
    copies: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    # After which tokens the backend picks the next, in the order of the tokens.
    sampled: Ints = field(default_factory=no_ints)
    pick: PickRows | None = None  # how: one line for each of `sampled`
    logits: Ints = field(default_factory=no_ints)  # of which tokens the logits are given back
    look: Look | None = None
    adapters: Ints = field(default_factory=no_ints)  # [rows]: each row's adapter by its number, 0:
    # none; empty where nobody has one
    # Tokens that belong to several rows but are computed in one: token, line of the block table
    # into which its keys and values are written too, at the same position; in the order of tokens.
    echoes: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    # Of models with recurrent layers, [rows, 2]: the slot with the state before the row's first
    # token (-1: there is none yet, all zeros), and the slot that takes the state behind its last.
    # Both may be the same. Otherwise nobody reads a slot that is written in the same step, and
    # nobody else writes it; any number of rows may read one.
    states: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    # States to be kept on the way: token, slot that takes the state right behind it; in the order
    # of tokens.
    captures: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))


@dataclass(slots=True)
class StepResult:
    """What came of a step."""

    tokens: Ints  # [sampled]: the picked ones; -1 where that failed
    logprobs: npt.NDArray[np.float64]  # [sampled]: by the model itself, before any sampling stage
    logits: Logits  # [logits asked for, vocabulary]
    inside: Inside | None = None
    failures: dict[int, Exception] = field(default_factory=dict)  # by number in `sampled`


class Handle(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Wait for the step and give what came of it; raises what went wrong."""

    def ready(self) -> bool:
        """Whether it need not be waited for any more."""


@dataclass(frozen=True, slots=True)
class Done:
    """The handle of a backend that computes at once."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome

    def ready(self) -> bool:
        return True


class BlockTable:
    """Which pages the texts of the next steps have, kept from step to step."""

    def __init__(self) -> None:
        self.pages = np.full((8, 64), -1, np.int64)

    def apply(self, updates: TableUpdates) -> None:
        if not len(updates.slots):
            return
        rows, columns = self.pages.shape
        row, column = int(updates.slots.max()), int(updates.columns.max())
        lowest = min(int(updates.slots.min()), int(updates.columns.min()))
        if lowest < 0 or (row + 1) * (column + 1) > _LARGEST_TABLE:
            raise UnspoolError(f"there is no line {row}, column {column} in the block table")
        if row >= rows or column >= columns:
            while row >= rows:
                rows *= 2
            while column >= columns:
                columns *= 2
            grown = np.full((rows, columns), -1, np.int64)
            grown[: self.pages.shape[0], : self.pages.shape[1]] = self.pages
            self.pages = grown
        self.pages[updates.slots, updates.columns] = updates.pages
