"""What came of a step, on its way from the device to the host.

Everything is copied within the step, so that reading it waits for that step alone and not for the
one behind it, which is launched already.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unspool.backends.step import Floats, Inside, Ints, StepResult, smallest
from unspool.sampling.faults import BadLogitsError

_RING = 4  # results on their way
_TO_HOST = (
    64  # rows of logits: more are worked on where they are, as many at once are quicker there
)


class Outcomes:
    """Picks and log-probabilities of the lines of a captured step and of the prompts beside it."""

    def __init__(self, lines: int, prompts: int, vocabulary: int, device: torch.device) -> None:
        self._lines, every = lines, lines + prompts
        # Log-probabilities of prompts, of lines, picks of lines, of prompts: what the lines gave
        # lies together, and one copy brings it to the host.
        self._memory = torch.zeros(2 * every, dtype=torch.int64, device=device)
        self.picks = self._memory[every:]
        logprobs = self._memory[:every].view(torch.float64)
        self.logprobs_of_prompts, self.logprobs_of_lines = logprobs[:prompts], logprobs[prompts:]
        self._of_lines = self._memory[prompts : prompts + 2 * lines]
        self._pinned = device.type == "cuda"
        self._rooms = [_Room(lines, prompts, self._pinned) for _ in range(_RING)]
        self._turn = 0
        self._no_logits = np.empty((0, vocabulary), np.float32)

    def flight(
        self, places: Ints, logits: Tensor | None, inside: Inside | None, *, prompts: bool
    ) -> Flight:
        """Bring what a step gives to the host: the picks at these places (prompts: some of them
        are of prompts), and its logits."""
        room = self._rooms[self._turn]
        self._turn = (self._turn + 1) % _RING
        if prompts:
            room.all.copy_(self._memory, non_blocking=True)
        elif len(places):
            room.of_lines.copy_(self._of_lines, non_blocking=True)
        given: Tensor | Floats = self._no_logits
        if logits is not None:
            given = self.brought(logits)
        room.record()
        return Flight(room, places, given, inside)

    def brought(self, logits: Tensor) -> Tensor:
        """A copy of logits that the next step does not overwrite."""
        if len(logits) > _TO_HOST:
            return logits.to(torch.float32, copy=True)
        host = torch.empty(logits.shape, dtype=torch.float32, pin_memory=self._pinned)
        # Widened on the device: a copy that changes the type on the way waits for it.
        return host.copy_(logits.float(), non_blocking=True)


class _Room:
    """The host's memory for one step's picks."""

    def __init__(self, lines: int, prompts: int, pinned: bool) -> None:
        every = lines + prompts
        self.all = torch.zeros(2 * every, dtype=torch.int64, pin_memory=pinned)
        self.of_lines = self.all[prompts : prompts + 2 * lines]
        numbers = self.all.numpy()
        self.lines, self.picks, self.logprobs = lines, numbers[every:], numbers[:every].view("f8")
        self.done = torch.cuda.Event() if pinned else None

    def record(self) -> None:
        """Behind all that the step gives."""
        if self.done is not None:
            self.done.record()


@dataclass(slots=True)
class Flight:
    """A step on its way; its room is used again a few steps later."""

    room: _Room
    places: Ints
    logits: Tensor | Floats
    inside: Inside | None

    def ready(self) -> bool:
        return self.room.done is None or self.room.done.query()

    def result(self) -> StepResult:
        room = self.room
        if room.done is not None:
            room.done.synchronize()
        tokens = room.picks.take(self.places)
        # Those of the lines stand behind those of the prompts: their places count from the end.
        logprobs = room.logprobs.take(self.places - room.lines)
        failures: dict[int, Exception] = {}
        if len(tokens) and smallest(tokens) < 0:
            for number in np.flatnonzero(tokens < 0).tolist():
                failures[number] = BadLogitsError(
                    "the model gave logits that nothing can be picked from (NaN, or all -inf)",
                    (number,),
                )
        logits = self.logits
        if isinstance(logits, Tensor) and logits.device.type == "cpu":
            logits = logits.numpy()
        return StepResult(tokens, logprobs, logits, self.inside, failures)
