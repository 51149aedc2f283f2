"""What is asked of the engine: one text to be written, and what may help to write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from unspool.backends.step import Floats
from unspool.engine.ending import Limits
from unspool.engine.steps import Step
from unspool.engine.thinking import Thinking
from unspool.errors import count
from unspool.sampling import Grammar, SamplingSettings
from unspool.sampling.guards import GuardPolicy


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Several guesses that begin alike: node n has a token, and stands behind node parents[n]
    (-1: behind the text itself), which comes before it. Of those behind one node, the likeliest
    comes first."""

    tokens: Sequence[int]
    parents: Sequence[int]


class Drafter(Protocol):
    """Guesses what comes next in one text, on the engine's thread; see `decoding/speculative.py`.

    A wrong guess costs time and changes nothing, so one that raises is only asked no more.
    """

    def propose(self, tokens: Sequence[int], most: int) -> list[int] | DraftTree:
        """A guess at what follows these tokens (not to be changed), at most so many one behind the
        other; or none."""

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        """How the round went that began with `propose`; a note if there is something to say.

        Told of every round, also of one without a guess (`proposed` is 0), so that the seconds
        from asking to picking can be compared.
        """


@runtime_checkable
class ReadingDrafter(Protocol):
    """A drafter that is also shown the model's inner vectors, from the runs that computed them."""

    @property
    def reads(self) -> tuple[int, ...]:
        """Which vectors it wants to see of the next run: n is the one before layer n."""

    def needs(self, tokens: Sequence[int]) -> int:
        """From which position of a text on it wants to be shown vectors; those before it need not
        be computed again, if they are there already."""

    def see(self, first: int, vectors: Floats) -> None:
        """The vectors [of those it reads, tokens, width] of the text from position `first` on;
        what it was shown from there on before is outdated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One text to be written."""

    prompt: tuple[int, ...]
    settings: SamplingSettings
    limits: Limits
    written: tuple[Step, ...] = ()  # what stands behind the prompt already, when going on
    priority: int = 0
    drafter: Drafter | DraftMaker | None = None  # or what makes a fresh one
    guards: GuardPolicy | None = None  # what to watch for, and what to do about it
    grammar: Grammar | None = None  # what the text may be, behind its thoughts
    thinking: Thinking | None = None  # where its thoughts are; None: nobody asked
    adapter: str | None = None  # the name of the one that it is written with
    cached: bool = True  # False: the whole text is read again for every token

    def __repr__(self) -> str:
        return f"<Request {count(len(self.prompt), 'token')}, {self.settings!r}>"


DraftMaker = Callable[[Request], Drafter]
"""Makes the drafter of one request; what it took to get ready is shared by all of them."""
