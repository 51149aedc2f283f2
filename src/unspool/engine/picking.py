"""Tokens for the texts whose picks the chain of sampling stages makes, all in one pass.

These are the texts that want their steps explained, or have a grammar, a guard or an unusual stage.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unspool.backends.step import Logits
from unspool.engine.sequence import Sequence as WrittenText
from unspool.sampling import Chain, Pick, RowInput, SamplingSettings
from unspool.sampling.faults import ROW_FAULTS


class ChainPicker:
    """Picks for many texts, and remembers the chains of those that come together again."""

    def __init__(self) -> None:
        self._chains: dict[tuple[int, ...], Chain] = {}

    def pick(self, ready: list[WrittenText]) -> list[tuple[WrittenText, BaseException]]:
        """One token for every text; with drafts, as many as they got right. Those that cannot
        have one are given back, with the reason."""
        failed: list[tuple[WrittenText, BaseException]] = []
        going = [(sequence, sequence.next_logits()) for sequence in ready]
        while going:
            further = []
            for sequence, pick in self._picks(going, failed):
                try:
                    again = sequence.accept(pick.token, pick.logprob, pick)
                except BaseException as error:  # a caller's predicate, say
                    failed.append((sequence, error))
                    continue
                if again:
                    further.append((sequence, sequence.next_logits()))
            going = further
        return failed

    def _picks(
        self,
        going: list[tuple[WrittenText, Logits]],
        failed: list[tuple[WrittenText, BaseException]],
    ) -> list[tuple[WrittenText, Pick]]:
        """A pick for each text; a text that cannot have one fails alone."""
        groups: dict[tuple[int, bool], list[tuple[WrittenText, Logits, RowInput]]] = {}
        for sequence, logits in going:
            limits = sequence.request.limits
            try:
                row = sequence.row_input()
            except Exception as error:  # a grammar that grew beyond its limits, say
                failed.append((sequence, error))
                continue
            groups.setdefault((limits.top, limits.explain), []).append((sequence, logits, row))
        found: list[tuple[WrittenText, Pick]] = []
        for (top, explain), members in groups.items():
            while members:
                chain = self._chain([sequence.request.settings for sequence, _, _ in members])
                stacked = joined([logits for _, logits, _ in members])
                rows = [row for _, _, row in members]
                try:
                    picks = chain.pick(stacked, rows, top=top, explain=explain)
                except ROW_FAULTS as error:
                    failed += [(members[number][0], error) for number in error.rows]
                    members = [m for n, m in enumerate(members) if n not in error.rows]
                    continue
                except Exception as error:  # a fault without a name: nobody here can go on
                    failed += [(sequence, error) for sequence, _, _ in members]
                    break
                found += [(s, p) for (s, _, _), p in zip(members, picks, strict=True)]
                break
        return found

    def _chain(self, settings: list[SamplingSettings]) -> Chain:
        key = tuple(map(id, settings))
        if key not in self._chains:
            if len(self._chains) > 64:
                self._chains.clear()
            self._chains[key] = Chain(settings)
        return self._chains[key]


def joined(parts: Sequence[Logits]) -> Logits:
    """Rows of logits in one array, of the kind that they are; on the host, if any of them is."""
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
