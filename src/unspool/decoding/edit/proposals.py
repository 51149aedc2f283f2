"""What could stand in the place of a doubtful word: words with probabilities from both sides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unspool.decoding.edit.doubt import Doubt
from unspool.decoding.fill.borders import beginning_of
from unspool.decoding.fill.causal import rank
from unspool.decoding.fill.drafts import Drafting, drafted
from unspool.decoding.fill.gaps import Gap, GappedText
from unspool.decoding.fill.masked import MaskedModel
from unspool.decoding.fill.places import fill_by_masks
from unspool.decoding.fill.result import Filled
from unspool.session import Session

_WORD = re.compile(r"\w+(?:['’\-]\w+)*")
_SIGNS = re.compile(r"[^\w\s]+")
_UNIT = re.compile(f"{_WORD.pattern}|{_SIGNS.pattern}")


@dataclass(frozen=True, slots=True)
class Unit:
    """A word or a sign: what is replaced as a whole."""

    start: int
    text: str
    doubt: float
    tokens: int  # that have a part in it


def units(text: str, doubts: Sequence[Doubt]) -> list[Unit]:
    """The words and signs of a text, the most doubtful first: as doubtful as their worst token."""
    found, first = list[Unit](), 0
    for match in _UNIT.finditer(text):
        while first < len(doubts) and doubts[first].end <= match.start():
            first += 1
        mine = list(_overlapping(doubts, first, match.end()))
        if mine:
            worst = max(doubt.surprise for doubt in mine)
            found.append(Unit(match.start(), match[0], worst, len(mine)))
    return sorted(found, key=lambda unit: (-unit.doubt, unit.start))


def _overlapping(doubts: Sequence[Doubt], first: int, end: int) -> Iterator[Doubt]:
    for doubt in doubts[first:]:
        if doubt.start >= end:
            return
        yield doubt


def proposals(
    lm: Session,
    text: str,
    unit: Unit,
    how: Drafting,
    *,
    reach: int | None,
    twin: MaskedModel | None = None,
) -> tuple[Filled, ...]:
    """What could stand in the place of a unit, best first, what stands there now among them.

    A word is replaced by a word and a sign by signs, so that texts of one length are compared: a
    shorter text is nearly always likelier, and no better for that.
    """
    left, right = text[: unit.start], text[unit.start + len(unit.text) :]
    gap = Gap(1, unit.tokens + 1)
    kind = _WORD if _WORD.fullmatch(unit.text) else _SIGNS

    def fits(text: str) -> bool:
        return kind.fullmatch(text) is not None

    found = [unit.text]
    found += drafted(lm, left, beginning_of(lm, right, reach), gap, how, fits)
    gapped = GappedText((left, right), (gap,))
    if twin is not None:
        near = GappedText((left[-_NEAR:], right[:_NEAR]), (Gap(1, min(3, gap.most)),))
        masked = fill_by_masks(twin, near, candidates=how.candidates)
        found += [filled.texts[0] for filled in masked]
    pool = dict.fromkeys((one,) for one in found if fits(one))
    return rank(lm, gapped, pool, reach=reach, free=True)


_NEAR = 1_000  # characters on each side that a masked model sees
