"""What a captured step reads, at addresses that never change, and how it gets there.

All of it lies in one piece of memory, so that one copy brings a whole step to the device: the lines
with their tokens and positions, the changes of the block table, and how each line is picked from.
The host's side is a ring of such pieces, because a copy runs while the next one is filled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.cuda.attention import Lines
from unspool.backends.step import Ints, largest
from unspool.sampling.picker import FLOATS

ROOM = 512  # changes of the block table that fit into a step; more are made before it
_RING = 4
_FIRST_HISTORY = 1 << 18  # tokens of all texts with penalties
_SPARE_LINE = 0  # of the block table, for lines that only fill a batch up
_FIRST_LINES = 1024
_NEUTRAL = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)  # of a line that nobody picks from: FLOATS' order
assert FLOATS[:4] == ("temperature", "top_p", "min_p", "repetition_penalty")


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Without waiting for what the device is doing: only pinned memory can be copied so."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The parts of a piece of memory, by the type of their numbers."""

    tokens: Any
    ints: Any
    floats: Any
    positions: Any
    ends: Any
    slots: Any
    adapters: Any
    updates: Any

    @classmethod
    def of(cls, eights: Any, fours: Any, lines: int) -> _Fields:
        """`eights` are int64, `fours` int32; numpy or torch alike. The floats are int64 still."""
        ints, floats = eights[lines : 7 * lines], eights[7 * lines : 13 * lines]
        return cls(
            tokens=eights[:lines],
            ints=ints.reshape(lines, 6),
            floats=floats.reshape(lines, 6),
            positions=fours[:lines],
            ends=fours[lines : 2 * lines],
            slots=fours[2 * lines : 3 * lines],
            adapters=fours[3 * lines : 4 * lines],
            updates=fours[4 * lines :],
        )


