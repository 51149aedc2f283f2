"""The backend contract: the step batch, its result, and the protocols that backends implement.

A `StepBatch` holds the new tokens of several sequences, where their keys and values are written,
and what to return. `Backend.launch` returns a `StepHandle` without waiting. Its result holds the
sampled tokens with their log-probabilities (for a canvas also entropy, margin and the
log-probability of a given token), and logits or observations only where requested. A device can
therefore start the next step before the result of the last one is read: a token may be given as
"sample number n of the previous step".

All fields are flat arrays, so a step can be sent to another process, recorded and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from unspool.backends.interventions import OUTPUT_SITES, StepInterventions
from unspool.errors import SettingsError, UnspoolError
from unspool.model.config import ModelConfig
from unspool.model.hub.memory import free_memory as free_memory
from unspool.sampling.picker import SamplingRows

if TYPE_CHECKING:
    from torch import Tensor

    from unspool.model.adapters import Adapter as Adapter
    from unspool.model.adapters import CanvasAdapterSettings as CanvasAdapterSettings


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Details = npt.NDArray[np.float64]  # [sampled, 3]: entropy, margin, log-probability of the target
Logits: TypeAlias = "Floats | Tensor"  # [rows, vocabulary], on the backend's device

RECURRENT_STATS = 3  # values per head in `Inside.recurrent`: gate, decay, norm of the state

_MAX_TABLE_ENTRIES = 1 << 28
_SMALL_ARRAY = 64  # elements: up to this size a Python loop is quicker than a numpy reduction


def empty_ints() -> Ints:
    return np.empty(0, np.int64)


def max_int(numbers: Ints) -> int:
    return max(numbers.tolist()) if len(numbers) <= _SMALL_ARRAY else int(numbers.max())


def min_int(numbers: Ints) -> int:
    return min(numbers.tolist()) if len(numbers) <= _SMALL_ARRAY else int(numbers.min())


@dataclass(frozen=True, slots=True)
class ObserveRequest:
    """Which internal values to return, each for the given token indices of the batch."""

    residuals: Ints = field(default_factory=empty_ints)
    # Which residual vectors: n is the input of layer n; None: all of them.
    layers: tuple[int, ...] | None = None
    attention: Ints = field(default_factory=empty_ints)
    parts: Ints = field(default_factory=empty_ints)
    # Values at any sites (`interventions.SITES`): (site, layer), each at all these tokens.
    tokens: Ints = field(default_factory=empty_ints)
    sites: tuple[tuple[str, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(
            len(self.residuals) or len(self.attention) or len(self.parts) or len(self.tokens)
        )

    @property
    def is_layer_tap(self) -> bool:
        """Whether only the inputs of some layers are requested, as drafting heads do."""
        has_others = len(self.attention) or len(self.parts) or len(self.tokens)
        return self.layers is not None and not has_others

    @property
    def reads_outputs(self) -> bool:
        """Whether values after the last layer are read, which few tokens have."""
        return any(site in OUTPUT_SITES for site, _ in self.sites)

    def select_layers(self, vectors: list[Tensor]) -> list[Tensor]:
        """Select the requested layers from the inputs of all layers and the final output."""
        return vectors if self.layers is None else [vectors[layer] for layer in self.layers]


@dataclass(frozen=True, slots=True)
class Observations:
    """Observed internal values, from the same forward pass that computed the logits."""

    # [layers + 1, tokens, width]: the input of the first layer and the output of each; or only the
    # requested layers, in the requested order (then a device tensor on a GPU: only drafting heads
    # ask for single layers).
    residuals: Floats | None = None
    # One array per token: [layers, heads, visible tokens]; zeros in recurrent layers.
    attention: list[Floats] = field(default_factory=list)
    # [layers, 2, tokens, width]: what attention and feed-forward added to the residual stream.
    parts: Floats | None = None
    first_position: int = 0  # position of the first observed token
    # Models with recurrent layers, one array per token whose attention is observed: [layers, 3,
    # heads] with the gate (how much is written, or let out), the decay of the old state, and the
    # norm of the new state; NaN in attention layers.
    recurrent: list[Floats] = field(default_factory=list)
    # [tokens, width] by site and layer, after the interventions at that site.
    sites: dict[tuple[str, int], Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TableUpdates:
    """Changes to the block table, applied in order: table[slots, columns] = pages.

    The block table has one row (a slot) per running sequence. Column c holds the page with the keys
    and values of positions c * page_size and up. The backend keeps the table between steps, so only
    changes are sent.
    """

    slots: Ints = field(default_factory=empty_ints)
    columns: Ints = field(default_factory=empty_ints)
    pages: Ints = field(default_factory=empty_ints)


@dataclass(slots=True)  # not frozen: that would triple the construction time, paid in every step
class StepBatch:
    """New tokens of several sequences, computed together. Treat it as immutable.

    The new tokens of row r are `tokens[starts[r]:starts[r + 1]]`, at consecutive positions. A
    negative token -1 - n, here and in the history used for penalties, stands for sample number n of
    the previously launched step.
    """

    tokens: Ints  # [n]
    positions: Ints  # [n]
    visible_end: Ints  # [n]: each token attends to positions below this; causal: position + 1
    row_starts: Ints  # [rows + 1]
    slots: Ints  # [rows]: each row's slot in the block table
    table_updates: TableUpdates = field(default_factory=TableUpdates)  # applied first
    # Pages to copy next, [n, 2]: source, target. No source is a target and no target occurs twice,
    # so a backend may copy in any order, or in parallel.
    page_copies: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    # Indices of the tokens after which a next token is sampled, ascending.
    sample_indices: Ints = field(default_factory=empty_ints)
    # Sampling settings, one row per entry of `sample_indices`.
    sampling: SamplingRows | None = None
    logits_indices: Ints = field(
        default_factory=empty_ints
    )  # indices of the tokens whose logits to return
    observe: ObserveRequest | None = None
    # [rows]: each row's adapter number, 0: none; empty if no row has one.
    adapters: Ints = field(default_factory=empty_ints)
    # Tokens that belong to several rows but are computed once, [n, 2]: token index, slot in the
    # block table to which its keys and values are also written, at the same position; ascending.
    echoes: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    # Models with recurrent layers, [rows, 2]: the slot of the state before the row's first token
    # (-1: a zero state), and the slot that receives the state after its last token. Both may be
    # equal. Otherwise no row reads a slot written in the same step, and each slot is written by one
    # row only; any number of rows may read one slot.
    state_slots: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    # Intermediate states to save, [n, 2]: token index, slot that receives the state after it;
    # ascending, at most one of each token.
    state_captures: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    # What is changed inside the model, for some of the tokens; None: nothing.
    interventions: StepInterventions | None = None


@dataclass(slots=True)
class StepResult:
    """Result of a step."""

    tokens: Ints  # [sampled]: sampled tokens; -1 where sampling failed
    logprobs: npt.NDArray[np.float64]  # [sampled]: under the model, before any sampling stage
    logits: Logits  # [requested logits, vocabulary]
    observations: Observations | None = None
    failures: dict[int, Exception] = field(default_factory=dict)  # by index into `sampled`
    details: Details | None = None  # only if the batch has a canvas


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step and return its result; raises what the step raised."""

    def ready(self) -> bool:
        """Whether `result` returns without waiting."""


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """The handle of a step that has already finished, for synchronous backends."""

    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result

    def ready(self) -> bool:
        return True


