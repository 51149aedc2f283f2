"""Sampling on the GPU: picks a token for each row of logits.

Gives the same token as the chain of sampling stages for ordinary settings (see
`sampling/picker.py`). It does not copy, synchronize or allocate, so it can be part of a graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from unspool.backends.cuda.kernels.canvas import exclude_tokens, measure_rows
from unspool.backends.cuda.kernels.sampling import (
    count_tokens,
    fill_bins,
    gather,
    resolve,
    sample_tokens,
    summarize,
)

_PIECE = 2048
"""Logits per program in one pass: fixed, so that sums never depend on the batch."""
_MAXIMA = 128
_BINS = 1024
_MAX_CANDIDATES = 4096
"""Candidates of the relevant bins that are stored; with more the row is read again."""
_BLOCK = 512
_ROWS_PER_LAUNCH = 256
"""Rows per launch; larger batches reuse the same buffers."""
_PROGRAMS = 2048
"""Programs of a pass over all rows, if there are as many pieces."""
_PASS_WARPS = 4
_FINISH_WARPS = 16
_NO_FMA = {"enable_fp_fusion": False}
"""No fused multiply-add: each operation is rounded, as in the chain."""
_HISTORY_BLOCK = 512


class DevicePicker:
    """Static buffers for up to `rows` rows, and the launches that read and fill them.

    Inputs: `floats`, `ints`, `history` and `canvas` as in `SamplingRows`; a history entry -1-n
    stands for `previous[n]`, a pick of the previous step. Outputs: `picks` (-1 if no token can be
    sampled), `logprobs` (of the model, before sampling stages), `summaries` [rows, 3] (maximum,
    log-sum-exp and entropy of the model's distribution), and `details` as in `PickedTokens`.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device | str,
        history: int = 1 << 16,
        *,
        pdl: bool = False,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.vocab_size, self._pdl = vocab_size, pdl
        self._rows_per_launch = max_rows = min(rows, _ROWS_PER_LAUNCH)
        self.floats = zeros(rows, 6)
        self.ints = zeros(rows, 6, dtype=torch.int64)
        self.history = zeros(history, dtype=torch.int64)
        self.picks = zeros(rows, dtype=torch.int64)
        self.previous = self.picks
        self.logprobs = zeros(rows)
        self.summaries = zeros(rows, 3)
        self.canvas = zeros(rows, 2, dtype=torch.int64)
        self.details = zeros(rows, 3)
        self._pieces = triton.cdiv(vocab_size, _PIECE)
        self._padded_pieces = triton.next_power_of_2(self._pieces)
        self._parts = zeros(2, max_rows, self._pieces, 4)
        self._tops = zeros(max_rows, self._padded_pieces * _PIECE // _MAXIMA, dtype=torch.float32)
        self._state = zeros(max_rows, 16)
        self._arrived = zeros(max_rows, dtype=torch.int32)
        self._bins = zeros(max_rows, 3, _BINS, dtype=torch.int64)
        self._brackets = zeros(max_rows, 8, dtype=torch.int32)
        self._sums = zeros(max_rows, 8, dtype=torch.int64)
        self._values = zeros(max_rows, _MAX_CANDIDATES, dtype=torch.float32)
        self._ids = zeros(max_rows, _MAX_CANDIDATES, dtype=torch.int32)
        self._counts: Tensor | None = None
        self._tokens = zeros(0, dtype=torch.int64)
        # Sums of exp(logit - peak) are integer multiples of 1 / unit; they fit into 63 bits.
        self._unit = float(1 << (62 - vocab_size.bit_length()))
        self._span = 1 << vocab_size.bit_length()

    def launch(
        self, logits: Tensor, *, sampled: bool = True, penalties: bool = True, canvas: bool = False
    ) -> None:
        """Pick from rows of logits [n, vocabulary]; `n` and the flags are fixed in a graph.

        `sampled=False`: every row is greedy. `penalties=False`: no row has penalties. Both only
        save kernels. `canvas`: read `canvas`, which changes `logits`, and write `details`.
        """
        if canvas and len(logits):
            exclude_tokens[(len(logits),)](logits, logits.stride(0), self.canvas)
        if penalties and len(logits):
            self._resolve(len(logits))
        for start in range(0, len(logits), self._rows_per_launch):
            rows = slice(start, min(start + self._rows_per_launch, len(logits)))
            self._pick(logits[rows], rows, sampled, penalties)
        if canvas and len(logits):
            measure_rows[(len(logits),)](
                logits, logits.stride(0), self.canvas, self.summaries, self.details,
                self.vocab_size, BLOCK=_PIECE,
            )  # fmt: skip

    def _resolve(self, rows: int) -> None:
        """Resolve the history's references before this launch overwrites previous picks."""
        shape, device = (self._rows_per_launch, self.vocab_size), self.floats.device
        if self._counts is None:  # zero between launches
            self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        if len(self._tokens) < len(self.history):
            self._tokens = torch.zeros_like(self.history)
        resolve[(rows,)](
            self.floats, self.ints, self.history, self.previous, self._tokens, BLOCK=_HISTORY_BLOCK
        )

    def _pick(self, logits: Tensor, rows: slice, sampled: bool, penalties: bool) -> None:
        num_rows = len(logits)
        floats, ints = self.floats[rows], self.ints[rows]
        picks, logprobs = self.picks[rows], self.logprobs[rows]
        counts = self._ids if self._counts is None else self._counts  # not read without penalties
        tally_args = (floats, ints, self._tokens, counts, self.vocab_size)
        if penalties:
            count_tokens[(num_rows,)](*tally_args, CLEAR=False, BLOCK=_HISTORY_BLOCK)
        grid = (num_rows, min(self._pieces, -(-_PROGRAMS // num_rows)))
        inputs = (logits, logits.stride(0), floats, ints, counts)
        options = {"PENALTIES": penalties, "PDL": self._pdl, "launch_pdl": self._pdl, **_NO_FMA}
        pass_args = {"PIECE": _PIECE, "num_warps": _PASS_WARPS, **options}
        summarize[grid](
            *inputs, *self._parts, self._tops, self._state, self._arrived, picks, logprobs,
            self.summaries[rows], self.vocab_size, self._unit, ROOM=self._padded_pieces,
            SAMPLED=sampled, **pass_args,
        )  # fmt: skip
        if sampled:
            row_args = (*inputs, self._state, self._bins, self._brackets)
            candidates = (self._values, self._ids)
            size = (self.vocab_size, self._unit)
            fill_bins[grid](*row_args, self._sums, self._arrived, *size, BINS=_BINS, **pass_args)
            gather[grid](
                *row_args, *candidates, *size, ROOM=_MAX_CANDIDATES, BINS=_BINS, **pass_args
            )
            sample_tokens[(num_rows,)](
                *row_args, self._sums, *candidates, picks, logprobs, *size, self._span,
                ROOM=_MAX_CANDIDATES, BINS=_BINS, BLOCK=_BLOCK, num_warps=_FINISH_WARPS, **options,
            )  # fmt: skip
        if penalties:
            count_tokens[(num_rows,)](*tally_args, CLEAR=True, BLOCK=_HISTORY_BLOCK)
