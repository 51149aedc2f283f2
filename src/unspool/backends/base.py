"""Protocols of a loaded model and of the backend that runs it.

A `Loaded` is a model with its weights in memory. It creates a `Backend` for the engine, and lets
the lenses read weights in any storage format.

A backend owns the KV cache pages (keys and values of `page_size` tokens each, in every layer) and
runs ragged batches over them: some rows bring a chunk of a prompt, others a single decode token.
For a model with recurrent layers it also owns the state slots; each holds the state of all
recurrent layers after one token of a sequence. The messages are in `step.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from unspool.backends.step import Floats, StepBatch, StepHandle
from unspool.model.config import ModelConfig

if TYPE_CHECKING:
    from unspool.model.adapters import Adapter as Adapter  # re-exported for the engine
    from unspool.model.adapters import CanvasAdapterSettings as CanvasAdapterSettings


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How much a backend computes in one step; the defaults are for a CPU."""

    max_rows: int = 256
    prefill_tokens: int = 256
    # Prefill tokens in a step that also decodes: bounds inter-token latency.
    prefill_beside_decode: int = 64


class Backend(Protocol):
    """Runs the model for the engine."""

    page_size: int  # tokens
    page_count: int
    page_bytes: int
    state_bytes: int  # bytes of one state slot; 0: the model has no recurrent layers
    state_count: int  # state slots
    vocab_size: int
    context: int  # maximum sequence length, tokens
    limits: StepLimits
    overlaps: bool  # whether a step can be launched before the previous result is read
    echoes: bool  # whether a token's keys and values can be written to several rows

    def launch(self, batch: StepBatch) -> StepHandle:
        """Start a step; its result may be read later."""

    def set_adapter(self, number: int, adapter: Adapter | None) -> None:
        """Register an adapter under a number (1 and up) for later steps; None removes it."""


class LoadedModel(Protocol):
    """A model with its weights in memory, in any format."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def precision(self) -> str:
        """Type of the weights: float32, bfloat16, Q4_1, ..."""

    @property
    def device(self) -> str:
        """Device of the weights: cpu, cuda:0, ..."""

    def backend(self, *, memory: int | None, context: int) -> Backend:
        """Create a backend whose KV cache and state slots take `memory` bytes (None: a share of the
        free memory)."""

    def logits(self, vectors: Floats) -> Floats:
        """Apply the final norm and the head: [n, width] to [n, vocabulary]."""

    def normed(self, vectors: Floats) -> Floats:
        """Apply only the final norm: [n, width] to [n, width]."""

    def vector(self, name: str) -> Floats | None:
        """norm.weight (the effective factor), norm.bias or head.bias; None: the model has none."""

    def rows(self, name: str, start: int, stop: int) -> Floats:
        """Rows of embed.weight or head.weight, which may be tied."""

    def fingerprint(self) -> str:
        """A cheap hash of the weights."""
