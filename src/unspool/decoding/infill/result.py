"""Texts with gaps, and the results of infilling: candidates with scores, best first."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unspool.engine.results import Step, brief
from unspool.errors import SettingsError
from unspool.notebook import (
    bar_html,
    escape_html,
    note_html,
    notebook_html,
    percent,
    steps_table,
    table_html,
    text_html,
)
from unspool.text.tokenizer.stream import TextStream

LONGEST = 256  # maximum tokens of a gap
_MARK = re.compile("_{3,}")


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap of `least` to `most` tokens."""

    least: int = 1  # smallest number of tokens
    most: int = 16  # largest number of tokens

    def __call__(self, least: int, most: int | None = None) -> Gap:
        """Return a gap of exactly `least` tokens, or of `least` to `most` tokens."""
        most = least if most is None else most
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in (least, most)):
            raise SettingsError(
                f"a gap's length must be given as integers, got {least!r} to {most!r}"
            )
        if not 0 <= least <= most or not 1 <= most <= LONGEST:
            raise SettingsError(
                f"a gap needs 0 <= least <= most and 1 <= most <= {LONGEST} tokens, got {least} to "
                f"{most}"
            )
        return Gap(least, most)

    def __repr__(self) -> str:
        if self == gap:
            return "gap"
        sizes = [self.least] if self.least == self.most else [self.least, self.most]
        return f"gap({', '.join(map(str, sizes))})"


gap = Gap()
"""A gap of 1 to 16 tokens; `gap(2)` has two, `gap(1, 8)` one to eight."""


@dataclass(frozen=True, slots=True)
class GappedText:
    """Texts and the gaps between them; there is one text more than gaps."""

    texts: tuple[str, ...]
    gaps: tuple[Gap, ...]

    @classmethod
    def parse(cls, parts: Sequence[str | Gap], usual: Gap = gap) -> GappedText:
        """Parse texts and gaps, or one text with ___ in it."""
        if len(parts) == 1 and isinstance(parts[0], str):
            texts = _MARK.split(parts[0])
            if len(texts) == 1:
                raise SettingsError(
                    'the text has no gap; mark it with three underscores: "The ___ sat on the mat"'
                )
            return cls(tuple(texts), (usual,) * (len(texts) - 1))
        parsed: list[str] = [""]
        gaps: list[Gap] = []
        for part in parts:
            if isinstance(part, Gap):
                if gaps and not parsed[-1]:
                    raise SettingsError("two gaps are adjacent; merge them into one")
                gaps.append(part)
                parsed.append("")
            elif isinstance(part, str):
                parsed[-1] += part
            else:
                raise SettingsError(
                    f"each part must be a text or a gap (unspool.gap), got {part!r}"
                )
        if not gaps:
            raise SettingsError(
                'there is nothing to fill; put a gap between texts: lm.fill("The ", unspool.gap, '
                '" sat on the mat")'
            )
        return cls(tuple(parsed), tuple(gaps))

    def filled(self, fillings: Sequence[str]) -> str:
        """The text with its gaps filled."""
        pairs = zip(fillings, self.texts[1:], strict=True)
        return self.texts[0] + "".join(inside + after for inside, after in pairs)

    def first(self, count: int) -> GappedText:
        """Only the first `count` gaps and the texts around them."""
        return GappedText(self.texts[: count + 1], self.gaps[:count])


@dataclass(frozen=True, slots=True, repr=False)
class Filled:
    """One way to fill a text's gaps."""

    texts: tuple[str, ...]  # fillings of the gaps
    text: str  # the whole text
    score: float  # higher is better
    steps: tuple[Step, ...] = ()  # scored tokens: those in the gaps and after them
    # Steps of each gap: their texts joined are the filling, even if a token overlaps the text next
    # to the gap.
    gap_steps: tuple[tuple[Step, ...], ...] = ()
    probability: float = 1.0  # among the candidates
    is_cut: bool = False  # the maximum length of a gap cut off the filling

    def __repr__(self) -> str:
        inside = ", ".join(brief(text, 32) for text in self.texts)
        return f"<Filled {inside}, score {self.score:.4g}, {percent(self.probability)}>"

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "texts": list(self.texts),
            "text": self.text,
            "score": self.score,
            "probability": self.probability,
            "cut": self.is_cut,
            "steps": [step.to_dict() for step in self.steps],
        }


@dataclass(frozen=True, slots=True, repr=False)
class Filling:
    """A filled text and its other candidates."""

    candidates: tuple[Filled, ...]  # the best first
    by: str  # masked, fim or ranking
    around: tuple[str, ...]  # texts before, between and after the gaps
    number: int = 0  # index of the chosen candidate

    @property
    def chosen(self) -> Filled:
        """The chosen candidate."""
        return self.candidates[self.number]

    @property
    def text(self) -> str:
        """The filled text."""
        return self.chosen.text

    @property
    def texts(self) -> tuple[str, ...]:
        """Fillings of the gaps."""
        return self.chosen.texts

    def choose(self, number: int) -> Filling:
        """Return a copy with another candidate chosen."""
        if not 0 <= number < len(self.candidates):
            raise SettingsError(
                f"candidate must be from 0 to {len(self.candidates) - 1}, got {number!r}"
            )
        return replace(self, number=number)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Filling by {self.by}, {len(self.candidates)} candidates, {self.chosen!r}>"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        candidates = [candidate.to_dict() for candidate in self.candidates]
        return {"text": self.text, "by": self.by, "chosen": self.number, "candidates": candidates}

    def _repr_html_(self) -> str:
        rows = [
            (escape_html(" … ".join(map(repr, c.texts))), f"{c.score:.3f}",
             bar_html(c.probability, 1.0) + " " + percent(c.probability))
            for c in self.candidates
        ]  # fmt: skip
        pieces = [step.as_piece() for step in self.chosen.steps]
        return notebook_html(
            text_html(pieces),
            table_html(("in the gap", "score", "among the candidates"), rows),
            note_html(f"filled by {self.by}"),
            steps_table(pieces),
        )


def rank_candidates(candidates: Sequence[Filled]) -> tuple[Filled, ...]:
    """Sort candidates by score and set their relative probabilities."""
    best = max(candidate.score for candidate in candidates)
    weights = [math.exp(candidate.score - best) for candidate in candidates]
    total = math.fsum(weights)
    shares = [replace(f, probability=w / total) for f, w in zip(candidates, weights, strict=True)]
    return tuple(sorted(shares, key=lambda candidate: -candidate.score))


def clip_steps(
    steps: Sequence[Step], ends: Sequence[int], start: int, end: int
) -> tuple[Step, ...]:
    """Clip the texts of steps to the bytes from `start` to `end`; `ends` has the byte offset at
    which each step ends."""
    stream, result = TextStream(), list[Step]()
    for step, at in zip(steps, ends, strict=True):
        piece = step.bytes
        first, last = max(0, start - (at - len(piece))), len(piece) - max(0, at - end)
        result.append(
            replace(step, partial_utf8=stream.partial_utf8, text=stream.push(piece[first:last]))
        )
    if result:
        result[-1] = replace(result[-1], text=result[-1].text + stream.finish())
    return tuple(result)
