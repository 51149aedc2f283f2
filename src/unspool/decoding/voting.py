"""Extract answers from texts and count them, with equal or weighted votes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from unspool.decoding.written import mean_logprob
from unspool.engine.generation import Generation
from unspool.errors import SettingsError, UnspoolError

Extract = str | re.Pattern[str] | Callable[[Generation], Hashable | None]
Find = Callable[[Generation], Hashable | None]


def answer_finder(extract: Extract) -> Find:
    """Build the function that extracts a text's answer: the caller's, or the last match of a
    pattern (its first group, if any). It returns None if the text has no answer."""
    if callable(extract):
        return lambda text: _call_extract(extract, text)
    try:
        pattern = re.compile(extract)
    except (re.error, TypeError) as error:
        raise SettingsError(f"extract is not a valid pattern: {error}") from error

    def last_match(text: Generation) -> str | None:
        matches = list(pattern.finditer(text.text))
        answer = matches[-1][1 if pattern.groups else 0] if matches else None
        return None if answer is None else answer.strip()

    return last_match


def _call_extract(
    extract: Callable[[Generation], Hashable | None], text: Generation
) -> Hashable | None:
    try:
        answer = extract(text)
        hash(answer)  # answers are dictionary keys
    except Exception as error:
        raise UnspoolError(f"extract raised {type(error).__name__}: {error}") from error
    return answer


_ANSWER_PATTERNS = (
    re.compile(r"\\boxed\{([^{}]*)\}"),
    re.compile(r"####\s*(\S.*)"),  # as GSM8K ends its answers
    re.compile(r"(?i)\banswer\s*(?:is|:|=)\s*\**\s*([^\n]*[^\s.*])"),
    re.compile(r"-?\d[\d,]*(?:\.\d+)?"),
)


def final_answer(text: Generation) -> str | None:
    """Default answer extraction: a boxed answer, the text after "answer is" or ####, else the last
    number, else the last line."""
    for pattern in _ANSWER_PATTERNS:
        if matches := list(pattern.finditer(text.text)):
            answer = matches[-1][1 if pattern.groups else 0].strip().rstrip(".")
            number = answer.lstrip("$").replace(",", "")
            return number if re.fullmatch(r"-?\d+(\.\d+)?", number) else answer
    lines = text.text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def tally(
    texts: Sequence[Generation],
    answers: Sequence[Hashable | None],
    weights: Sequence[float] | None = None,
) -> dict[Hashable, float]:
    """Votes per answer, highest first; texts without an answer do not vote. Ties go to the answer
    with the likeliest text."""
    votes: dict[Hashable, float] = defaultdict(float)
    likeliest: dict[Hashable, float] = {}
    vote_weights = [1.0] * len(texts) if weights is None else weights
    for text, answer, weight in zip(texts, answers, vote_weights, strict=True):
        if answer is not None:
            votes[answer] += weight
            likeliest[answer] = max(likeliest.get(answer, -float("inf")), mean_logprob(text))
    order = sorted(votes, key=lambda answer: (-votes[answer], -likeliest[answer]))
    return {answer: votes[answer] for answer in order}