class Inputs:
    """The device's side, and the ring on the host."""

    def __init__(
        self, lines: int, previous: Tensor, columns: int, spare: int, device: torch.device
    ) -> None:
        self.lines, self.device, self._spare_page = lines, device, spare
        wide, narrow = 13 * lines * 8, (4 * lines + 1 + 2 * ROOM) * 4
        self._memory = torch.zeros(wide + narrow, dtype=torch.uint8, device=device)
        fields = _Fields.of(
            self._memory[:wide].view(torch.int64), self._memory[wide:].view(torch.int32), lines
        )
        self.tokens, self.positions, self.ends = fields.tokens, fields.positions, fields.ends
        self.slots, self.updates, self.ints = fields.slots, fields.updates, fields.ints
        self.adapters: Tensor = fields.adapters
        self.floats: Tensor = fields.floats.view(torch.float64)
        self.no_updates = torch.zeros(1, dtype=torch.int32, device=device)
        # What the step before picked: by its lines, then by the prompts beside them.
        self.previous = previous
        self.columns = columns
        self.table, self._table_lines = self._new_table(_FIRST_LINES), _FIRST_LINES
        pinned = device.type == "cuda"
        self._ring = [
            torch.zeros(wide + narrow, dtype=torch.uint8, pin_memory=pinned) for _ in range(_RING)
        ]
        self._hosts = []
        for piece in self._ring:
            bare = piece.numpy()
            host = _Fields.of(bare[:wide].view(np.int64), bare[wide:].view(np.int32), lines)
            self._hosts.append(replace(host, floats=host.floats.view(np.float64)))
        # Of each piece: behind the copies from it. The steps in flight are fewer than the pieces,
        # so nothing is waited for, unless steps failed on their way.
        self._sent = [torch.cuda.Event() for _ in range(_RING)] if pinned else []
        self._turn = 0
        self.history = torch.zeros(0, dtype=torch.int64, device=device)  # what penalties see
        self._histories: list[Tensor] = []

    def of(self, count: int) -> Lines:
        """The first lines as attention wants them."""
        return Lines(self.table, self.slots[:count], self.positions[:count], self.ends[:count])

    # -- the block table -----------------------------------------------------------------------

    def _new_table(self, lines: int) -> Tensor:
        shape = (lines, self.columns)
        return torch.full(shape, self._spare_page, dtype=torch.int32, device=self.device)

    def make_room(self, slots: Ints) -> bool:
        """Whether the table had to grow, which moves it: what was captured is void then."""
        before, needed = self._table_lines, largest(slots) + 2
        if needed <= before:
            return False
        self._table_lines = max(needed, 2 * before)
        grown = self._new_table(self._table_lines)
        grown[:before] = self.table
        self.table = grown
        return True

    def places(self, slots: Ints, columns: Ints) -> Ints:
        """Where in the table (its first line is nobody's) a slot's pages stand."""
        places: Ints = (slots + 1) * self.columns + columns
        return places

    def update_now(self, places: Ints, pages: Ints) -> None:
        """Change the table outside of a captured step."""
        where = to_device(places, self.device)
        self.table.view(-1)[where] = to_device(pages.astype(np.int32), self.device)

    # -- what penalties see --------------------------------------------------------------------

    def make_room_for_history(self, length: int) -> bool:
        """Whether its memory had to grow, which moves it: what was captured is void then."""
        if length <= self.history.shape[0]:
            return False
        size, pinned = max(_FIRST_HISTORY, 2 * length), self.device.type == "cuda"
        with torch.inference_mode(False):  # it is written to in either mode
            self.history = torch.zeros(size, dtype=torch.int64, device=self.device)
            self._histories = [
                torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(_RING)
            ]
        return True

    def send_history(self, tokens: Ints) -> None:
        """With the step that is sent next."""
        self._wait_until_sent()
        piece, length = self._histories[self._turn], len(tokens)
        piece.numpy()[:length] = tokens
        self.history[:length].copy_(piece[:length], non_blocking=True)

    # -- a step --------------------------------------------------------------------------------

    def send(
        self,
        count: int,
        padded: int,
        tokens: Ints,
        positions: Ints,
        ends: Ints,
        slots: Ints,
        changed: tuple[Ints, Ints],
        picks: tuple[Ints, npt.NDArray[np.float64], Ints] | None,
        adapters: Ints | None = None,
    ) -> None:
        """Bring `count` lines to the device, and as many harmless ones as make it `padded`.

        `changed` are places in the table and their pages; `picks` says of some lines how they are
        picked from: their numbers (ascending), floats and ints; `adapters` are the lines' slots of
        adapters, if any has one."""
        self._wait_until_sent()
        host, piece = self._hosts[self._turn], self._ring[self._turn]
        host.tokens[:count] = tokens
        host.positions[:count] = positions
        host.ends[:count] = ends
        host.slots[:count] = slots + 1
        if count < padded:
            host.tokens[count:padded] = host.positions[count:padded] = 0
            host.ends[count:padded], host.slots[count:padded] = 1, _SPARE_LINE
        if adapters is not None:
            host.adapters[:count], host.adapters[count:padded] = adapters, 0
        places, pages = changed
        host.updates[0] = len(places)
        if len(places):
            host.updates[1 : 1 + len(places)] = places
            host.updates[1 + ROOM : 1 + ROOM + len(places)] = pages
        if picks is not None and len(picks[0]) == count:  # each line is picked from
            host.floats[:count], host.ints[:count] = picks[1:]
            if count < padded:
                host.floats[count:padded], host.ints[count:padded] = _NEUTRAL, 0
        else:
            host.floats[:padded], host.ints[:padded] = _NEUTRAL, 0
            if picks is not None:
                numbers = picks[0]
                host.floats[numbers], host.ints[numbers] = picks[1:]
        self._memory.copy_(piece, non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()
        self._turn = (self._turn + 1) % _RING

    def _wait_until_sent(self) -> None:
        """Wait until the device has read what was sent from this turn's piece before."""
        if self._sent:
            self._sent[self._turn].synchronize()
