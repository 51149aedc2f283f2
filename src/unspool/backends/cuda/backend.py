"""The GPU backend of the engine: decode in captured CUDA graphs, prefill kernel by kernel.

Sequences with one or a few new tokens go through captured graphs; prefill chunks, and all steps
that are observed, are launched kernel by kernel. Only reading a step's result waits for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.cuda.attention import PAGE_SIZE
from unspool.backends.cuda.graphs import GraphCache
from unspool.backends.cuda.interventions import RowChanges, StepHooks, VectorPool
from unspool.backends.cuda.kv_cache import KVCache, page_bytes
from unspool.backends.cuda.matmul import num_multiprocessors
from unspool.backends.cuda.observe import ResidualTap, StepObserver
from unspool.backends.cuda.prefill import PrefillRunner
from unspool.backends.cuda.runner import LayerHooks, ModelRunner, activation_bytes
from unspool.backends.cuda.sampler import DevicePicker
from unspool.backends.cuda.step_io import (
    MAX_TABLE_UPDATES,
    CudaStepHandle,
    DecodeStates,
    StepInputs,
    StepOutputs,
    to_device,
)
from unspool.backends.cuda.weights import Weights
from unspool.backends.interventions import NATIVE_SITES
from unspool.backends.step import (
    Ints,
    Observations,
    ObserveRequest,
    StepBatch,
    StepLimits,
    empty_ints,
    max_int,
    min_int,
)
from unspool.errors import UnspoolError
from unspool.model.adapters import Adapter
from unspool.sampling.picker import HISTORY_END, HISTORY_START, SamplingRows

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_PADDED_SIZES = [
    next(size for size in BATCH_SIZES if size >= n) for n in range(BATCH_SIZES[-1] + 1)
]
_SHORTEST = 512  # tokens: the smallest captured context length


def padded_batch_size(count: int) -> int:
    """Smallest captured batch size that holds `count` rows."""
    return _PADDED_SIZES[count]


def length_bucket(length: int) -> int:
    """Smallest captured context length that holds `length` tokens."""
    bucket = _SHORTEST
    while bucket < length:
        bucket *= 4
    return bucket


_MAX_ROWS = BATCH_SIZES[-1]
_MAX_DECODE_TOKENS = 16  # a row with at most this many new tokens is decoded in a captured graph
# Short prompts run in captured graphs too, each token as a row, if the step has at most this many
# tokens and their attention reads at most this many keys: launching all kernels takes 10 ms.
_GRAPH_TOKENS, _GRAPH_KEYS = 256, 1 << 16
_PROMPT_SIZES = 64  # a graph with prompts has a multiple of this many rows
_PREFILL_TOKENS = 8192  # a step: enough to keep the tensor cores busy
_PREFILL_ALONE = 16_384  # a step with nothing but one prompt: it is split less often
# How long prefill may delay, about: the next tokens of running sequences, and a request that
# arrives while a prompt is alone.
_PREFILL_DELAY_S, _ALONE_DELAY_S = 0.1, 0.5
_ACTIVATION_MARGIN = 3  # a longer chunk needs this many times the memory of its activations
# About what prefill reaches on a multiprocessor, by compute capability: measured on an H200, two
# thirds of the data sheet for an A100, a B200, and all others (GeForce).
_FLOPS_PER_SM = {(9, 0): 5e12, (8, 0): 2e12, (10, 0): 1e13}
_OTHER_FLOPS_PER_SM = 1e12
_NO_INTS = empty_ints()


class CudaBackend:
    """Decode graphs and prefill over one pool of KV cache pages."""

    overlaps = True
    echoes = False
    sites = NATIVE_SITES
    page_size = PAGE_SIZE

    @torch.inference_mode(False)  # its buffers are written with inference mode on and off
    def __init__(
        self, weights: Weights, *, pages: KVCache, context: int, exact: bool = False
    ) -> None:
        config, device = weights.config, weights.device
        beside = min(_PREFILL_TOKENS, _prefill_tokens_in(_PREFILL_DELAY_S, weights))
        self.limits = StepLimits(
            max_rows=256,
            prefill_tokens=_PREFILL_TOKENS,
            prefill_beside_decode=max(512, beside),
            prefill_alone=_prefill_alone(weights),
        )
        self.page_count, self.page_bytes = pages.count, page_bytes(config, weights.dtype)
        self.state_bytes, self.state_count = config.state_bytes, pages.state_count
        self.vocab_size, self.context = config.vocab_size, context
        self._device, self._pages = device, pages
        max_prefill = max(_PREFILL_TOKENS, self.limits.prefill_alone) + _MAX_ROWS
        columns = -(-context // PAGE_SIZE) + 1
        self._outputs = StepOutputs(_MAX_ROWS, max_prefill, self.vocab_size, device)
        self.inputs = StepInputs(
            _MAX_ROWS, self._outputs.picks, columns, pages.padding_page, device
        )
        self.runner = ModelRunner(weights, pages, self.inputs, context, exact)
        self._graphs = GraphCache(device)
        # Most tokens of a step whose short prompts run in a graph; 0: none do.
        self.graph_tokens = 0
        if self._graphs.can_capture and not self.state_bytes:  # recurrences have chunked kernels
            self.graph_tokens = _GRAPH_TOKENS
        self._prefill = PrefillRunner(self.runner)
        self._taps: dict[tuple[int, ...], ResidualTap] = {}
        self._vectors = VectorPool(device)
        self._changes = self._new_changes()
        picks = self._outputs.picks
        details = self._outputs.details
        self._picker = self._new_picker(picks[:_MAX_ROWS], self._outputs.decode_logprobs)
        self._picker.floats, self._picker.ints = self.inputs.floats, self.inputs.ints
        self._picker.canvas, self._picker.details = self.inputs.canvas, details[:_MAX_ROWS]
        self._prefill_picker = self._new_picker(picks[_MAX_ROWS:], self._outputs.prefill_logprobs)
        self._prefill_picker.details = details[_MAX_ROWS:]
        # Index of each pick of the previous step among all picks; None: pick n has index n.
        self._previous_index: Ints | None = None

    def _new_picker(self, picks: Tensor, logprobs: Tensor) -> DevicePicker:
        picker = DevicePicker(len(picks), self.vocab_size, self._device, pdl=self.runner.pdl)
        picker.picks, picker.logprobs, picker.previous = picks, logprobs, self._outputs.picks
        return picker

    def _new_changes(self) -> RowChanges:
        return RowChanges(self.runner.weights.config, self._vectors, pdl=self.runner.pdl)

    def set_adapter(self, token_number: int, adapter: Adapter | None) -> None:
        if self.runner.adapters.set(token_number, adapter):
            self._graphs.clear()

    def launch(self, batch: StepBatch) -> CudaStepHandle:
        _check(batch, self)
        try:
            if self.inputs.grow_table(batch.slots):
                self._graphs.clear()
            split = _BatchSplit(batch, self.runner.max_fused_rows, self.graph_tokens)
            if len(batch.adapters):
                split.set_adapters(batch, self.runner.adapters.slots_for(batch.adapters))
            table_updates = _NO_INTS, _NO_INTS
            if len(batch.table_updates.slots):
                entries = self.inputs.table_index(
                    batch.table_updates.slots, batch.table_updates.columns
                )
                table_updates = entries, batch.table_updates.pages
            if (
                len(split.prefill_tokens)
                or len(batch.page_copies)
                or len(table_updates[0]) > MAX_TABLE_UPDATES
            ):
                with torch.inference_mode():
                    return self._launch_mixed(batch, split, table_updates)
            logits = self._run_graph(batch, split, table_updates)
            inside = self._tapped_residuals(batch.observe) if batch.observe else None
            self._previous_index = split.pick_index
            return self._outputs.copy_to_host(
                batch.sample_indices, logits, inside, has_prefill=False,
                has_canvas=_has_canvas(batch),
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise UnspoolError(
                f"out of GPU memory in a step of {len(batch.tokens):,} tokens; reserve less "
                "memory for the KV cache (memory=...)"
            ) from error

    def _launch_mixed(
        self, batch: StepBatch, split: _BatchSplit, table_updates: tuple[Ints, Ints]
    ) -> CudaStepHandle:
        """Run a step that has prefill tokens, page copies or many block table updates."""
        if len(table_updates[0]):
            self.inputs.update_table(*table_updates)
        if len(batch.page_copies):
            self._pages.copy(batch.page_copies)
        logits: list[Tensor] = []
        inside: Observations | None = None
        prefill = None
        if len(split.prefill_tokens):  # first: the graph overwrites the previous step's picks
            prefill = self._prefill.build_batch(
                batch, split.prefill_seqs, split.prefill_tokens,
                split.prefill_outputs,
                self._prefill_token_ids(batch, split), split.prefill_adapters, split.num_joined,
            )  # fmt: skip
        if split.num_decode:
            decoded = self._run_graph(batch, split, (_NO_INTS, _NO_INTS))
            logits += [] if decoded is None else [decoded]
            inside = self._tapped_residuals(batch.observe) if batch.observe else None
        if prefill is not None:
            observer = StepObserver(self.runner, batch, batch.observe) if batch.observe else None
            prefilled = self._prefill.run(prefill, self._prefill_hooks(batch, split, observer))
            inside = observer.inside() if observer else None
            if split.prefill_pick is not None:
                self._sample_prefill(prefilled[: len(split.prefill_pick.ints)], split.prefill_pick)
            first = len(split.sampled_prefill)
            logits.append(prefilled[first : first + len(split.prefill_logits)])
        requested = torch.cat(logits) if len(batch.logits_indices) else None
        if requested is not None and split.logits_order is not None:
            requested = requested[to_device(split.logits_order, self._device)]
        self._previous_index = split.pick_index
        pick_index = batch.sample_indices if split.pick_index is None else split.pick_index
        return self._outputs.copy_to_host(
            pick_index, requested, inside, has_prefill=len(split.sampled_prefill) > 0,
            has_canvas=_has_canvas(batch),
        )  # fmt: skip

    def _prefill_hooks(
        self, batch: StepBatch, split: _BatchSplit, observer: StepObserver | None
    ) -> LayerHooks | None:
        """What changes and reads the values of the prefilled tokens."""
        if batch.interventions is None:
            return observer
        changes, outputs = self._new_changes(), self._new_changes()
        tokens, output_tokens = split.prefill_tokens, split.prefill_tokens[split.prefill_outputs]
        changes.set(batch.interventions, tokens, len(tokens))
        outputs.set(batch.interventions, output_tokens, len(output_tokens))
        return StepHooks(changes, outputs, observer)

    def _run_graph(
        self, batch: StepBatch, split: _BatchSplit, table_updates: tuple[Ints, Ints]
    ) -> Tensor | None:
        """Run the decode rows in a graph; return the requested logits of these rows."""
        decode_rows, num_decode = split.decode_rows, split.num_decode
        ends = batch.visible_end[decode_rows]
        size = padded_batch_size(num_decode)
        if split.has_prompts:  # of any length: few graphs
            size = -(-num_decode // _PROMPT_SIZES) * _PROMPT_SIZES
        max_context = min(length_bucket(max_int(ends)), self.context)
        sampled = penalties = canvas = False
        picks = None
        if split.decode_pick is not None:
            pick, numbers = split.decode_pick, split.sampled_decode
            sampled = any(pick.floats[:, 0].tolist())
            picks = (numbers, pick.floats, pick.ints, pick.canvas)
            penalties, canvas = len(pick.history) > 0, pick.canvas is not None
            if penalties:
                if self.inputs.grow_history(len(pick.history)):
                    self._picker.history = self.inputs.history
                    self._graphs.clear()
                self.inputs.send_history(self._pick_indices(pick.history))
        self.inputs.send(
            num_decode, size, self._pick_indices(batch.tokens[decode_rows]),
            batch.positions[decode_rows], ends, split.slots, table_updates, picks,
            split.decode_adapters, self._decode_states(batch, split),
        )  # fmt: skip
        single_tokens, picker = split.single_tokens, self._picker
        adapted = split.decode_adapters is not None
        layers = batch.observe.layers if batch.observe else None
        tap = None if layers is None else self._tap_for(layers)
        changes = self._changes
        hooks: LayerHooks | None = tap
        rows = np.arange(len(batch.tokens))[decode_rows]
        if changes.set(batch.interventions, rows, _MAX_ROWS):
            self._graphs.clear()
        if changes.sites:
            hooks = StepHooks(changes, changes, tap)

        def launch() -> None:
            self.runner.decode(size, max_context, single_tokens, adapted, hooks)
            picker.launch(
                self.runner.logits[:size], sampled=sampled, penalties=penalties, canvas=canvas
            )

        self._graphs.run(
            (
                size, max_context, single_tokens, sampled, penalties, canvas, adapted, layers,
                changes.sites,
            ),
            launch,
        )  # fmt: skip
        requested = split.decode_logits
        if not len(requested):
            return None
        first, last = int(requested[0]), int(requested[-1])
        if last - first + 1 == len(requested):
            return self.runner.logits[first : last + 1]
        return self.runner.logits[to_device(requested, self._device)]

    def _decode_states(self, batch: StepBatch, split: _BatchSplit) -> DecodeStates | None:
        """State slots of the decode rows; None: the model has no recurrent layers."""
        if not self.state_bytes:
            return None
        counts = np.diff(batch.row_starts)[split.decode_seqs]
        starts = np.concatenate(([0], np.cumsum(counts)))
        captures = batch.state_captures
        if len(captures) and not isinstance(split.decode_rows, slice):
            captures = captures[np.isin(captures[:, 0], split.decode_rows)]
            rows = split.decode_rows.searchsorted(captures[:, 0])
            captures = np.stack((rows, captures[:, 1]), 1)
        return DecodeStates(starts, batch.state_slots[split.decode_seqs], captures)

    def _tap_for(self, layers: tuple[int, ...]) -> ResidualTap:
        tap = self._taps.get(layers)
        if tap is None:
            with torch.inference_mode(False):
                tap = self._taps[layers] = ResidualTap(layers, _MAX_ROWS, self.runner.weights)
        return tap

    def _tapped_residuals(self, look: ObserveRequest) -> Observations:
        """Residual vectors of the graph that was launched last, left on the device."""
        assert look.layers is not None
        first, last = int(look.residuals[0]), int(look.residuals[-1]) + 1
        vectors: Any = self._taps[look.layers].vectors(first, last)
        if last - first != len(look.residuals):
            vectors = vectors[:, to_device(look.residuals - first, self._device)]
        return Observations(residuals=vectors)

    def _pick_indices(self, tokens: Ints) -> Ints:
        """Map tokens -1 - n (pick n of the previous step) to -1 - (index of that pick)."""
        if self._previous_index is None or min_int(tokens) >= 0:
            return tokens
        is_pick, tokens = tokens < 0, tokens.copy()
        tokens[is_pick] = -1 - self._previous_index[-1 - tokens[is_pick]]
        return tokens

    def _prefill_token_ids(self, batch: StepBatch, split: _BatchSplit) -> Tensor:
        """Token ids of the prefill on the device, previous picks included."""
        tokens = to_device(self._pick_indices(batch.tokens[split.prefill_tokens]), self._device)
        if min_int(batch.tokens[split.prefill_tokens]) < 0:
            picked = self.inputs.previous[(-1 - tokens).clamp_min(0)].clamp_min(0)
            tokens = torch.where(tokens < 0, picked, tokens)
        return tokens

    def _sample_prefill(self, logits: Tensor, pick: SamplingRows) -> None:
        picker, num_rows = self._prefill_picker, len(pick.ints)
        picker.floats[:num_rows].copy_(to_device(pick.floats, self._device))
        picker.ints[:num_rows].copy_(to_device(pick.ints, self._device))
        if len(pick.history):
            picker.history = to_device(self._pick_indices(pick.history), self._device)
        if pick.canvas is not None:
            picker.canvas[:num_rows].copy_(to_device(pick.canvas, self._device))
        picker.launch(logits, penalties=bool(len(pick.history)), canvas=pick.canvas is not None)


def _prefill_tokens_in(seconds: float, weights: Weights) -> int:
    """About how many tokens are prefilled in this time."""
    num_weights = sum(matrix.rows * matrix.columns for matrix in weights.matrices())
    device, rate = weights.device, _OTHER_FLOPS_PER_SM
    if device.type == "cuda":
        rate = _FLOPS_PER_SM.get(torch.cuda.get_device_capability(device), rate)
    tokens = int(seconds * rate * num_multiprocessors(device) / (2 * num_weights))
    return tokens // 256 * 256  # whole tiles of matrix products


def _prefill_alone(weights: Weights) -> int:
    """Prefill tokens of a step with nothing but one prompt: more if there is time and memory."""
    tokens = min(_PREFILL_ALONE, _prefill_tokens_in(_ALONE_DELAY_S, weights))
    if weights.device.type != "cuda" or tokens <= _PREFILL_TOKENS:
        return _PREFILL_TOKENS
    needed = tokens * activation_bytes(weights)
    free = torch.cuda.mem_get_info(weights.device)[0]
    return tokens if free > _ACTIVATION_MARGIN * needed else _PREFILL_TOKENS


class _BatchSplit:
    """Splits the tokens of a step into decode rows (run in a graph) and prefill tokens."""

    decode_rows: Ints | slice
    decode_seqs: Ints | slice  # rows of the batch that are decoded
    pick_index: Ints | None  # index of each pick, decode first; None: one pick per decode row
    logits_order: Ints | None  # index of each requested row of logits, decode first
    decode_adapters: Ints | None = None  # adapter slot of each row; None: no row has an adapter
    prefill_adapters: Ints | None = None
    # How many of the first sequences are decoded in the prefill's matrix products, not in a graph.
    num_joined = 0
    has_prompts = False  # whether prompts are among the decode rows

    def __init__(self, batch: StepBatch, max_fused_rows: int, graph_tokens: int) -> None:
        causal = max_int(batch.visible_end - batch.positions) == 1
        self.single_tokens = causal
        look = batch.observe
        reads_layers = look is not None and bool(look) and not look.is_layer_tap
        if len(batch.tokens) == len(batch.slots) <= _MAX_ROWS and not reads_layers:
            self._all_decode(batch, batch.slots)  # one token per row: the common case
            return
        counts = np.diff(batch.row_starts)
        token_indices, pick = np.arange(len(batch.tokens)), batch.sampling
        is_short = counts <= _MAX_DECODE_TOKENS
        is_small = len(batch.tokens) <= graph_tokens and not reads_layers
        if is_small and _fits_graph(batch, counts, max_fused_rows):
            self.has_prompts = not is_short.all()
            is_short[:] = True
        run_together = bool(look) and (
            reads_layers or not is_short.all()
        )  # observed tokens run together
        if run_together or int(counts[is_short].sum()) > _MAX_ROWS:
            is_short[:] = False
        else:
            self.num_joined = _num_joined(batch, is_short, max_fused_rows)
            if self.num_joined:
                is_short[:] = False
        if not is_short.any():
            self._all_prefill(batch)
            return
        self.single_tokens = causal and bool((counts[is_short] == 1).all())
        token_slots = np.repeat(batch.slots, counts)
        if is_short.all():
            self._all_decode(batch, token_slots)
            return
        is_decode = np.repeat(is_short, counts)
        self.decode_rows, self.prefill_tokens = token_indices[is_decode], token_indices[~is_decode]
        self.num_decode, self.slots = len(self.decode_rows), token_slots[is_decode]
        self.decode_seqs, self.prefill_seqs = np.flatnonzero(is_short), np.flatnonzero(~is_short)
        token_number = np.where(is_decode, np.cumsum(is_decode), np.cumsum(~is_decode)) - 1
        sampled_in_decode = is_decode[batch.sample_indices]
        logits_in_decode = is_decode[batch.logits_indices]
        self.sampled_decode = token_number[batch.sample_indices[sampled_in_decode]]
        self.sampled_prefill = token_number[batch.sample_indices[~sampled_in_decode]]
        self.decode_pick, self.prefill_pick = (
            _select_picks(pick, sampled_in_decode),
            _select_picks(pick, ~sampled_in_decode),
        )
        pick_index = np.empty(len(batch.sample_indices), np.int64)
        pick_index[sampled_in_decode] = self.sampled_decode
        pick_index[~sampled_in_decode] = _MAX_ROWS + np.arange(len(self.sampled_prefill))
        self.pick_index = pick_index
        self.decode_logits = token_number[batch.logits_indices[logits_in_decode]]
        self.prefill_logits = token_number[batch.logits_indices[~logits_in_decode]]
        self.prefill_outputs = np.concatenate((self.sampled_prefill, self.prefill_logits))
        order = np.empty(len(batch.logits_indices), np.int64)
        order[logits_in_decode] = np.arange(logits_in_decode.sum())
        order[~logits_in_decode] = np.arange(logits_in_decode.sum(), len(order))
        self.logits_order = order

    def set_adapters(self, batch: StepBatch, slots: Ints) -> None:
        """Set the adapter slot of each token."""
        token_adapters = np.repeat(slots, np.diff(batch.row_starts))
        decode, prefill = token_adapters[self.decode_rows], token_adapters[self.prefill_tokens]
        self.decode_adapters = decode if decode.any() else None
        self.prefill_adapters = prefill if prefill.any() else None

    def _all_prefill(self, batch: StepBatch) -> None:
        look = batch.observe
        observed = look.tokens if look is not None and look.reads_outputs else _NO_INTS
        self.decode_rows = self.decode_seqs = self.slots = self.sampled_decode = _NO_INTS
        self.prefill_tokens, self.num_decode = np.arange(len(batch.tokens)), 0
        self.prefill_seqs = np.arange(len(batch.slots))
        self.sampled_prefill, self.prefill_logits = batch.sample_indices, batch.logits_indices
        self.decode_pick = None
        self.prefill_pick = batch.sampling if len(batch.sample_indices) else None
        self.pick_index = _MAX_ROWS + np.arange(len(batch.sample_indices))
        self.decode_logits, self.logits_order = _NO_INTS, None
        self.prefill_outputs = np.concatenate((self.sampled_prefill, self.prefill_logits, observed))

    def _all_decode(self, batch: StepBatch, slots: Ints) -> None:
        self.decode_rows, self.decode_seqs = slice(None), slice(None)
        self.prefill_tokens = _NO_INTS
        self.num_decode, self.slots = len(slots), slots
        self.sampled_decode, self.sampled_prefill = batch.sample_indices, _NO_INTS
        self.decode_pick, self.prefill_pick = batch.sampling, None
        self.pick_index = None if len(batch.sample_indices) == len(slots) else batch.sample_indices
        self.decode_logits, self.logits_order = batch.logits_indices, None


def _fits_graph(batch: StepBatch, counts: Ints, max_fused_rows: int) -> bool:
    """Whether short prompts may run in a graph, beside the rows that are decoded.

    Rows that use the fused kernels keep them, and attention must not read too many keys.
    """
    is_prompt = counts > _MAX_DECODE_TOKENS
    num_decode = int(counts[~is_prompt].sum())
    lengths = batch.visible_end[batch.row_starts[1:] - 1]
    num_keys = int((counts * lengths)[is_prompt].sum())
    return not 0 < num_decode <= max_fused_rows and num_keys <= _GRAPH_KEYS


def _num_joined(batch: StepBatch, is_short: npt.NDArray[np.bool_], max_fused_rows: int) -> int:
    """How many of the first rows are better decoded in the products of the prefill beside them.

    These take hardly longer with such rows, and a graph would read all weights again. Rows that use
    the fused kernels keep them: their numbers are those that they have alone.
    """
    has_own_kernels = len(batch.adapters) > 0 or len(batch.state_slots) > 0
    if has_own_kernels or is_short.all():
        return 0
    num_leading = int(np.argmin(is_short))
    return num_leading if int(batch.row_starts[num_leading]) > max_fused_rows else 0


def _has_canvas(batch: StepBatch) -> bool:
    return batch.sampling is not None and batch.sampling.canvas is not None


def _select_picks(pick: SamplingRows | None, rows: npt.NDArray[np.bool_]) -> SamplingRows | None:
    if pick is None or not rows.any():
        return None
    if rows.all():
        return pick
    ints = pick.ints[rows]
    has_history = bool((ints[:, HISTORY_END] > ints[:, HISTORY_START]).any())
    canvas = None if pick.canvas is None else pick.canvas[rows]
    return SamplingRows(pick.floats[rows], ints, pick.history if has_history else _NO_INTS, canvas)


def _check(batch: StepBatch, backend: CudaBackend) -> None:
    """Raise if an index is out of range: a kernel would write outside its buffers."""
    size, pages = len(batch.tokens), batch.table_updates.pages
    is_invalid = (
        size == 0
        or max_int(batch.tokens) >= backend.vocab_size
        or min_int(batch.positions) < 0
        or max_int(batch.visible_end) > backend.context
        or (len(pages) and not 0 <= min_int(pages) <= max_int(pages) < backend.page_count)
    )
    if backend.state_bytes:
        is_invalid = is_invalid or _has_invalid_states(batch, backend.state_count)
    if is_invalid:
        raise UnspoolError("the batch has a token, position, page or state out of range")


def _has_invalid_states(batch: StepBatch, count: int) -> bool:
    states, captures = batch.state_slots, batch.state_captures
    if states.shape != (len(batch.slots), 2) or min_int(states[:, 1]) < 0:
        return True
    if max_int(states.reshape(-1)) >= count:
        return True
    return len(captures) > 0 and (
        min_int(captures.reshape(-1)) < 0
        or max_int(captures[:, 0]) >= len(batch.tokens)
        or max_int(captures[:, 1]) >= count
        or bool((np.diff(captures[:, 0]) <= 0).any())
    )
