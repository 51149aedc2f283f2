"""The picker on a GPU: a token for each row of logits, where they are.

It gives what the chain of sampling stages gives with ordinary settings (`sampling/picker.py` says
which these are), without copying, waiting or allocating, so that it can be part of a graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from unspool.backends.cuda.kernels import pick as kernels

_PIECE = 4096
"""A row is summed up in pieces of so many logits: fixed, so that sums never depend on the batch."""
_BLOCK = 1024
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
        self.rows, self.vocabulary = rows, vocabulary
        self.floats = torch.zeros(rows, 6, dtype=torch.float64, device=device)
        self.ints = torch.zeros(rows, 6, dtype=torch.int64, device=device)
        self.history = torch.zeros(history, dtype=torch.int64, device=device)
        self.picks = torch.zeros(rows, dtype=torch.int64, device=device)
        self.previous = self.picks
        self.logprobs = torch.zeros(rows, dtype=torch.float64, device=device)
        self.own = torch.zeros(rows, 3, dtype=torch.float64, device=device)
        self._pieces = triton.cdiv(vocabulary, _PIECE)
        self._parts = torch.zeros(2, rows, self._pieces, 4, dtype=torch.float64, device=device)
        self._counts: Tensor | None = None
        self._tokens = self.history
        # Sums of exp(logit - peak) are whole numbers of these steps; they fit 63 bits.
        self._unit = float(1 << (62 - vocabulary.bit_length()))

    def launch(self, logits: Tensor, *, sampled: bool = True, penalties: bool = True) -> None:
        """Picks from rows of logits [n, vocabulary]; `n` and the flags stay when captured.

        `sampled=False`: every row is greedy. `penalties=False`: no row has penalties. Both spare
        kernels only.
        """
        count = len(logits)
        if not count:
            return
        own, edited = self._parts
        counts = self._parts  # not read
        if penalties:
            tokens, counts = self._counted()
            kernels.tally[(count,)](
                self.floats, self.ints, self.history, self.previous, tokens, counts,
                self.vocabulary, BLOCK=_HISTORY_BLOCK,
            )  # fmt: skip
        kernels.measure[(count, self._pieces)](
            logits, logits.stride(0), self.floats, self.ints, counts, own, edited, self.vocabulary,
            PIECE=_PIECE, PENALTIES=penalties, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
        kernels.finish[(count,)](
            logits, logits.stride(0), self.floats, self.ints, counts, own, edited, self.picks,
            self.logprobs, self.own, self.vocabulary, self._pieces, self._unit, BLOCK=_BLOCK,
            ROOM=triton.next_power_of_2(self._pieces), PENALTIES=penalties, SAMPLED=sampled,
            num_warps=16, enable_fp_fusion=False,
        )  # fmt: skip
        if penalties:
            kernels.clear[(count,)](
                self.floats, self.ints, tokens, counts, self.vocabulary, BLOCK=_HISTORY_BLOCK
            )

    def _counted(self) -> tuple[Tensor, Tensor]:
        """Room for what the penalties count: made when first asked for; the counts are 0 between."""
        if self._counts is None or len(self._tokens) < len(self.history):
            shape, device = (self.rows, self.vocabulary), self.floats.device
            self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
            self._tokens = torch.zeros_like(self.history)
        return self._tokens, self._counts
