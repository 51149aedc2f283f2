"""Replacements for a doubtful word, with probabilities that use both sides.

The author wrote the current word, which speaks for it however unlikely the model finds it. `trust`
says how much, in nats. If one word in twenty is wrong, and a wrong word is one of a thousand, it is
log(20 * 1000), about 10; a typing error is one of fifty, and needs log(20) less.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from unspool.decoding.edit.doubt import Doubt
from unspool.decoding.edit.spelling import alike, spelling_corrections
from unspool.decoding.fill.borders import truncate_text
from unspool.decoding.fill.causal import rank
from unspool.decoding.fill.drafts import Drafting, drafted
from unspool.decoding.fill.gaps import Gap, GappedText
from unspool.decoding.fill.masked import MaskedModel
from unspool.decoding.fill.places import fill_by_masks
from unspool.decoding.fill.result import Filled, rank_candidates
from unspool.session import Session

_WORD = re.compile(r"\w+(?:['’\-]\w+)*")
_PUNCTUATION = re.compile(r"[^\w\s]+")
_UNIT = re.compile(f"{_WORD.pattern}|{_PUNCTUATION.pattern}")
_TYPO_DISCOUNT = math.log(20)  # nats of trust less for a word with similar spelling


@dataclass(frozen=True, slots=True)
class EditUnit:
    """A word or a run of punctuation: replaced as a whole."""

    start: int
    text: str
    doubt: float
    tokens: int  # that overlap it


def split_units(text: str, doubts: Sequence[Doubt]) -> list[EditUnit]:
    """Words and punctuation of a text, most doubtful first, by their worst token."""
    result, first = list[EditUnit](), 0
    for match in _UNIT.finditer(text):
        while first < len(doubts) and doubts[first].end <= match.start():
            first += 1
        overlapping = list(_overlapping(doubts, first, match.end()))
        if overlapping:
            worst = max(doubt.surprise for doubt in overlapping)
            result.append(EditUnit(match.start(), match[0], worst, len(overlapping)))
    return sorted(result, key=lambda unit: (-unit.doubt, unit.start))


def _overlapping(doubts: Sequence[Doubt], first: int, end: int) -> Iterator[Doubt]:
    for doubt in doubts[first:]:
        if doubt.start >= end:
            return
        yield doubt


def propose_replacements(
    lm: Session,
    text: str,
    unit: EditUnit,
    how: Drafting,
    *,
    reach: int | None,
    twin: MaskedModel | None = None,
    trust: float = 0.0,
) -> tuple[Filled, ...]:
    """Replacements of a unit, best first, the current text included.

    A word is replaced by a word and punctuation by punctuation, so that texts of similar length are
    compared: a shorter text is nearly always likelier. Scores are the model's; order and
    probabilities include the trust in the current text.
    """
    prefix, suffix = text[: unit.start], text[unit.start + len(unit.text) :]
    gap = Gap(1, unit.tokens + 1)
    kind = _WORD if _WORD.fullmatch(unit.text) else _PUNCTUATION

    def fits(text: str) -> bool:
        return kind.fullmatch(text) is not None

    gapped = GappedText((prefix, suffix), (gap,))
    # An unknown word that is nearly a known one is most likely a typing error.
    candidates = spelling_corrections(lm.tokenizer, unit.text, text)
    if not candidates:
        candidates = drafted(lm, prefix, truncate_text(lm, suffix, reach), gap, how, fits)
        if twin is not None:
            near = GappedText(
                (prefix[-_MASKED_CONTEXT_CHARS:], suffix[:_MASKED_CONTEXT_CHARS]),
                (Gap(1, min(3, gap.most)),),
            )
            masked = fill_by_masks(twin, near, candidates=how.candidates)
            candidates += [filled.texts[0] for filled in masked]
    pool = dict.fromkeys((candidate,) for candidate in (unit.text, *candidates) if fits(candidate))
    return _rank_with_trust(rank(lm, gapped, pool, reach=reach, free=True), unit.text, trust)


def replacement_penalty(old: str, new: str, trust: float) -> float:
    """Penalty in nats for replacing `old` by `new`."""
    if new == old:
        return 0.0
    return max(0.0, trust - _TYPO_DISCOUNT) if alike(old, new) else trust


def _rank_with_trust(candidates: Sequence[Filled], old: str, trust: float) -> tuple[Filled, ...]:
    """Rank candidates with the trust in the current text."""
    scores = {filled.texts: filled.score for filled in candidates}
    lowered = [
        replace(
            candidate, score=candidate.score - replacement_penalty(old, candidate.texts[0], trust)
        )
        for candidate in candidates
    ]
    return tuple(
        replace(candidate, score=scores[candidate.texts]) for candidate in rank_candidates(lowered)
    )


_MASKED_CONTEXT_CHARS = 1_000  # on each side, for a masked model
