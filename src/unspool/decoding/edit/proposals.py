"""What could stand in the place of a doubtful word: words with probabilities from both sides.

That somebody wrote the word which stands there speaks for it, however unlikely the model finds it:
most words of a text are meant. `trust` is how much, in nats. If one word in twenty is wrong, and
what stands there instead is one of a thousand, it is log(20 * 1000), about 10; a slip of the hand
is one of fifty, and needs log(20) less.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from unspool.decoding.edit.doubt import Doubt
from unspool.decoding.edit.spelling import alike, respelled
from unspool.decoding.fill.borders import beginning_of
from unspool.decoding.fill.causal import rank
from unspool.decoding.fill.drafts import Drafting, drafted
from unspool.decoding.fill.gaps import Gap, GappedText
from unspool.decoding.fill.masked import MaskedModel
from unspool.decoding.fill.places import fill_by_masks
from unspool.decoding.fill.result import Filled, in_order
from unspool.session import Session

_WORD = re.compile(r"\w+(?:['’\-]\w+)*")
_SIGNS = re.compile(r"[^\w\s]+")
_UNIT = re.compile(f"{_WORD.pattern}|{_SIGNS.pattern}")
_SLIP = math.log(20)  # nats of trust that a word loses beside one that is spelled nearly so


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
    trust: float = 0.0,
) -> tuple[Filled, ...]:
    """What could stand in the place of a unit, best first, what stands there now among them.

    A word is replaced by a word and a sign by signs, so that texts of one length are compared: a
    shorter text is nearly always likelier, and no better for that. Scores are the model's alone;
    order and probabilities have the trust in them.
    """
    left, right = text[: unit.start], text[unit.start + len(unit.text) :]
    gap = Gap(1, unit.tokens + 1)
    kind = _WORD if _WORD.fullmatch(unit.text) else _SIGNS

    def fits(text: str) -> bool:
        return kind.fullmatch(text) is not None

    gapped = GappedText((left, right), (gap,))
    # What is no word, but nearly one, was hardly meant for any other.
    found = respelled(lm.tokenizer, unit.text, text)
    if not found:
        found = drafted(lm, left, beginning_of(lm, right, reach), gap, how, fits)
        if twin is not None:
            near = GappedText((left[-_NEAR:], right[:_NEAR]), (Gap(1, min(3, gap.most)),))
            masked = fill_by_masks(twin, near, candidates=how.candidates)
            found += [filled.texts[0] for filled in masked]
    pool = dict.fromkeys((one,) for one in (unit.text, *found) if fits(one))
    return _trusting(rank(lm, gapped, pool, reach=reach, free=True), unit.text, trust)


def malus(old: str, new: str, trust: float) -> float:
    """Nats that a word has to make up for, since another one stands there."""
    if new == old:
        return 0.0
    return max(0.0, trust - _SLIP) if alike(old, new) else trust


def _trusting(found: Sequence[Filled], old: str, trust: float) -> tuple[Filled, ...]:
    """Candidates in the order that the trust in what stands there leaves them."""
    scores = {filled.texts: filled.score for filled in found}
    lowered = [replace(one, score=one.score - malus(old, one.texts[0], trust)) for one in found]
    return tuple(replace(one, score=scores[one.texts]) for one in in_order(lowered))


_NEAR = 1_000  # characters on each side that a masked model sees
