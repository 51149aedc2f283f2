"""Infilling with any causal model: draft candidates for the gap and rank them with the suffix.

By Bayes, p(gap | prefix, suffix) is proportional to p(gap, suffix | prefix): the candidate with the
likeliest whole text fits both sides best. Several gaps are filled from left to right, keeping the
best few fillings of the earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from unspool.decoding.fill.borders import text_ids, token_ends, tokens_within, truncate_text
from unspool.decoding.fill.drafts import Drafting, drafted
from unspool.decoding.fill.gaps import Gap, GappedText
from unspool.decoding.fill.ranking import score_rows, shared_length
from unspool.decoding.fill.result import Filled, clip_steps, rank_candidates
from unspool.engine.ending import check_fits
from unspool.engine.steps import Step
from unspool.errors import UnspoolError
from unspool.session import Session

Inside = tuple[str, ...]  # fillings of the first gaps
_BEAM = 4  # fillings of the earlier gaps that are continued


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
    """Fill a text; returns candidates, best first.

    reach      number of tokens after a gap that are scored; None: all.
    proposed   additional fillings; with `only`, no others are drafted.
    """
    beam: list[Inside] = [()]
    ranked: tuple[Filled, ...] = ()
    for number, gap in enumerate(gapped.gaps):
        pool = dict.fromkeys(texts[: number + 1] for texts in proposed)
        if not only:
            pool |= dict.fromkeys(
                (*before, inside)
                for before in beam
                for inside in _draft_gap(lm, gapped, before, gap, reach, how)
            )
        ranked = rank(lm, gapped, pool, reach=reach, top=top, free=only)
        beam = [filled.texts for filled in ranked[:_BEAM]]
    return ranked


def _draft_gap(
    lm: Session, gapped: GappedText, before: Inside, gap: Gap, reach: int | None, how: Drafting
) -> list[str]:
    number = len(before)
    prefix = gapped.first(number).filled(before)
    suffix = truncate_text(lm, gapped.texts[number + 1], reach)

    def fits(inside: str) -> bool:
        return _CandidateText.build(lm, gapped, (*before, inside), reach).fits(gapped.gaps)

    return drafted(lm, prefix, suffix, gap, how, fits)


def rank(
    lm: Session,
    gapped: GappedText,
    pool: Iterable[Inside],
    *,
    reach: int | None,
    top: int = 0,
    free: bool = False,
) -> tuple[Filled, ...]:
    """Rank fillings of the first gaps by the exact log-probability of the text up to `reach` tokens
    after the last filled gap, given their common prefix.

    `free`: allow candidates of any length.
    """
    rows = [_CandidateText.build(lm, gapped, inside, reach) for inside in pool]
    fitting = [row for row in rows if free or row.fits(gapped.gaps)]
    if not fitting:
        sizes = ", ".join(map(repr, gapped.gaps))
        raise UnspoolError(
            f"no candidate has the requested length ({sizes}); allow other lengths: gap(1, 8)"
        )
    check_fits(max(len(row.ids) for row in fitting), lm.context, lm.config.context)
    shared = _shared(fitting)
    if not shared:
        raise UnspoolError("this model has no start token; put some words before the first gap")
    scored_rows = score_rows(lm, [row.ids for row in fitting], shared, top)
    return rank_candidates(
        [row.filled(steps) for row, steps in zip(fitting, scored_rows, strict=True)]
    )


def _shared(rows: Sequence[_CandidateText]) -> int:
    """Number of common first tokens that do not overlap a gap: gap tokens are always scored,
    even if all candidates start alike."""
    return min([shared_length([row.ids for row in rows]), *(row.places[0].start for row in rows)])


@dataclass(frozen=True, slots=True)
class _CandidateText:
    """A filled text and its tokens."""

    inside: Inside
    text: str  # the whole text
    ids: list[int]  # up to the last scored token
    ends: list[int]  # byte offset of the end of each token
    spans: list[tuple[int, int]]  # byte ranges of the gaps

    @classmethod
    def build(
        cls, lm: Session, gapped: GappedText, inside: Inside, reach: int | None
    ) -> _CandidateText:
        first = gapped.first(len(inside))
        scored_suffix = truncate_text(lm, first.texts[-1], reach)
        text = replace(first, texts=(*first.texts[:-1], scored_suffix)).filled(inside)
        ids = text_ids(lm, text)
        ends = token_ends(lm, ids, text)
        if not scored_suffix and lm.tokenizer.eos_id is not None:  # the text ends after the gap
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
        """Token ranges that overlap each gap."""
        return [tokens_within(self.ends, *span) for span in self.spans]

    def fits(self, gaps: Sequence[Gap]) -> bool:
        pairs = zip(self.places, gaps, strict=False)
        return all(gap.least <= len(places) <= gap.most for places, gap in pairs)

    def filled(self, steps: Sequence[Step]) -> Filled:
        """Build the result from the scored steps."""
        first = len(self.ids) - len(steps)
        parts = [
            clip_steps(
                steps[place.start - first : place.stop - first],
                self.ends[place.start : place.stop],
                *span,
            )
            for place, span in zip(self.places, self.spans, strict=True)
        ]
        score = math.fsum(step.logprob for step in steps)
        return Filled(self.inside, self.text, score, tuple(steps), tuple(parts))
