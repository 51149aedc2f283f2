"""Results of a step and their copy from the device to the host.

The copy is queued right after the step's kernels, so reading a result waits for that step only,
not for the next one, which is already launched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unspool.backends.step import Floats, Ints, Observations, StepResult, min_int
from unspool.sampling.faults import BadLogitsError

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
        self._decode_part = self._buffer[max_prefill : max_prefill + 2 * max_decode]
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
    ) -> CudaStepHandle:
        """Start copying a step's results to the host: the picks at `pick_index`, and logits.

        `has_prefill`: whether some of the picks belong to prefill.
        """
        buffer = self._host_buffers[self._current]
        self._current = (self._current + 1) % _NUM_RESULTS
        if has_prefill:
            buffer.all.copy_(self._buffer, non_blocking=True)
        elif len(pick_index):
            buffer.decode_part.copy_(self._decode_part, non_blocking=True)
        copied: Tensor | Floats = self._no_logits
        if logits is not None:
            copied = self._copy_logits(logits)
        buffer.record()
        return CudaStepHandle(buffer, pick_index, copied, inside)

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
        self.decode_part = self.all[max_prefill : max_prefill + 2 * max_decode]
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
        return StepResult(tokens, logprobs, logits, self.inside, failures)
