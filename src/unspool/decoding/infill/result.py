"""Results of infilling: candidates with scores, best first."""

from __future__ import annotations

import math
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
