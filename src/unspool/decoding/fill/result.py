"""What filling a text gives: candidates with their scores, the best first, every token open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unspool.engine.steps import Step, brief
from unspool.errors import SettingsError
from unspool.notebook import bar, escape, note, percent, picture, steps_table, table, text_html
from unspool.text.tokenizer.stream import TextStream


@dataclass(frozen=True, slots=True, repr=False)
class Filled:
    """One way to fill a text's gaps."""

    texts: tuple[str, ...]  # what stands in each gap
    text: str  # the whole text
    score: float  # what candidates are compared by: higher is better
    steps: tuple[Step, ...] = ()  # the tokens that were judged: those of the gaps and behind them
    # Those of each gap: their texts joined are what stands in it, also where a token belongs to
    # the text beside the gap as well.
    gap_steps: tuple[tuple[Step, ...], ...] = ()
    probability: float = 1.0  # among the candidates
    is_cut: bool = False  # whether a gap's longest length ended what the model wrote into it

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
    """A text with its gaps filled, and what else could have stood there."""

    candidates: tuple[Filled, ...]  # the best first
    by: str  # masked, fim or ranking
    around: tuple[str, ...]  # the texts before, between and behind the gaps
    number: int = 0  # of the candidate that is chosen

    @property
    def chosen(self) -> Filled:
        """The candidate that stands in the text."""
        return self.candidates[self.number]

    @property
    def text(self) -> str:
        """The whole text, filled."""
        return self.chosen.text

    @property
    def texts(self) -> tuple[str, ...]:
        """What stands in each gap."""
        return self.chosen.texts

    def choose(self, number: int) -> Filling:
        """The same with another candidate in the text."""
        if not 0 <= number < len(self.candidates):
            raise SettingsError(
                f"there is no candidate {number!r}; they go from 0 to {len(self.candidates) - 1}"
            )
        return replace(self, number=number)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Filling by {self.by}, {len(self.candidates)} candidates, {self.chosen!r}>"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = [candidate.to_dict() for candidate in self.candidates]
        return {"text": self.text, "by": self.by, "chosen": self.number, "candidates": told}

    def _repr_html_(self) -> str:
        rows = [
            (escape(" … ".join(map(repr, c.texts))), f"{c.score:.3f}",
             bar(c.probability, 1.0) + " " + percent(c.probability))
            for c in self.candidates
        ]  # fmt: skip
        pieces = [step.as_piece() for step in self.chosen.steps]
        return picture(
            text_html(pieces),
            table(("in the gap", "score", "among the candidates"), rows),
            note(f"filled by {self.by}"),
            steps_table(pieces),
        )


def in_order(found: Sequence[Filled]) -> tuple[Filled, ...]:
    """Candidates with their probabilities among each other, best first."""
    best = max(one.score for one in found)
    weights = [math.exp(one.score - best) for one in found]
    total = math.fsum(weights)
    shares = [replace(f, probability=w / total) for f, w in zip(found, weights, strict=True)]
    return tuple(sorted(shares, key=lambda one: -one.score))


def clipped(steps: Sequence[Step], ends: Sequence[int], start: int, end: int) -> tuple[Step, ...]:
    """Steps whose texts joined are the bytes from `start` to `end` of the text that they are part
    of; `ends` tells where each of them ends."""
    stream, shown = TextStream(), list[Step]()
    for step, at in zip(steps, ends, strict=True):
        piece = step.bytes
        first, last = max(0, start - (at - len(piece))), len(piece) - max(0, at - end)
        shown.append(replace(step, begun=stream.half, text=stream.push(piece[first:last])))
    if shown:
        shown[-1] = replace(shown[-1], text=shown[-1].text + stream.finish())
    return tuple(shown)
