"""What Unspool needs of whatever keeps and runs a model.

A `Loaded` is a model with its weights in memory. It makes a `Backend` for the engine, and lets the
lenses read what they need of its weights, without saying how they are kept.

A backend owns the memory of the pages (keys and values of `page_size` tokens each, in every layer)
and runs ragged batches over them: some rows bring a chunk of a prompt, others a single next token.
Of a model with recurrent layers it also owns the slots, each with room for one state of a text: all
that these layers know of it at one place. What crosses is in `step.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from unspool.backends.step import Floats, Handle, StepBatch
from unspool.model.config import ModelConfig

if TYPE_CHECKING:
    from unspool.model.adapters import Adapter as Adapter  # those above know them from here
    from unspool.model.adapters import Twin as Twin


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How much a backend takes in one step; the usual numbers are a processor's."""

    max_rows: int = 256
    prefill_tokens: int = 256  # of prompts
    # The same while texts are written: bounds how long their tokens wait.
    prefill_beside_decode: int = 64


class Backend(Protocol):
    """What the engine needs of whoever runs the model."""

    page_size: int  # tokens
    page_count: int
    page_bytes: int
    state_bytes: int  # of one slot; 0: the model has no recurrent layers
    state_count: int  # slots
    vocab_size: int
    context: int
    limits: StepLimits
    overlaps: bool  # whether a step can be launched before the one before it was read
    echoes: bool  # whether a token can be written into several rows (`StepBatch.echoes`)

    def launch(self, batch: StepBatch) -> Handle:
        """Begin a step; its result may be asked for later."""

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        """Keep an adapter for the rows that name its number (from 1 on), or forget it (None)."""


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
        """Pages for keys and values, and slots for states, in so many bytes (None: a share of what
        is free)."""

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
