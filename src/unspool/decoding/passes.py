"""What comes of a diffusion: the text, and every pass that led to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from unspool.engine.request import Request
from unspool.engine.steps import Candidate, Step, brief
from unspool.notebook import Piece, escape, legend, note, percent, picture, steps_table, text_html

MASK = "▒"  # how a masked place is shown
Change = Literal["set", "edited", "cleared"] | None  # what a pass did to a place


@dataclass(frozen=True, slots=True)
class Place:
    """One place of a canvas in one pass."""

    number: int  # 0: the first one behind the prompt
    token: int | None  # that stands there after the pass; None: masked
    text: str  # ... to be read
    probability: float  # by the model in this pass: of the token, or of the guess if it is masked
    candidates: tuple[Candidate, ...] = ()  # the likeliest tokens there
    change: Change = None  # what this pass did to it

    def __repr__(self) -> str:
        shown = MASK if self.token is None else self.text
        done = f", {self.change}" if self.change else ""
        return f"<Place {self.number} {shown!r}, p {self.probability:.3g}{done}>"


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the model, and what was set after it."""

    number: int
    # What was computed: the canvas; the finished text before it, which guesses the first place; or
    # the canvas once more, to see how likely its tokens are beside each other.
    kind: Literal["canvas", "text", "look"]
    tokens: tuple[int | None, ...]  # of all places afterwards; None: masked
    places: tuple[Place, ...]  # those of the block that is being filled
    steps: tuple[Step, ...]  # what was set, in order of position
    seconds: float = 0.0

    @property
    def set(self) -> int:
        """How many places got a token."""
        return sum(place.change == "set" for place in self.places)

    @property
    def taken_back(self) -> int:
        """How many lost theirs, or got another."""
        return sum(place.change in ("cleared", "edited") for place in self.places)

    @property
    def masked(self) -> int:
        """How many places have no token yet."""
        return sum(token is None for token in self.tokens)

    def __repr__(self) -> str:
        back = f", {self.taken_back} taken back" if self.taken_back else ""
        return f"<Pass {self.number}: {self.set} set{back}, {self.masked} masked>"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = {"number": self.number, "kind": self.kind, "tokens": list(self.tokens)}
        return {**told, "places": [asdict(place) for place in self.places]}


@dataclass(slots=True, repr=False)
class Diffusion:
    """A text that was filled in, and the passes that it took."""

    request: Request = field(repr=False)
    passes: list[Pass] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)  # of the text, from left to right
    finish_reason: str = "interrupted"  # `stop`, `length`, `interrupted`
    notes: list[str] = field(default_factory=list)  # what is to be known of it

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens that were there before."""
        return self.request.prompt

    @property
    def text(self) -> str:
        """The new text, without the prompt."""
        return "".join(step.text for step in self.steps)

    @property
    def tokens(self) -> list[int]:
        """The new tokens, an end token included."""
        return [step.token for step in self.steps]

    @property
    def seed(self) -> int:
        """What its draws follow from."""
        return self.request.settings.seed

    @property
    def tokens_per_pass(self) -> float:
        """How many tokens a run of the model gave."""
        return len(self.steps) / len(self.passes) if self.passes else 0.0

    @property
    def repeats(self) -> int:
        """How many tokens are the same as the one before them: where places that did not know of
        each other said the same word, a text stutters."""
        tokens = self.tokens
        return sum(one == other for one, other in zip(tokens, tokens[1:], strict=False))

    @property
    def seconds(self) -> float:
        """What it took."""
        return math.fsum(one.seconds for one in self.passes)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: everything but the single passes."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "finish_reason": self.finish_reason,
            "passes": len(self.passes),
            "tokens_per_pass": self.tokens_per_pass,
            "seed": self.seed,
            "seconds": self.seconds,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        said = brief(self.text) if self.text else str(self.tokens[:8])
        count = f"{len(self.steps)} tokens in {len(self.passes)} passes"
        return f"<Diffusion {said}, {count}, {self.finish_reason}>"

    def _repr_html_(self) -> str:
        pieces = [_piece(step) for step in self.steps]
        told = f"{len(pieces)} tokens in {len(self.passes)} passes, {self.finish_reason}"
        return picture(
            text_html(pieces),
            note(f"{told}, seed {self.seed}, {self.seconds:.2f} s"),
            *map(note, self.notes),
            legend(),
            _passes_html(self.passes),
            steps_table(pieces),
        )


class Diffusions(list[Diffusion]):
    """Several texts; a list that a notebook shows one below the other."""

    def __repr__(self) -> str:
        return f"<{len(self)} texts: {', '.join(brief(text.text, 24) for text in self)}>"

    def _repr_html_(self) -> str:
        return "".join(text._repr_html_() for text in self)


def _piece(step: Step) -> Piece:
    piece = step.as_piece()
    facts = [f"set in pass {step.canvas_pass}", *piece.facts]
    return Piece(piece.text, piece.probability, facts, piece.shown)


def _passes_html(passes: Sequence[Pass]) -> str:
    """Each pass as a line, masked places and all, folded away."""
    lines = []
    for one in passes:
        shown = "".join(_place_html(place) for place in one.places)
        lines.append(f"<tr><td>{one.number}</td><td>{shown}</td></tr>")
    head = "<tr><th>pass</th><th>the block that is being filled</th></tr>"
    return (
        f"<details><summary>{len(passes)} passes, one by one</summary>"
        f"<table>{head}{''.join(lines)}</table></details>"
    )


def _place_html(place: Place) -> str:
    guesses = ", ".join(f"{c.text!r} {percent(math.exp(c.logprob))}" for c in place.candidates)
    title = escape(f"place {place.number}, {percent(place.probability)}; {guesses}")
    shown = escape(MASK if place.token is None else place.text or f"⟨{place.token}⟩")
    weight = "font-weight:bold" if place.change in ("set", "edited") else ""
    struck = ";text-decoration:line-through" if place.change == "cleared" else ""
    return f'<span style="{weight}{struck}" title="{title}">{shown}</span>'
