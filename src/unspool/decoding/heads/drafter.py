"""Drafts by a trained head, as the engine asks for them: one drafter for one text.

    lm.generate(prompt, speculate="head")               # the head that is shipped for this model
    lm.generate(prompt, speculate="head:FOLDER")        # one of your own, or an EAGLE-3 head

The engine shows the drafter the model's inner vectors of every position from the run that computed
them; the drafter keeps them until it is asked for a draft, and gives them to the head then.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from unspool.backends.base import Loaded
from unspool.backends.step import Floats
from unspool.decoding.controller import FixedShape, RoundCosts, ShapeController
from unspool.decoding.heads.arrays import joined
from unspool.decoding.heads.files import (
    SHIPPED,
    head_folder,
    parse_config,
    read_head,
    read_json,
)
from unspool.decoding.heads.growing import Head, grow
from unspool.engine.request import DraftMaker, DraftTree, Request
from unspool.errors import SettingsError
from unspool.session import Session

REMEMBERED = 8  # texts whose beginnings others may share
SHOWN_AGAIN = 64  # last positions that are computed again if they were computed for somebody else
LONGEST_PAST = 512  # positions that are read at once at the most, behind a gap or a long prompt
_GREEDY = 0.6  # temperature that guesses are weighed with where the text has none


class HeadDrafter:
    """Asks a head what comes next in one text."""

    def __init__(
        self,
        head: Head,
        request: Request,
        ladder: ShapeController | FixedShape,
        others: deque[HeadDrafter] | None = None,
    ) -> None:
        self._head, self._ladder = head, ladder
        self._others = others  # the last texts that the head drafted for
        self._tokens: Sequence[int] = ()  # of the text, when it was last read
        self._temperature = request.settings.temperature or _GREEDY
        self._context = head.context()
        self._positions: list[int] = []  # that the context has read
        self._unread: list[tuple[int, Floats]] = []
        self._aside = 0.0  # seconds of this round that drafting is not to blame for

    @property
    def reads(self) -> tuple[int, ...]:
        return self._head.layers if self._ladder.reading else ()

    def see(self, first: int, vectors: Floats) -> None:
        while self._unread and self._unread[-1][0] >= first:
            self._unread.pop()
        if self._unread:
            start, kept = self._unread[-1]
            self._unread[-1] = start, kept[:, : first - start]
        self._cut(first)
        self._unread.append((first, vectors))

    def needs(self, tokens: Sequence[int]) -> int:
        if not self._ladder.reading:
            return len(tokens)
        if self._others is not None:
            self._begin_as_others(tokens)
            self._others.append(self)
            self._others = None
        known = self._positions[-1] + 1 if self._positions else 0
        if self._unread:
            first, vectors = self._unread[-1]
            known = first + vectors.shape[1]
        return max(known, len(tokens) - SHOWN_AGAIN)

    def _begin_as_others(self, tokens: Sequence[int]) -> None:
        """What another text of the last ones had read of the same tokens is known already."""
        best: HeadDrafter | None = None
        most = 0
        for other in self._others or ():
            pairs = enumerate(zip(tokens, other._tokens, strict=False))
            shortest = min(len(tokens), len(other._tokens))
            alike = next((at for at, (ours, theirs) in pairs if ours != theirs), shortest)
            count = bisect_left(other._positions, alike - 1)
            if count > most:
                best, most = other, count
        if best is not None:
            self._context = best._context.fork(most)
            self._positions = best._positions[:most]

    def propose(self, tokens: Sequence[int], most: int) -> list[int] | DraftTree:
        self._aside = 0.0
        shape = self._ladder.choose()
        if shape is None:
            return []
        if most < 1 or not self._catch_up(tokens):
            self._ladder.skip()
            return []
        return grow(self._context, tokens, self._head.ids, shape.within(most), self._temperature)

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        return self._ladder.learn(accepted, seconds - self._aside)

    def _cut(self, position: int) -> None:
        """Forget what was read from a position on."""
        kept = bisect_left(self._positions, position)
        if kept < len(self._positions):
            del self._positions[kept:]
            self._context.cut(kept)

    def _catch_up(self, tokens: Sequence[int]) -> bool:
        """Read what was shown since; whether the position before the last token is among it."""
        last = len(tokens) - 1
        self._cut(last)
        self._tokens = tokens
        if self._unread:
            began = perf_counter()
            places = [np.arange(first, first + v.shape[1]) for first, v in self._unread]
            positions = np.concatenate(places)
            until = bisect_left(positions.tolist(), last)
            known = slice(max(0, until - LONGEST_PAST), until)
            vectors = joined([v for _, v in self._unread], 1)[:, known]
            positions = positions[known]
            self._unread.clear()
            if len(positions):
                following = [int(tokens[position + 1]) for position in positions.tolist()]
                self._context.read(positions, vectors, following)
                self._positions += positions.tolist()
            if len(positions) > 32:  # a prompt, or what was written while drafting rested
                self._aside = perf_counter() - began
        return bool(self._positions) and self._positions[-1] == last - 1


# -- from a word to a head ---------------------------------------------------------------------


def head_maker(where: str, lm: Session, most: int | None) -> DraftMaker:
    """Makes drafters that ask the head in a folder, or (where it names none) the shipped one."""
    head = load_head(head_folder(where) if where else shipped_head(lm.model), lm)
    costs = RoundCosts(observing_is_free=lm.model.device == "cpu")
    texts = deque[HeadDrafter](maxlen=REMEMBERED)
    longest = {} if most is None else {"most": most}
    return lambda request: HeadDrafter(head, request, ShapeController(costs, **longest), texts)


def shipped_head(model: Loaded) -> Path:
    """The head that comes with Unspool for a model."""
    fingerprint = model.fingerprint()
    for folder in sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else []:
        if (folder / "config.json").exists() and read_json(folder)["fingerprint"] == fingerprint:
            return folder
    raise SettingsError(
        "speculate is 'head', and no drafting head is shipped for this model; name one that was "
        "trained for it: speculate='head:FOLDER'"
    )


def load_head(folder: Path, lm: Session) -> Head:
    """The head in a folder, ready to draft for a model; one of another model is refused."""
    told, model = read_json(folder), lm.model
    device = None if model.device == "cpu" else model.device
    if told.get("speculators_model_type") == "eagle3":
        from unspool.decoding.heads.eagle import EagleHead

        return EagleHead(folder, told, model, device)
    check_base(folder, told, model)
    files = read_head(folder)
    from unspool.backends.cpu.loaded import CpuModel

    if isinstance(model, CpuModel):
        from unspool.decoding.heads.native import NativeHead

        return NativeHead(files, model, lm.context)
    if "unspool.backends.cuda.loaded" in sys.modules:  # else the model cannot be one of its own
        from unspool.backends.cuda.loaded import CudaModel

        if isinstance(model, CudaModel):
            from unspool.decoding.heads.captured import CapturedHead

            return CapturedHead(files, model, lm.context)
    from unspool.decoding.heads.own import OwnHead

    return OwnHead(files, model, device)


def check_base(folder: Path, told: dict[str, object], model: Loaded) -> None:
    """A head reads the inside of one model; to any other it is of no use."""
    config = parse_config(told, folder)
    fits = config.width == model.config.width and max(config.layers) <= model.config.layers
    if not fits or config.fingerprint != model.fingerprint():
        raise SettingsError(
            f"{folder} is a drafting head for {config.base}, and this is another model (or other "
            "weights of it); use it with that one, or leave speculate out"
        )
