"""Chunks of prompts, and whatever else is not a captured step, run kernel by kernel.

Their kernels are long enough to hide their launches. What is computed is what a captured step
computes; only attention takes many queries of one text at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda import attention
from unspool.backends.cuda.adapters import Adapt
from unspool.backends.cuda.experts import ExpertScratch
from unspool.backends.cuda.inputs import to_device
from unspool.backends.cuda.program import Activations, Program, Watch
from unspool.backends.step import Ints, StepBatch


@dataclass(frozen=True, slots=True)
class Prepared:
    """Tokens of prompts, on the device."""

    tokens: Tensor
    lines: attention.Lines
    tiles: Tensor  # the programs of attention
    wanted: Tensor  # of which of them logits are wanted
    adapters: Ints | None  # the slot of each one's adapter, if any has one


class Prompts:
    """Reads prompts into the pages of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def prepared(
        self,
        batch: StepBatch,
        rows: Ints,
        mine: Ints,
        wanted: Ints,
        tokens: Tensor,
        adapters: Ints | None = None,
    ) -> Prepared:
        """The tokens `mine` of a step, which belong to its `rows`; their adapters by the slot."""
        device, inputs = self._program.weights.device, self._program.inputs
        counts = np.diff(batch.starts)[rows]
        slots = np.repeat(batch.slots[rows], counts) + 1
        numbers = np.concatenate((slots, batch.positions[mine], batch.visible_end[mine]))
        on_device = to_device(numbers.astype(np.int32), device).view(3, -1)
        lines = attention.Lines(inputs.table, on_device[0], on_device[1], on_device[2])
        starts = np.concatenate(([0], np.cumsum(counts)))
        tiles = attention.chunk_tiles(
            starts,
            batch.slots[rows] + 1,
            batch.visible_end[mine],
            self._program.weights.config,
            attention.prefill_rows(self._program.weights.dtype, self._program.exact),
        )
        return Prepared(
            tokens, lines, to_device(tiles, device), to_device(wanted, device), adapters
        )

    def run(self, given: Prepared, watch: Watch | None = None) -> Tensor:
        """The logits that were wanted."""
        program = self._program
        weights, inputs, pages = program.weights, program.inputs, program.pages
        a = Activations(weights, len(given.tokens))
        program.embed(given.tokens, given.lines.positions, a.h, inputs.no_updates)

        def attend(layer: int, qkv: Tensor, mixed: Tensor) -> None:
            turning, keys, values = program.turning[layer], pages.keys(layer), pages.values(layer)
            attention.store_keys(qkv, keys, values, turning, given.lines, pdl=False)
            attention.prefill(
                qkv, mixed, keys, values, turning, given.lines, given.tiles, exact=program.exact
            )

        scratch = ExpertScratch.for_lines(len(a.h), weights.config, weights)
        adapt, adapt_head = self._adapting(given)
        program.layers(a, attend, scratch, watch, adapt)
        x = a.x[given.wanted]
        logits = torch.empty(
            len(x), weights.config.vocab_size, dtype=weights.dtype, device=weights.device
        )
        if len(x):
            program.head(x, logits, adapt_head)
        return logits

    def _adapting(self, given: Prepared) -> tuple[Adapt | None, Adapt | None]:
        """What adds the adapters' share in the layers, and in the head."""
        if given.adapters is None:
            return None, None
        adapters, slots = self._program.adapters, given.adapters
        on_device = to_device(slots.astype(np.int32), given.tokens.device)
        one_by_one = adapters.on_lines(on_device[given.wanted])
        if self._program.exact:  # the sums of a line are those of a captured step
            return adapters.on_lines(on_device), one_by_one
        starts = np.concatenate(([0], np.flatnonzero(np.diff(slots)) + 1, [len(slots)])).tolist()
        runs = [
            (first, last, int(slots[first])) for first, last in pairwise(starts) if slots[first]
        ]
        return adapters.on_runs(runs), one_by_one