class BlockTable:
    """Pages of the running sequences, [slots, columns], kept between steps; -1: no page."""

    def __init__(self) -> None:
        self.pages = np.full((8, 64), -1, np.int64)

    def apply(self, updates: TableUpdates) -> None:
        if not len(updates.slots):
            return
        rows, columns = self.pages.shape
        row, column = int(updates.slots.max()), int(updates.columns.max())
        lowest = min(int(updates.slots.min()), int(updates.columns.min()))
        if lowest < 0 or (row + 1) * (column + 1) > _MAX_TABLE_ENTRIES:
            raise UnspoolError(f"block table has no slot {row}, column {column}")
        if row >= rows or column >= columns:
            while row >= rows:
                rows *= 2
            while column >= columns:
                columns *= 2
            grown = np.full((rows, columns), -1, np.int64)
            grown[: self.pages.shape[0], : self.pages.shape[1]] = self.pages
            self.pages = grown
        self.pages[updates.slots, updates.columns] = updates.pages


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How much a backend computes in one step; the defaults are for a CPU."""

    max_rows: int = 256
    prefill_tokens: int = 256
    # Prefill tokens in a step that also decodes: bounds inter-token latency.
    prefill_beside_decode: int = 64
    # Prefill tokens in a step that computes one prompt and nothing else; 0: `prefill_tokens`.
    prefill_alone: int = 0


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
    sites: frozenset[str]  # that interventions may change and observations may read

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

    @property
    def numerics(self) -> str:
        """What the last digits depend on besides the weights: backend, library version, instruction
        set or GPU, type of the KV cache, order of sums."""

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


MIN_STATES = 4  # one to read and one to write, for two sequences


def num_pages_in(memory: int, page: int) -> int:
    """Number of pages of `page` bytes that fit into `memory` bytes."""
    if memory < page:
        raise SettingsError(
            f"memory must hold at least one KV cache page of {page:,} bytes, got {memory:,}; "
            "raise memory"
        )
    return int(memory // page)


def num_pages_and_states(memory: int, page: int, state: int) -> tuple[int, int]:
    """Number of pages and of state slots of these sizes, in bytes, that share `memory`.

    A page needs at most one state, so small states get one slot per page. Large states get half of
    the memory. `state` 0: the model has no recurrent layers.
    """
    if not state:
        return num_pages_in(memory, page), 0
    states = max(MIN_STATES, min(memory // 2 // state, memory // (page + state)))
    if memory < states * state + page:
        raise SettingsError(
            f"memory must hold {MIN_STATES} recurrent states ({MIN_STATES * state:,} bytes) and a "
            f"KV cache page ({page:,} bytes), got {memory:,}; raise memory"
        )
    return num_pages_in(memory - states * state, page), states
