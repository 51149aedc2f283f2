"""Sampling on the host: tokens for many sequences, by the chain of sampling stages, in one pass.

Used for sequences with explained steps, a grammar, a guard or an unusual sampling stage.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import numpy as np

from unspool.backends.step import Logits
from unspool.engine.sequence import Sequence
from unspool.sampling import Chain, Pick, RowInput, SamplingSettings
from unspool.sampling.faults import ROW_ERRORS


class ChainPicker:
    """Samples for many sequences, and caches the chains of groups that recur."""

    def __init__(self) -> None:
        self._chains: dict[tuple[int, ...], Chain] = {}

    def pick(self, ready: list[Sequence]) -> list[tuple[Sequence, BaseException]]:
        """Sample one token for every sequence; with drafts, as many as match.

        Returns:
            The sequences that failed, with the reason.
        """
        failed: list[tuple[Sequence, BaseException]] = []
        pending = [(sequence, sequence.next_logits()) for sequence in ready]
        while pending:
            matched = []
            for sequence, pick in self._picks(pending, failed):
                try:
                    is_match = sequence.accept(pick.token, pick.logprob, pick)
                except BaseException as error:  # from a caller's predicate, for example
                    failed.append((sequence, error))
                    continue
                if is_match:
                    matched.append((sequence, sequence.next_logits()))
            pending = matched
        return failed

    def _picks(
        self,
        pending: list[tuple[Sequence, Logits]],
        failed: list[tuple[Sequence, BaseException]],
    ) -> list[tuple[Sequence, Pick]]:
        """Sample one token for each sequence; those that cannot be sampled join `failed`."""
        groups: dict[tuple[int, bool], list[tuple[Sequence, Logits, RowInput]]] = {}
        for sequence, logits in pending:
            limits = sequence.request.limits
            try:
                row = sequence.row_input()
            except Exception as error:  # from a grammar that outgrew its limits, for example
                failed.append((sequence, error))
                continue
            groups.setdefault((limits.top, limits.explain), []).append((sequence, logits, row))
        picked: list[tuple[Sequence, Pick]] = []
        for (top, explain), members in groups.items():
            while members:
                chain = self._chain([sequence.request.settings for sequence, _, _ in members])
                stacked = concat_logits([logits for _, logits, _ in members])
                rows = [row for _, _, row in members]
                try:
                    picks = chain.pick(stacked, rows, top=top, explain=explain)
                except ROW_ERRORS as error:
                    failed += [(members[number][0], error) for number in error.rows]
                    members = [m for n, m in enumerate(members) if n not in error.rows]
                    continue
                except Exception as error:  # it names no row: all of them fail
                    failed += [(sequence, error) for sequence, _, _ in members]
                    break
                picked += [(s, p) for (s, _, _), p in zip(members, picks, strict=True)]
                break
        return picked

    def _chain(self, settings: list[SamplingSettings]) -> Chain:
        key = tuple(map(id, settings))
        if key not in self._chains:
            if len(self._chains) > 64:
                self._chains.clear()
            self._chains[key] = Chain(settings)
        return self._chains[key]


def concat_logits(parts: AbstractSequence[Logits]) -> Logits:
    """Concatenate rows of logits: as a tensor if all parts are tensors, else as a numpy array."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return np.empty((0, 0), np.float32)
    tensors = [part for part in parts if not isinstance(part, np.ndarray)]
    if len(tensors) == len(parts):
        import torch

        return torch.cat(tensors)
    return np.concatenate(
        [part if isinstance(part, np.ndarray) else part.cpu().numpy() for part in parts]
    )
