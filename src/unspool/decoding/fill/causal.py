"""Filling by any causal model: drafts for the gap, ranked with the right side.

A model that writes left to right cannot look ahead, but it can say how likely a whole text is. By
Bayes, p(gap | left, right) is proportional to p(gap, right | left): the candidate with the
likeliest whole text is the one that fits both sides. Several gaps are filled from left to right,
with the best few fillings of the ones before kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unspool.decoding.fill.borders import beginning_of, text_ids, token_ends, tokens_within
from unspool.decoding.fill.drafts import Drafting, drafted
from unspool.decoding.fill.gaps import Gap, GappedText
from unspool.decoding.fill.ranking import scored, shared_length
from unspool.decoding.fill.result import Filled, clipped, in_order
from unspool.engine.ending import check_fits
from unspool.engine.steps import Step
from unspool.errors import UnspoolError
from unspool.session import Session

Inside = tuple[str, ...]  # what stands in the first gaps of a text
_KEPT = 4  # fillings of the first gaps that are gone on with


def fill_by_ranking(
    lm: Session,
    gapped: GappedText,
    how: Drafting,
    *,
    reach: int | None,
    top: int = 0,
    proposed: Sequence[Inside] = (),
    only: bool = False,
) -> tuple[Filled, ...]:
    """Fillings of a text, best first.

    reach      how many tokens of the text behind a gap are weighed; None: all.
    proposed   further fillings, from elsewhere; with `only`, nothing else is looked for.
    """
    kept: list[Inside] = [()]
    found: tuple[Filled, ...] = ()
    for number, gap in enumerate(gapped.gaps):
        pool = dict.fromkeys(each[: number + 1] for each in proposed)
        if not only:
            pool |= dict.fromkeys(
                (*before, inside)
                for before in kept
                for inside in _drafted(lm, gapped, before, gap, reach, how)
            )
        found = rank(lm, gapped, pool, reach=reach, top=top, free=only)
        kept = [filled.texts for filled in found[:_KEPT]]
    return found


def _drafted(
    lm: Session, gapped: GappedText, before: Inside, gap: Gap, reach: int | None, how: Drafting
) -> list[str]:
    number = len(before)
    left = gapped.first(number).filled(before)
    right = beginning_of(lm, gapped.texts[number + 1], reach)

    def fits(inside: str) -> bool:
        return _Row.of(lm, gapped, (*before, inside), reach).fits(gapped.gaps)

    return drafted(lm, left, right, gap, how, fits)


def rank(
    lm: Session,
    gapped: GappedText,
    pool: Iterable[Inside],
    *,
    reach: int | None,
    top: int = 0,
    free: bool = False,
) -> tuple[Filled, ...]:
    """Fillings of the first gaps, all of equally many, best first: by the exact log-probability of
    the text up to `reach` tokens behind the last of them, given what all of them begin with.

    `free`: candidates of any length are taken.
    """
    rows = [_Row.of(lm, gapped, inside, reach) for inside in pool]
    fitting = [row for row in rows if free or row.fits(gapped.gaps)]
    if not fitting:
        sizes = ", ".join(map(repr, gapped.gaps))
        raise UnspoolError(
            f"no candidate has the length that was asked for ({sizes}); allow other lengths: "
            "gap(1, 8)"
        )
    check_fits(max(len(row.ids) for row in fitting), lm.context, lm.config.context)
    shared = _shared(fitting)
    if not shared:
        raise UnspoolError(
            "this model has no token that begins a text; put some words before the first gap"
        )
    judged = scored(lm, [row.ids for row in fitting], shared, top)
    return in_order([row.filled(steps) for row, steps in zip(fitting, judged, strict=True)])


def _shared(rows: Sequence[_Row]) -> int:
    """How many tokens all of them begin with, none of which has a part in a gap: what stands there
    is judged, also where all candidates begin alike."""
    return min([shared_length([row.ids for row in rows]), *(row.places[0].start for row in rows)])


@dataclass(frozen=True, slots=True)
class _Row:
    """A filled text, cut into tokens as the vocabulary cuts it."""

    inside: Inside
    text: str  # all of it
    ids: list[int]  # up to as far as it is weighed
    ends: list[int]  # where each of them ends, in bytes
    spans: list[tuple[int, int]]  # the gaps, in bytes

    @classmethod
    def of(cls, lm: Session, gapped: GappedText, inside: Inside, reach: int | None) -> _Row:
        first = gapped.first(len(inside))
        weighed = beginning_of(lm, first.texts[-1], reach)
        text = replace(first, texts=(*first.texts[:-1], weighed)).filled(inside)
        ids = text_ids(lm, text)
        ends = token_ends(lm, ids, text)
        if not weighed and lm.tokenizer.eos_id is not None:  # behind the gap is the end
            ids.append(lm.tokenizer.eos_id)
            ends.append(ends[-1])
        spans, at = list[tuple[int, int]](), 0
        for before, between in zip(first.texts, inside, strict=False):
            begin = at + len(before.encode())
            at = begin + len(between.encode())
            spans.append((begin, at))
        return cls(inside, first.filled(inside), ids, ends, spans)

    @property
    def places(self) -> list[range]:
        """The tokens that have a part in each gap."""
        return [tokens_within(self.ends, *span) for span in self.spans]

    def fits(self, gaps: Sequence[Gap]) -> bool:
        pairs = zip(self.places, gaps, strict=False)
        return all(gap.least <= len(places) <= gap.most for places, gap in pairs)

    def filled(self, steps: Sequence[Step]) -> Filled:
        """With its tokens judged, from the border of the first gap or before it on."""
        known = len(self.ids) - len(steps)
        parts = [
            clipped(
                steps[place.start - known : place.stop - known],
                self.ends[place.start : place.stop],
                *span,
            )
            for place, span in zip(self.places, self.spans, strict=True)
        ]
        score = math.fsum(step.logprob for step in steps)
        return Filled(self.inside, self.text, score, tuple(steps), tuple(parts))
