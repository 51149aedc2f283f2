"""The drafter of a head that reads hidden states: one instance per text.

    lm.generate(prompt, speculate="mtp")                # the MTP layer of the model's checkpoint
    lm.generate(prompt, speculate="eagle:FOLDER")       # an EAGLE-3 head

The engine passes the drafter the model's hidden states of every computed position; the drafter
collects them and gives them to the head when a draft is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from unspool.backends.step import Floats
from unspool.decoding.speculative.controller import FixedShape, RoundCosts, ShapeController
from unspool.decoding.speculative.eagle import load_eagle
from unspool.decoding.speculative.head import DraftHead, build_draft
from unspool.decoding.speculative.mtp import load_mtp
from unspool.engine.request import DraftMaker, DraftTree, Request
from unspool.session import Session

SHARED_TEXTS = 8  # recent texts whose prefixes new ones may share
RECOMPUTED = 64  # last cached positions that are computed again to get their hidden states
MAX_READ = 512  # positions read after a gap or of a long prompt
_GREEDY_TEMPERATURE = 0.6  # for draft probabilities when the text is greedy


class HeadDrafter:
    """Drafts with a head for one text."""

    def __init__(
        self,
        head: DraftHead,
        request: Request,
        controller: ShapeController | FixedShape,
        others: deque[HeadDrafter] | None = None,
    ) -> None:
        self._head, self._controller = head, controller
        self._recent = others  # drafters of recent texts
        self._tokens: Sequence[int] = ()  # of the text at the last draft
        self._temperature = request.settings.temperature or _GREEDY_TEMPERATURE
        self._context = head.context()
        self._positions: list[int] = []  # positions that the context has read
        self._unread: list[tuple[int, Floats]] = []
        self._excluded_s = 0.0  # seconds of this round not caused by drafting

    @property
    def reads(self) -> tuple[int, ...]:
        return self._head.layers if self._controller.reading else ()

    def see(self, first: int, vectors: Floats) -> None:
        while self._unread and self._unread[-1][0] >= first:
            self._unread.pop()
        if self._unread:
            start, vectors_before = self._unread[-1]
            self._unread[-1] = start, vectors_before[:, : first - start]
        self._truncate(first)
        self._unread.append((first, vectors))

    def needs(self, tokens: Sequence[int]) -> int:
        if not self._controller.reading:
            return len(tokens)
        if self._recent is not None:
            self._share_prefix(tokens)
            self._recent.append(self)
            self._recent = None
        num_known = self._positions[-1] + 1 if self._positions else 0
        if self._unread:
            first, vectors = self._unread[-1]
            num_known = first + vectors.shape[1]
        return max(num_known, len(tokens) - RECOMPUTED)

    def _share_prefix(self, tokens: Sequence[int]) -> None:
        """Fork the context of the recent text with the longest common prefix."""
        best: HeadDrafter | None = None
        longest = 0
        for other in self._recent or ():
            pairs = enumerate(zip(tokens, other._tokens, strict=False))
            shortest = min(len(tokens), len(other._tokens))
            shared_length = next(
                (at for at, (token, other_token) in pairs if token != other_token), shortest
            )
            count = bisect_left(other._positions, shared_length - 1)
            if count > longest:
                best, longest = other, count
        if best is not None:
            self._context = best._context.fork(longest)
            self._positions = best._positions[:longest]

    def propose(self, tokens: Sequence[int], most: int) -> list[int] | DraftTree:
        self._excluded_s = 0.0
        shape = self._controller.choose()
        if shape is None:
            return []
        if most < 1 or not self._catch_up(tokens):
            self._controller.skip()
            return []
        return build_draft(
            self._context, tokens, self._head.ids, shape.within(most), self._temperature
        )

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        return self._controller.learn(accepted, seconds - self._excluded_s)

    def _truncate(self, position: int) -> None:
        """Drop everything read from a position on."""
        num_kept = bisect_left(self._positions, position)
        if num_kept < len(self._positions):
            del self._positions[num_kept:]
            self._context.truncate(num_kept)

    def _catch_up(self, tokens: Sequence[int]) -> bool:
        """Read the collected hidden states; True if they reach the token before the last."""
        last = len(tokens) - 1
        self._truncate(last)
        self._tokens = tokens
        if self._unread:
            began = perf_counter()
            places = [np.arange(first, first + v.shape[1]) for first, v in self._unread]
            positions = np.concatenate(places)
            num_before = bisect_left(positions.tolist(), last)
            selected = slice(max(0, num_before - MAX_READ), num_before)
            vectors = _concat([v for _, v in self._unread])[:, selected]
            positions = positions[selected]
            self._unread.clear()
            if len(positions):
                following = [int(tokens[position + 1]) for position in positions.tolist()]
                self._context.read(positions, vectors, following)
                self._positions += positions.tolist()
            if len(positions) > 32:  # a prompt, or text written during a pause
                self._excluded_s = perf_counter() - began
        return bool(self._positions) and self._positions[-1] == last - 1


def _concat(parts: list[Floats]) -> Floats | Tensor:
    """Join hidden states along the tokens; those of a GPU step are device tensors."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts, 1)
    device = next(part.device for part in parts if isinstance(part, Tensor))
    tensors = [part if isinstance(part, Tensor) else torch.from_numpy(part) for part in parts]
    return torch.cat([tensor.to(device).float() for tensor in tensors], 1)


def head_maker(head: DraftHead, lm: Session, most: int | None) -> DraftMaker:
    """Build the drafter factory for a head; its texts share prefixes and measured costs."""
    costs = RoundCosts(observing_is_free=lm.model.device == "cpu")
    texts = deque[HeadDrafter](maxlen=SHARED_TEXTS)
    longest = {} if most is None else {"most": most}
    return lambda request: HeadDrafter(head, request, ShapeController(costs, **longest), texts)


def mtp_maker(lm: Session, most: int | None) -> DraftMaker:
    return head_maker(load_mtp(lm.path, lm.model, lm.context), lm, most)


def eagle_maker(folder: str, lm: Session, most: int | None) -> DraftMaker:
    return head_maker(load_eagle(Path(folder).expanduser(), lm.model), lm, most)
