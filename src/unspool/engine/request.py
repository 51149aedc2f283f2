"""A request to the engine, and the interface of drafters for speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from unspool.backends.step import Floats
from unspool.engine.ending import Limits
from unspool.engine.steps import Step
from unspool.engine.thinking import ReasoningSpec
from unspool.errors import count
from unspool.sampling import Grammar, SamplingSettings
from unspool.sampling.guards import GuardPolicy


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of draft tokens.

    Node n has a token and a parent with a smaller index (-1: the text itself). Of the children of
    one node, the most likely comes first.
    """

    tokens: Sequence[int]
    parents: Sequence[int]


class Drafter(Protocol):
    """Proposes the next tokens of one text, on the engine's thread; see `decoding/speculative.py`.

    A rejected draft costs time and changes nothing. A drafter that raises is not called again.
    """

    def propose(self, tokens: Sequence[int], most: int) -> list[int] | DraftTree:
        """Return draft tokens that follow `tokens`, a chain of at most `most` or a tree of at most
        that depth; or none. `tokens` must not be changed."""

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        """Learn from the round that started with `propose`; return a note for the user, if any.

        Called after every round, also after one without a draft (`proposed` is 0), so that the
        seconds from proposing to sampling can be compared.
        """


@runtime_checkable
class ReadingDrafter(Protocol):
    """A drafter that also reads the model's hidden states, from the steps that computed them."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The hidden states to return from the next step: n is the one before layer n."""

    def needs(self, tokens: Sequence[int]) -> int:
        """Return the first position of a text whose hidden states are needed; tokens before it may
        come from the KV cache."""

    def see(self, first: int, vectors: Floats) -> None:
        """Take the hidden states [layers read, tokens, width] of the text from position `first` on;
        earlier ones from there on are outdated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One text to generate, with all options checked."""

    prompt: tuple[int, ...]
    settings: SamplingSettings
    limits: Limits
    written: tuple[Step, ...] = ()  # steps after the prompt already, when a text is resumed
    priority: int = 0
    drafter: Drafter | DraftMaker | None = None
    guards: GuardPolicy | None = None
    grammar: Grammar | None = None  # of the answer, after the reasoning
    thinking: ReasoningSpec | None = None  # how the text contains reasoning; None: it does not
    adapter: str | None = None  # name of the LoRA adapter
    cached: bool = True  # False: the whole text is computed again for every token

    def __repr__(self) -> str:
        return f"<Request {count(len(self.prompt), 'token')}, {self.settings!r}>"


DraftMaker = Callable[[Request], Drafter]
"""Creates the drafter of one request; requests share what is expensive to prepare."""
