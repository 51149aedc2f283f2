"""Input and output of a step on the GPU: one copy to the device, one copy back.

On a GPU both are kernels that read or write the host's pinned memory: between two captured graphs
a copy by the device's copy engine takes 6 to 14 µs, as the engines wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.cuda.attention import DecodeRows
from unspool.backends.cuda.kernels.elementwise import copy_segments
from unspool.backends.step import Floats, Ints, Observations, StepResult, max_int, min_int
from unspool.sampling.candidates import BadLogitsError
from unspool.sampling.picker import FLOATS

# -- Inputs of a captured step at fixed device addresses, and their copy from the host
#
# All inputs are in one buffer, so that a single copy brings a step to the device: tokens and
# positions of the decode rows, block table updates, and sampling settings. The host side is a ring
# of pinned buffers: one can be filled while another is copied.

MAX_TABLE_UPDATES = 512  # block table updates in one graph launch; more are applied before it
_NUM_HOST_BUFFERS = 4  # pinned host buffers
_FIRST_HISTORY = 1 << 18  # tokens of all sequences with penalties
_PADDING_ROW = 0  # block table row of padding rows
_FIRST_TABLE_ROWS = 1024
_COPY_BLOCK = 8192  # words that a program copies at a time
_GREEDY = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)  # greedy without penalties, in the order of FLOATS
assert FLOATS[:4] == ("temperature", "top_p", "min_p", "repetition_penalty")


class SegmentCopy:
    """Copies parts of a buffer of words (int32) between host and device: those of the first
    rows."""

    def __init__(self, segments: list[tuple[int, int, int]], device: torch.device) -> None:
        """`segments`: see `copy_segments`."""
        self._segments = torch.tensor(segments, dtype=torch.int32, device=device)

    def __call__(self, source: Tensor, target: Tensor, rows: int) -> None:
        if self._segments.is_cuda:
            self.launch(source, target, rows)
        else:
            target.copy_(source, non_blocking=True)

    def launch(self, source: Tensor, target: Tensor, rows: int) -> None:
        copy_segments[(len(self._segments),)](
            source, target, self._segments, rows, BLOCK=_COPY_BLOCK, num_warps=8
        )


def _words(buffer: Tensor) -> Tensor:
    return buffer.view(torch.int32)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device through pinned memory, without synchronizing."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Fields:
    """Named views into one input buffer, on the host or on the device."""

    tokens: Any
    ints: Any
    floats: Any
    canvas: Any
    positions: Any
    ends: Any
    slots: Any
    adapters: Any
    captures: Any
    state_reads: Any
    state_writes: Any
    state_starts: Any
    updates: Any

    @classmethod
    def split(cls, int64s: Any, int32s: Any, rows: int) -> _Fields:
        """Split arrays (numpy or torch) of int64 and int32. `floats` is returned as int64."""
        ints, floats = int64s[rows : 7 * rows], int64s[7 * rows : 13 * rows]
        return cls(
            tokens=int64s[:rows],
            ints=ints.reshape(rows, 6),
            floats=floats.reshape(rows, 6),
            canvas=int64s[13 * rows :].reshape(rows, 2),
            positions=int32s[:rows],
            ends=int32s[rows : 2 * rows],
            slots=int32s[2 * rows : 3 * rows],
            adapters=int32s[3 * rows : 4 * rows],
            captures=int32s[4 * rows : 5 * rows],
            state_reads=int32s[5 * rows : 6 * rows],
            state_writes=int32s[6 * rows : 7 * rows],
            state_starts=int32s[7 * rows : 8 * rows + 1],
            updates=int32s[8 * rows + 1 :],
        )

    def segments(self, rows: int) -> list[tuple[int, int, int]]:
        """The fields (tensors) as segments of `SegmentCopy`."""
        segments = []
        for name in self.__slots__:
            field = getattr(self, name)
            first = (field.data_ptr() - self.tokens.data_ptr()) // 4
            words = field.numel() * field.element_size() // 4
            per_row = 0 if name == "updates" else words // rows
            segments.append((first, per_row, words - rows * per_row))
        return segments


@dataclass(frozen=True, slots=True)
class DecodeStates:
    """State slots of the sequences that a captured step decodes (see `StepBatch.state_slots`)."""

    starts: Ints  # [sequences + 1]: first row of each sequence
    slots: Ints  # [sequences, 2]
    captures: Ints  # [n, 2]: row, slot; at most one of each row


class StepInputs:
    """Device buffer of a step's inputs, block table, and the ring of host buffers."""

    def __init__(
        self, rows: int, previous: Tensor, columns: int, padding_page: int, device: torch.device
    ) -> None:
        self.rows, self.device, self._padding_page = rows, device, padding_page
        int64_bytes, int32_bytes = 15 * rows * 8, (8 * rows + 2 + 2 * MAX_TABLE_UPDATES) * 4
        self._buffer = torch.zeros(int64_bytes + int32_bytes, dtype=torch.uint8, device=device)
        fields = _Fields.split(
            self._buffer[:int64_bytes].view(torch.int64),
            self._buffer[int64_bytes:].view(torch.int32),
            rows,
        )
        self._copy, self._words = SegmentCopy(fields.segments(rows), device), _words(self._buffer)
        self.tokens, self.positions, self.ends = fields.tokens, fields.positions, fields.ends
        self.slots, self.updates, self.ints = fields.slots, fields.updates, fields.ints
        self.adapters: Tensor = fields.adapters
        self.canvas: Tensor = fields.canvas
        self._fields = fields
        self.floats: Tensor = fields.floats.view(torch.float64)
        self.no_updates = torch.zeros(1, dtype=torch.int32, device=device)
        # Picks of the previous step: of its decode rows, then of its prefill.
        self.previous = previous
        self.columns = columns
        self.table, self._table_rows = self._new_table(_FIRST_TABLE_ROWS), _FIRST_TABLE_ROWS
        pinned = device.type == "cuda"
        self._host_buffers = [
            torch.zeros(int64_bytes + int32_bytes, dtype=torch.uint8, pin_memory=pinned)
            for _ in range(_NUM_HOST_BUFFERS)
        ]
        self._host_words = [_words(buffer) for buffer in self._host_buffers]
        self._host_fields = []
        for buffer in self._host_buffers:
            array = buffer.numpy()
            host = _Fields.split(
                array[:int64_bytes].view(np.int64), array[int64_bytes:].view(np.int32), rows
            )
            self._host_fields.append(replace(host, floats=host.floats.view(np.float64)))
        # One event per host buffer, recorded after the copy from it. There are more buffers than
        # steps in flight, so waiting for an event does not block unless steps failed.
        self._copy_done = [torch.cuda.Event() for _ in range(_NUM_HOST_BUFFERS)] if pinned else []
        self._current = 0
        self.history = torch.zeros(0, dtype=torch.int64, device=device)  # for penalties
        self._host_histories: list[Tensor] = []

    def decode_rows(self, count: int) -> DecodeRows:
        """Inputs of attention for the first `count` rows."""
        return DecodeRows(self.table, self.slots[:count], self.positions[:count], self.ends[:count])

    def state_tensors(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of recurrent layers for the first `count` rows (`StateRows`)."""
        fields = self._fields
        return (
            fields.state_starts[: count + 1], fields.state_reads[:count],
            fields.state_writes[:count], fields.captures[:count],
        )  # fmt: skip

    def _new_table(self, rows: int) -> Tensor:
        shape = (rows, self.columns)
        return torch.full(shape, self._padding_page, dtype=torch.int32, device=self.device)

    def grow_table(self, slots: Ints) -> bool:
        """Grow the block table if needed. Return whether it moved: graphs must be recaptured."""
        before, needed = self._table_rows, max_int(slots) + 2
        if needed <= before:
            return False
        self._table_rows = max(needed, 2 * before)
        grown = self._new_table(self._table_rows)
        grown[:before] = self.table
        self.table = grown
        return True

    def table_index(self, slots: Ints, columns: Ints) -> Ints:
        """Flat index of entries of the block table, whose first row is for padding."""
        index: Ints = (slots + 1) * self.columns + columns
        return index

    def update_table(self, table_index: Ints, pages: Ints) -> None:
        """Update the block table outside of a graph."""
        where = to_device(table_index, self.device)
        self.table.view(-1)[where] = to_device(pages.astype(np.int32), self.device)

    def grow_history(self, length: int) -> bool:
        """Grow the history if needed. Return whether it moved: graphs must be recaptured."""
        if length <= self.history.shape[0]:
            return False
        size, pinned = max(_FIRST_HISTORY, 2 * length), self.device.type == "cuda"
        with torch.inference_mode(False):  # written with inference mode on and off
            self.history = torch.zeros(size, dtype=torch.int64, device=self.device)
            self._host_histories = [
                torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
                for _ in range(_NUM_HOST_BUFFERS)
            ]
        return True

    def send_history(self, tokens: Ints) -> None:
        """Copy the history of the step that `send` copies next."""
        self._wait_for_buffer()
        buffer, length = self._host_histories[self._current], len(tokens)
        buffer.numpy()[:length] = tokens
        self.history[:length].copy_(buffer[:length], non_blocking=True)

    def send(
        self,
        count: int,
        padded_rows: int,
        tokens: Ints,
        positions: Ints,
        ends: Ints,
        slots: Ints,
        table_updates: tuple[Ints, Ints],
        picks: tuple[Ints, npt.NDArray[np.float64], Ints, Ints | None] | None,
        adapters: Ints | None = None,
        states: DecodeStates | None = None,
    ) -> None:
        """Copy `count` rows to the device, padded to `padded_rows` rows.

        Args:
            table_updates: block table updates: flat indices (see `table_index`) and pages.
            picks: sampling settings: row numbers (ascending), then their floats, ints and canvas.
            adapters: adapter slot of each row; None: no row has an adapter.
            states: state slots; None: the model has no recurrent layers.
        """
        self._wait_for_buffer()
        host = self._host_fields[self._current]
        host.tokens[:count] = tokens
        host.positions[:count] = positions
        host.ends[:count] = ends
        host.slots[:count] = slots + 1
        if count < padded_rows:
            host.tokens[count:padded_rows] = host.positions[count:padded_rows] = 0
            host.ends[count:padded_rows], host.slots[count:padded_rows] = 1, _PADDING_ROW
        if adapters is not None:
            host.adapters[:count], host.adapters[count:padded_rows] = adapters, 0
        if states is not None:
            sequences = len(states.slots)
            host.state_starts[: sequences + 1] = states.starts
            host.state_starts[sequences + 1 : padded_rows + 1] = count  # empty sequences
            host.state_reads[:sequences] = states.slots[:, 0]
            host.state_writes[:sequences] = states.slots[:, 1]
            host.captures[:padded_rows] = -1
            host.captures[states.captures[:, 0]] = states.captures[:, 1]
        table_index, pages = table_updates
        host.updates[0] = len(table_index)
        if len(table_index):
            host.updates[1 : 1 + len(table_index)] = table_index
            host.updates[1 + MAX_TABLE_UPDATES : 1 + MAX_TABLE_UPDATES + len(table_index)] = pages
        if picks is not None and len(picks[0]) == count:  # every row is sampled
            host.floats[:count], host.ints[:count] = picks[1:3]
            if count < padded_rows:
                host.floats[count:padded_rows], host.ints[count:padded_rows] = _GREEDY, 0
        else:
            host.floats[:padded_rows], host.ints[:padded_rows] = _GREEDY, 0
            if picks is not None:
                numbers = picks[0]
                host.floats[numbers], host.ints[numbers] = picks[1:3]
        if picks is not None and picks[3] is not None:
            host.canvas[:padded_rows] = -1
            host.canvas[picks[0]] = picks[3]
        self._copy(self._host_words[self._current], self._words, padded_rows)
        if self._copy_done:
            self._copy_done[self._current].record()
        self._current = (self._current + 1) % _NUM_HOST_BUFFERS

    def _wait_for_buffer(self) -> None:
        """Wait until the last copy from the current host buffer has ended."""
        if self._copy_done:
            self._copy_done[self._current].synchronize()


_NUM_RESULTS = 4  # results in copy_to_host
_MAX_HOST_ROWS = 64  # more rows of logits stay on the device, where processing them is faster


class StepOutputs:
    """Picked tokens and log-probabilities of a step's decode rows and prefill."""

    def __init__(
        self, max_decode: int, max_prefill: int, vocab_size: int, device: torch.device
    ) -> None:
        total = max_decode + max_prefill
        # Order: logprobs of prefill, logprobs of decode, picks of decode, picks of prefill.
        # So the results of decode are contiguous: one copy.
        self._buffer = torch.zeros(2 * total, dtype=torch.int64, device=device)
        self.picks = self._buffer[total:]
        logprobs = self._buffer[:total].view(torch.float64)
        self.prefill_logprobs, self.decode_logprobs = logprobs[:max_prefill], logprobs[max_prefill:]
        self._decode_part = _words(self._buffer[max_prefill : max_prefill + 2 * max_decode])
        self._copy = SegmentCopy([(0, 2, 0), (2 * max_decode, 2, 0)], device)
        self.details = torch.zeros(total, 3, dtype=torch.float64, device=device)  # of canvases
        self._pinned = device.type == "cuda"
        self._host_buffers = [
            ResultBuffer(max_decode, max_prefill, self._pinned) for _ in range(_NUM_RESULTS)
        ]
        self._current = 0
        self._no_logits = np.empty((0, vocab_size), np.float32)

    def copy_to_host(
        self,
        pick_index: Ints,
        logits: Tensor | None,
        inside: Observations | None,
        *,
        has_prefill: bool,
        has_canvas: bool = False,
    ) -> CudaStepHandle:
        """Start copying a step's results to the host: the picks at `pick_index`, and logits.

        `has_prefill`: whether some of the picks belong to prefill. `has_canvas`: whether the
        details of the picks are copied too.
        """
        buffer = self._host_buffers[self._current]
        self._current = (self._current + 1) % _NUM_RESULTS
        if has_prefill:
            buffer.all.copy_(self._buffer, non_blocking=True)
        elif len(pick_index):
            self._copy(self._decode_part, buffer.decode_part, max_int(pick_index) + 1)
        details = None
        if has_canvas:
            last = int(pick_index.max()) + 1
            details = torch.empty(last, 3, dtype=torch.float64, pin_memory=self._pinned)
            details.copy_(self.details[:last], non_blocking=True)
        copied: Tensor | Floats = self._no_logits
        if logits is not None:
            copied = self._copy_logits(logits)
        buffer.record()
        return CudaStepHandle(buffer, pick_index, copied, inside, details)

    def _copy_logits(self, logits: Tensor) -> Tensor:
        """Copy logits out of the step's buffer; a few rows go to the host."""
        if len(logits) > _MAX_HOST_ROWS:
            return logits.to(torch.float32, copy=True)
        host = torch.empty(logits.shape, dtype=torch.float32, pin_memory=self._pinned)
        # Cast on the device: a copy that also casts would synchronize.
        return host.copy_(logits.float(), non_blocking=True)


class ResultBuffer:
    """Pinned host memory for the picks of one step."""

    def __init__(self, max_decode: int, max_prefill: int, pinned: bool) -> None:
        total = max_decode + max_prefill
        self.all = torch.zeros(2 * total, dtype=torch.int64, pin_memory=pinned)
        self.decode_part = _words(self.all[max_prefill : max_prefill + 2 * max_decode])
        numbers = self.all.numpy()
        self.max_decode, self.picks, self.logprobs = (
            max_decode,
            numbers[total:],
            numbers[:total].view("f8"),
        )
        self.done = torch.cuda.Event() if pinned else None

    def record(self) -> None:
        """Record an event after all copies of the step."""
        if self.done is not None:
            self.done.record()


@dataclass(slots=True)
class CudaStepHandle:
    """A launched step. Its host buffer is reused a few steps later."""

    buffer: ResultBuffer
    pick_index: Ints
    logits: Tensor | Floats
    inside: Observations | None
    details: Tensor | None = None

    def ready(self) -> bool:
        return self.buffer.done is None or self.buffer.done.query()

    def result(self) -> StepResult:
        buffer = self.buffer
        if buffer.done is not None:
            buffer.done.synchronize()
        tokens = buffer.picks.take(self.pick_index)
        # Logprobs of decode are stored last: index them from the end.
        logprobs = buffer.logprobs.take(self.pick_index - buffer.max_decode)
        failures: dict[int, Exception] = {}
        if len(tokens) and min_int(tokens) < 0:
            for number in np.flatnonzero(tokens < 0).tolist():
                failures[number] = BadLogitsError(
                    "cannot sample from the model's logits: they contain NaN or are all -inf",
                    (number,),
                )
        logits = self.logits
        if isinstance(logits, Tensor) and logits.device.type == "cpu":
            logits = logits.numpy()
        details = None if self.details is None else self.details.numpy()[self.pick_index]
        return StepResult(tokens, logprobs, logits, self.inside, failures, details)
