"""Small sums with checkable answers: accuracy and cost of test-time compute."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from unspool.costing.part import Figure
from unspool.costing.statistics import share_figure
from unspool.costing.writing import encode_with_start
from unspool.errors import UnspoolError
from unspool.language_model import LanguageModel

_SAMPLES = 5
_ANSWER_TOKENS = 6
_MAX_REASONING = 24  # tokens of reasoning with budget forcing ...
_TAGS = 12  # ... and of the tags, if they are plain text for the model
_CLOSE = "</think>"
_EXAMPLES = "Q: What is 4 + 3?\nA: 4 + 3 = 7\n\nQ: What is 6 + 8?\nA: 6 + 8 = 14\n\n"
_FORCED = "budget forcing"


def extract_number(text: str) -> str:
    """Return the answer in a text, "" if there is none; reasoning is ignored.

    It is the number after the first = of the first line, or else the first number.
    """
    line = text.rpartition(_CLOSE)[2].strip().partition("\n")[0]
    match = re.search(r"=\s*(\d+)", line) or re.search(r"(\d+)", line)
    return "" if match is None else match[1]


POLICIES: dict[str, dict[str, Any]] = {
    "one sample": {"policy": "best-of", "n": 1},
    f"vote of {_SAMPLES}": {
        "policy": "vote",
        "n": _SAMPLES,
        "extract": lambda text: extract_number(text.text),
    },
    f"best of {_SAMPLES}, the likeliest": {"policy": "best-of", "n": _SAMPLES},
    f"best of {_SAMPLES}, asked yes or no": {"policy": "best-of", "n": _SAMPLES, "judge": "ask"},
    _FORCED: {
        "policy": "think",
        "max_thinking": _MAX_REASONING,
        "max_tokens": _MAX_REASONING + _TAGS + 12,
    },
}


@dataclass(frozen=True)
class Sum:
    """A sum of two numbers."""

    a: int
    b: int

    def prompt(self, thinking: bool = False) -> str:
        """Return the prompt, after two examples; with `thinking`, without a started answer."""
        start = "" if thinking else f" {self.a} + {self.b} ="
        return f"{_EXAMPLES}Q: What is {self.a} + {self.b}?\nA:{start}"

    def is_right(self, text: str) -> bool:
        """Return whether a text gives the correct answer."""
        return extract_number(text) == str(self.a + self.b)


@dataclass(frozen=True)
class SumResult:
    """Accuracy and cost of one decoding policy."""

    name: str
    right: int
    count: int
    tokens: int  # computed
    seconds: float

    def figure(self, baseline: SumResult) -> Figure:
        """Return the share of correct answers, with the cost relative to `baseline`."""
        tokens = self.tokens / self.count
        why = f"{tokens:.0f} tokens and {self.seconds / self.count:.2f} s per sum"
        if self is not baseline:
            token_ratio = tokens * baseline.count / baseline.tokens
            time_ratio = self.seconds / self.count * baseline.count / baseline.seconds
            why += f": {token_ratio:.1f}× and {time_ratio:.1f}× those of {baseline.name}"
        return share_figure(
            f"sums right, {self.name}", self.right, self.count, better="higher", why=why
        )


def make_sums(count: int) -> list[Sum]:
    """Return `count` different small sums."""
    return [Sum(2 + number * 7 % 9, 1 + number * 5 % 8) for number in range(count)]


def sum_figures(
    lm: LanguageModel,
    problems: Sequence[Sum],
    ways: Sequence[str],
    seed: int,
    tell: Callable[[float], object],
) -> tuple[list[Figure], list[str]]:
    """Return a figure for each policy, and error messages of those that failed."""
    results: list[SumResult] = []
    failed: list[str] = []
    for number, name in enumerate(ways):
        try:
            results.append(answer_sums(lm, name, problems, seed))
        except UnspoolError as error:  # a context that is too short, a model without a template
            failed.append(f"{name}: {error}")
        tell((number + 1) / len(ways))
    return [result.figure(results[0]) for result in results], failed


def answer_sums(lm: LanguageModel, name: str, problems: Sequence[Sum], seed: int) -> SumResult:
    """Answer all sums with one policy. Prefill is not measured."""
    right = tokens = 0
    seconds = 0.0
    for problem in problems:
        prompt = encode_with_start(lm, problem.prompt(thinking=name == _FORCED))
        lm.generate(prompt, max_tokens=1)
        started = perf_counter()
        options = {"max_tokens": _ANSWER_TOKENS, **POLICIES[name]}
        result = lm.think(prompt, budget=None, seed=seed, progress=False, **options)
        seconds += perf_counter() - started
        right += problem.is_right(result.text)
        tokens += result.spent.written + result.spent.judged
    return SumResult(name, right, len(problems), tokens, seconds)
