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
from unspool.backends.cuda.kernels.pick.penalties import clear, tally

_PIECE = 2048
"""Logits that one program walks over: fixed, so that sums never depend on the batch."""
_MAXIMA = 128
_BINS = 2048
_ROOM = 4096
"""For so many candidates of the bins that matter; with more the row is walked over again."""
_BLOCK = 512
_WALK_WARPS = 4
_FINISH_WARPS = 16
_HISTORY_BLOCK = 512
_WALK_WARPS = 4
_FINISH_WARPS = 16


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
        self.floats = zeros(rows, 6)
        self.ints = zeros(rows, 6, dtype=torch.int64)
        self.history = zeros(history, dtype=torch.int64)
        self.picks = zeros(rows, dtype=torch.int64)
        self.previous = self.picks
        self.logprobs = zeros(rows)
        self.own = zeros(rows, 3)
        self._pieces = triton.cdiv(vocabulary, _PIECE)
        self._piece_room = triton.next_power_of_2(self._pieces)
        self._parts = zeros(2, rows, self._pieces, 4)
        self._tops = zeros(rows, self._piece_room * _PIECE // _MAXIMA, dtype=torch.float32)
        self._state = zeros(rows, 16)
        self._arrived = zeros(rows, dtype=torch.int32)
        self._bins = zeros(rows, 3, _BINS, dtype=torch.int64)
        self._brackets = zeros(rows, 8, dtype=torch.int32)
        self._values = zeros(rows, _ROOM, dtype=torch.float32)
        self._ids = zeros(rows, _ROOM, dtype=torch.int32)
        self._counts: Tensor | None = None
        self._tokens = self.history
        # Sums of exp(logit - peak) are whole numbers of these steps; they fit 63 bits.
        self._unit = float(1 << (62 - vocabulary.bit_length()))
        self._span = 1 << vocabulary.bit_length()

    def launch(self, logits: Tensor, *, sampled: bool = True, penalties: bool = True) -> None:
        """Picks from rows of logits [n, vocabulary]; `n` and the flags stay when captured.

        `sampled=False`: every row is greedy. `penalties=False`: no row has penalties. Both spare
        kernels only.
        """
        rows = len(logits)
        if not rows:
            return
        own, edited = self._parts
        tokens, counts = self._counted() if penalties else (self._ids, self._ids)  # not read
        if penalties:
            tally[(rows,)](
                self.floats, self.ints, self.history, self.previous, tokens, counts,
                self.vocabulary, BLOCK=_HISTORY_BLOCK,
            )  # fmt: skip
        given = (logits, logits.stride(0), self.floats, self.ints, counts)
        measure[(rows, self._pieces)](
            *given, own, edited, self._tops, self._state, self._arrived, self.picks, self.logprobs,
            self.own, self.vocabulary, self._unit, PIECE=_PIECE, ROOM=self._piece_room,
            PENALTIES=penalties, SAMPLED=sampled, num_warps=_WALK_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        if sampled:
            line = (*given, self._state, self._bins, self._brackets)
            found = (self._values, self._ids)
            spread[(rows, self._pieces)](
                *line, self._arrived, self.vocabulary, self._unit, PIECE=_PIECE, BINS=_BINS,
                PENALTIES=penalties, num_warps=_WALK_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
            gather[(rows, self._pieces)](
                *line, *found, self.vocabulary, self._unit, ROOM=_ROOM, PIECE=_PIECE, BINS=_BINS,
                PENALTIES=penalties, num_warps=_WALK_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
            finish[(rows,)](
                *line, *found, self.picks, self.logprobs, self.vocabulary, self._span, self._unit,
                ROOM=_ROOM, BINS=_BINS, BLOCK=_BLOCK, PENALTIES=penalties, num_warps=_FINISH_WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
        if penalties:
            clear[(rows,)](
                self.floats, self.ints, tokens, counts, self.vocabulary, BLOCK=_HISTORY_BLOCK
            )

    def _counted(self) -> tuple[Tensor, Tensor]:
        """Room for what the penalties count: made when first asked for; counts are 0 between."""
        if self._counts is None or len(self._tokens) < len(self.history):
            shape = (len(self.picks), self.vocabulary)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.floats.device)
            self._tokens = torch.zeros_like(self.history)
        return self._tokens, self._counts
