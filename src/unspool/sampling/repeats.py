"""Stages against repetition: no-repeat n-gram bans it, DRY penalizes it."""

from __future__ import annotations

import math

import numpy as np

from unspool.sampling.candidates import Candidates
from unspool.sampling.penalties import ban
from unspool.sampling.rows import Rows, Tokens
from unspool.sampling.settings import SamplingSettings


class NoRepeatNgram:
    """Bans tokens that would complete an n-gram that occurred before."""

    name = "no_repeat_ngram"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        pairs: list[tuple[int, int]] = []
        for row, history in enumerate(rows.histories):
            size = rows.settings[row].no_repeat_ngram
            pairs += [(row, token) for token in ngram_completions(history, size)]
        return ban(candidates, pairs)


def ngram_completions(history: Tokens, size: int) -> list[int]:
    """Tokens that followed earlier occurrences of the last size-1 tokens."""
    starts = len(history) - size + 1
    if starts <= 0:
        return []
    match = np.ones(starts, bool)
    for offset in range(size - 1):
        match &= history[offset : offset + starts] == history[starts + offset]
    completions: list[int] = np.unique(history[size - 1 :][match]).tolist()
    return completions


class Dry:
    """Subtracts multiplier · base^(n - allowed) from tokens that would extend a repeat of length n.

    n is the number of tokens before it that also precede an earlier occurrence of the token. If
    several repeats end in the same token, the longest counts. Repeats do not extend across a
    sequence breaker, and a breaker of one token is never penalized.
    """

    name = "dry"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row: list[int] = []
        token: list[int] = []
        penalty: list[float] = []
        for number, history in enumerate(rows.histories):
            for token_id, amount in dry_penalties(history, rows.settings[number]).items():
                if 0 <= token_id < candidates.vocabulary:
                    row.append(number)
                    token.append(token_id)
                    penalty.append(amount)
        pairs = np.array(row, np.int64), np.array(token, np.int64)
        return candidates.revise(*pairs, (np.array(penalty),), lambda x, p: x - p)


_MAX_PENALTY = 1e30  # finite in float32 and larger than any logit


def dry_penalties(history: Tokens, settings: SamplingSettings) -> dict[int, float]:
    """Penalty of each token that would extend a repeat."""
    if settings.dry_window >= 0:
        history = history[max(0, len(history) - settings.dry_window) :]
    allowed = settings.dry_allowed_length
    max_repeat = min(len(history), _since_breaker(history, settings.dry_breakers))
    if len(history) <= allowed or max_repeat < allowed:
        return {}
    log_base = math.log(settings.dry_base)
    log_max_penalty = math.log(_MAX_PENALTY / settings.dry_multiplier)
    # The penalty is capped: longer repeats need not be followed.
    max_length = (
        allowed + math.ceil(max(0.0, log_max_penalty) / log_base) if log_base > 0 else allowed
    )
    breaker_tokens = {breaker[0] for breaker in settings.dry_breakers if len(breaker) == 1}
    penalties: dict[int, float] = {}
    for token, length in _repeats(history, min(max_repeat, max_length)).items():
        if length >= allowed and token not in breaker_tokens:
            power = min((length - allowed) * log_base, log_max_penalty)
            penalties[token] = settings.dry_multiplier * math.exp(power)
    return penalties


def _repeats(history: Tokens, max_length: int) -> dict[int, int]:
    """Length of the repeat that each token would extend."""
    ends = np.flatnonzero(history[:-1] == history[-1])  # earlier positions of the last token
    lengths: dict[int, int] = {}
    length = 0
    while ends.size and length < max_length:
        length += 1
        lengths.update(dict.fromkeys(history[ends + 1].tolist(), length))
        ends = ends[ends >= length]
        if length < len(history):
            ends = ends[history[ends - length] == history[-1 - length]]
    return lengths


def _since_breaker(history: Tokens, breakers: tuple[tuple[int, ...], ...]) -> int:
    """Number of tokens after the last sequence breaker."""
    since = len(history)
    for breaker in breakers:
        starts = len(history) - len(breaker) + 1
        if starts <= 0:
            continue
        match = np.ones(starts, bool)
        for offset, token in enumerate(breaker):
            match &= history[offset : offset + starts] == token
        matches = np.flatnonzero(match)
        if matches.size:
            since = min(since, len(history) - (int(matches[-1]) + len(breaker)))
    return since
