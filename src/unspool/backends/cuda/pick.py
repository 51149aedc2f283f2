"""The picker on a GPU: a token for each row of logits, where they are.

It gives what the chain of sampling stages gives with ordinary settings (`sampling/picker.py` says
which these are), without copying, waiting or allocating, so that it can be part of a graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from unspool.backends.cuda.kernels.pick.draw import finish, gather, spread
from unspool.backends.cuda.kernels.pick.measure import measure
from unspool.backends.cuda.kernels.pick.penalties import resolve, tally

_PIECE = 2048
"""Logits that one program walks over: fixed, so that sums never depend on the batch."""
_MAXIMA = 128
_BINS = 1024
_ROOM = 4096
"""For so many candidates of the bins that matter; with more the row is walked over again."""
_BLOCK = 512
_AT_ONCE = 256
"""So many rows are picked by the same kernels; more than these share their room."""
_PROGRAMS = 2048
"""So many share a walk over all rows, if there are as many pieces."""
_WALK_WARPS = 4
_FINISH_WARPS = 16
_PLAIN = {"enable_fp_fusion": False}
"""Every product and sum is rounded by itself, as in the chain."""
_HISTORY_BLOCK = 512


class DevicePicker:
    """Static buffers for up to so many rows, and the launches that read and fill them.

    In: `floats`, `ints` and `history` as `PickRows` has them; a history's entry -1-n stands for
    `previous[n]`, a pick of the step before. Out: `picks` (-1 where a row gives no distribution),
    `logprobs` (the model's own), and `own`: peak, log-sum and entropy of the model's distribution.
    """

    def __init__(
        self, rows: int, vocabulary: int, device: torch.device | str, history: int = 1 << 16
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.vocabulary = vocabulary
        self._at_once = some = min(rows, _AT_ONCE)
        self.floats = zeros(rows, 6)
        self.ints = zeros(rows, 6, dtype=torch.int64)
        self.history = zeros(history, dtype=torch.int64)
        self.picks = zeros(rows, dtype=torch.int64)
        self.previous = self.picks
        self.logprobs = zeros(rows)
        self.own = zeros(rows, 3)
        self._pieces = triton.cdiv(vocabulary, _PIECE)
        self._piece_room = triton.next_power_of_2(self._pieces)
        self._parts = zeros(2, some, self._pieces, 4)
        self._tops = zeros(some, self._piece_room * _PIECE // _MAXIMA, dtype=torch.float32)
        self._state = zeros(some, 16)
        self._arrived = zeros(some, dtype=torch.int32)
        self._bins = zeros(some, 3, _BINS, dtype=torch.int64)
        self._brackets = zeros(some, 8, dtype=torch.int32)
        self._sums = zeros(some, 8, dtype=torch.int64)
        self._values = zeros(some, _ROOM, dtype=torch.float32)
        self._ids = zeros(some, _ROOM, dtype=torch.int32)
        self._counts: Tensor | None = None
        self._tokens = zeros(0, dtype=torch.int64)
        # Sums of exp(logit - peak) are whole numbers of these steps; they fit 63 bits.
        self._unit = float(1 << (62 - vocabulary.bit_length()))
        self._span = 1 << vocabulary.bit_length()

    def launch(self, logits: Tensor, *, sampled: bool = True, penalties: bool = True) -> None:
        """Picks from rows of logits [n, vocabulary]; `n` and the flags stay when captured.

        `sampled=False`: every row is greedy. `penalties=False`: no row has penalties. Both spare
        kernels only.
        """
        if penalties and len(logits):
            self._resolve(len(logits))
        for start in range(0, len(logits), self._at_once):
            rows = slice(start, min(start + self._at_once, len(logits)))
            self._pick(logits[rows], rows, sampled, penalties)

    def _resolve(self, rows: int) -> None:
        """What the penalties count, before any pick of this launch takes the place of one."""
        shape, device = (self._at_once, self.vocabulary), self.floats.device
        if self._counts is None:  # 0 between launches
            self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        if len(self._tokens) < len(self.history):
            self._tokens = torch.zeros_like(self.history)
        resolve[(rows,)](
            self.floats, self.ints, self.history, self.previous, self._tokens, BLOCK=_HISTORY_BLOCK
        )

    def _pick(self, logits: Tensor, rows: slice, sampled: bool, penalties: bool) -> None:
        number = len(logits)
        floats, ints = self.floats[rows], self.ints[rows]
        picks, logprobs = self.picks[rows], self.logprobs[rows]
        counts = self._ids if self._counts is None else self._counts  # not read without penalties
        counted = (floats, ints, self._tokens, counts, self.vocabulary)
        if penalties:
            tally[(number,)](*counted, CLEAR=False, BLOCK=_HISTORY_BLOCK)
        grid = (number, min(self._pieces, -(-_PROGRAMS // number)))
        given = (logits, logits.stride(0), floats, ints, counts)
        walk = {"PIECE": _PIECE, "PENALTIES": penalties, "num_warps": _WALK_WARPS, **_PLAIN}
        measure[grid](
            *given, *self._parts, self._tops, self._state, self._arrived, picks, logprobs,
            self.own[rows], self.vocabulary, self._unit, ROOM=self._piece_room, SAMPLED=sampled,
            **walk,
        )  # fmt: skip
        if sampled:
            line = (*given, self._state, self._bins, self._brackets)
            found = (self._values, self._ids)
            size = (self.vocabulary, self._unit)
            spread[grid](*line, self._sums, self._arrived, *size, BINS=_BINS, **walk)
            gather[grid](*line, *found, *size, ROOM=_ROOM, BINS=_BINS, **walk)
            finish[(number,)](
                *line, self._sums, *found, picks, logprobs, *size, self._span, ROOM=_ROOM,
                BINS=_BINS, BLOCK=_BLOCK, PENALTIES=penalties, num_warps=_FINISH_WARPS, **_PLAIN,
            )  # fmt: skip
        if penalties:
            tally[(number,)](*counted, CLEAR=True, BLOCK=_HISTORY_BLOCK)
