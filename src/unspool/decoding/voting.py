"""Answers found in texts, and counted: what most texts say, each with one vote or with a weight."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from unspool.decoding.written import mean_logprob
from unspool.engine.generation import Generation
from unspool.errors import SettingsError, UnspoolError

Extract = str | re.Pattern[str] | Callable[[Generation], Hashable | None]
Find = Callable[[Generation], Hashable | None]


def finder(extract: Extract) -> Find:
    """What finds a text's answer: a caller's function, or the last match of a pattern (its first
    group, if it has groups). None: the text has no answer."""
    if callable(extract):
        return lambda text: _asked(extract, text)
    try:
        pattern = re.compile(extract)
    except (re.error, TypeError) as error:
        raise SettingsError(f"extract is not a pattern that can be used: {error}") from error

    def last_match(text: Generation) -> str | None:
        found = list(pattern.finditer(text.text))
        answer = found[-1][1 if pattern.groups else 0] if found else None
        return None if answer is None else answer.strip()

    return last_match


def _asked(extract: Callable[[Generation], Hashable | None], text: Generation) -> Hashable | None:
    try:
        answer = extract(text)
        hash(answer)  # answers are counted, so they must be hashable
    except Exception as error:
        raise UnspoolError(f"extract raised {type(error).__name__}: {error}") from error
    return answer


_SAID = (
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"####\s*(\S.*)"),  # as GSM8K ends its answers
    re.compile(r"(?i)\banswer\s*(?:is|:|=)\s*\**\s*([^\n]*[^\s.*])"),
    re.compile(r"-?\d[\d,]*(?:\.\d+)?"),
)


def final_answer(text: Generation) -> str | None:
    """What a text seems to answer, where nobody said how to find it: what is boxed, what stands
    behind "answer is" or ####, else its last number, else its last line."""
    for pattern in _SAID:
        if found := list(pattern.finditer(text.text)):
            answer = found[-1][1 if pattern.groups else 0].strip().rstrip(".")
            number = answer.lstrip("$").replace(",", "")
            return number if re.fullmatch(r"-?\d+(\.\d+)?", number) else answer
    lines = text.text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def tally(
    texts: Sequence[Generation],
    answers: Sequence[Hashable | None],
    weights: Sequence[float] | None = None,
) -> dict[Hashable, float]:
    """The votes for each answer, most votes first; texts without an answer do not vote. Of answers
    with equally many, the one with the likeliest text comes first."""
    votes: dict[Hashable, float] = defaultdict(float)
    likeliest: dict[Hashable, float] = {}
    given = [1.0] * len(texts) if weights is None else weights
    for text, answer, weight in zip(texts, answers, given, strict=True):
        if answer is not None:
            votes[answer] += weight
            likeliest[answer] = max(likeliest.get(answer, -float("inf")), mean_logprob(text))
    order = sorted(votes, key=lambda answer: (-votes[answer], -likeliest[answer]))
    return {answer: votes[answer] for answer in order}
