"""Small sums, whose answers can be checked: what thinking longer about them buys, and its price."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from unspool.costing.part import Figure
from unspool.costing.statistics import share_figure
from unspool.costing.writing import encoded
from unspool.errors import UnspoolError
from unspool.language_model import LanguageModel

_MANY = 5  # texts, where there are several
_TOKENS = 6  # of an answer
_THOUGHT = 24  # tokens that budget forcing thinks at most ...
_TAGS = 12  # ... and those of the tags around it, in models to which they are plain text
_CLOSE = "</think>"
_SHOWN = "Q: What is 4 + 3?\nA: 4 + 3 = 7\n\nQ: What is 6 + 8?\nA: 6 + 8 = 14\n\n"
_FORCED = "budget forcing"


def number_in(text: str) -> str:
    """The answer of a text, by its first line: the number behind the first =, or the first number;
    empty if there is none. What was thought before does not count."""
    line = text.rpartition(_CLOSE)[2].strip().partition("\n")[0]
    found = re.search(r"=\s*(\d+)", line) or re.search(r"(\d+)", line)
    return "" if found is None else found[1]


WAYS: dict[str, dict[str, Any]] = {
    "one sample": {"policy": "best-of", "n": 1},
    f"vote of {_MANY}": {
        "policy": "vote",
        "n": _MANY,
        "extract": lambda text: number_in(text.text),
    },
    f"best of {_MANY}, the likeliest": {"policy": "best-of", "n": _MANY},
    f"best of {_MANY}, asked yes or no": {"policy": "best-of", "n": _MANY, "judge": "ask"},
    _FORCED: {"policy": "think", "max_thinking": _THOUGHT, "max_tokens": _THOUGHT + _TAGS + 12},
}


@dataclass(frozen=True)
class Sum:
    """A question, and what it comes to."""

    a: int
    b: int

    def prompt(self, thinking: bool = False) -> str:
        """Behind two that are answered; where the model shall think first, only asked."""
        begun = "" if thinking else f" {self.a} + {self.b} ="
        return f"{_SHOWN}Q: What is {self.a} + {self.b}?\nA:{begun}"

    def is_right(self, text: str) -> bool:
        """Whether a text gives the right answer."""
        return number_in(text) == str(self.a + self.b)


@dataclass(frozen=True)
class Answered:
    """One way of answering, and what it took."""

    name: str
    right: int
    asked: int
    tokens: int  # that were computed
    seconds: float

    def figure(self, usual: Answered) -> Figure:
        """Its share of right answers, with its price beside that of `usual`."""
        tokens = self.tokens / self.asked
        why = f"{tokens:.0f} tokens and {self.seconds / self.asked:.2f} s a sum"
        if self is not usual:
            more = tokens * usual.asked / usual.tokens
            longer = self.seconds / self.asked * usual.asked / usual.seconds
            why += f": {more:.1f}× and {longer:.1f}× those of {usual.name}"
        return share_figure(
            f"sums right, {self.name}", self.right, self.asked, better="higher", why=why
        )


def sums(count: int) -> list[Sum]:
    """So many of them, small and all different."""
    return [Sum(2 + number * 7 % 9, 1 + number * 5 % 8) for number in range(count)]


def sum_figures(
    lm: LanguageModel,
    asked: Sequence[Sum],
    ways: Sequence[str],
    seed: int,
    tell: Callable[[float], object],
) -> tuple[list[Figure], list[str]]:
    """The same sums in each way; and why one could not be taken, in words."""
    found: list[Answered] = []
    failed: list[str] = []
    for number, name in enumerate(ways):
        try:
            found.append(answered(lm, name, asked, seed))
        except UnspoolError as error:  # a context that is too short, a model without a template
            failed.append(f"{name}: {error}")
        tell((number + 1) / len(ways))
    return [one.figure(found[0]) for one in found], failed


def answered(lm: LanguageModel, name: str, asked: Sequence[Sum], seed: int) -> Answered:
    """All sums in one way. The questions are read before: nobody pays for that."""
    right = tokens = 0
    seconds = 0.0
    for one in asked:
        prompt = encoded(lm, one.prompt(thinking=name == _FORCED))
        lm.generate(prompt, max_tokens=1)
        started = perf_counter()
        thought = lm.think(
            prompt, budget=None, seed=seed, progress=False, **{"max_tokens": _TOKENS, **WAYS[name]}
        )
        seconds += perf_counter() - started
        right += one.is_right(thought.text)
        tokens += thought.spent.written + thought.spent.judged
    return Answered(name, right, len(asked), tokens, seconds)
