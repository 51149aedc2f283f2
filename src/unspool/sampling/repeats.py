"""Stages against runs that repeat: no-repeat n-gram forbids them, DRY makes them dear."""

from __future__ import annotations

import math

import numpy as np

from unspool.sampling.candidates import Candidates
from unspool.sampling.penalties import ban
from unspool.sampling.rows import Rows, Tokens
from unspool.sampling.settings import SamplingSettings


class NoRepeatNgram:
    """Forbids every token that would complete a run of n tokens that occurred before."""

    name = "no_repeat_ngram"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        pairs: list[tuple[int, int]] = []
        for row, history in enumerate(rows.histories):
            size = rows.settings[row].no_repeat_ngram
            pairs += [(row, token) for token in ngram_completions(history, size)]
        return ban(candidates, pairs)


def ngram_completions(history: Tokens, size: int) -> list[int]:
    """The tokens that followed where the last size-1 tokens stood before."""
    starts = len(history) - size + 1
    if starts <= 0:
        return []
    match = np.ones(starts, bool)
    for offset in range(size - 1):
        match &= history[offset : offset + starts] == history[starts + offset]
    completions: list[int] = np.unique(history[size - 1 :][match]).tolist()
    return completions


class Dry:
    """Subtracts multiplier · base^(n - allowed) from a token that would extend a repeat of n.

    n counts the tokens before it that already stood before that token elsewhere. Where several
    repeats end in the same token, the longest counts. No repeat reaches across a breaker, and a
    breaker of one token is never punished itself.
    """

    name = "dry"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row: list[int] = []
        token: list[int] = []
        penalty: list[float] = []
        for number, history in enumerate(rows.histories):
            for extends, amount in dry_penalties(history, rows.settings[number]).items():
                if 0 <= extends < candidates.vocabulary:
                    row.append(number)
                    token.append(extends)
                    penalty.append(amount)
        place = np.array(row, np.int64), np.array(token, np.int64)
        return candidates.revise(*place, (np.array(penalty),), lambda x, by: x - by)


_LARGEST_PENALTY = 1e30  # finite in float32 and far beyond any logit


def dry_penalties(history: Tokens, settings: SamplingSettings) -> dict[int, float]:
    """What to subtract from which token."""
    if settings.dry_window >= 0:
        history = history[max(0, len(history) - settings.dry_window) :]
    allowed = settings.dry_allowed_length
    reach = min(len(history), _since_breaker(history, settings.dry_breakers))
    if len(history) <= allowed or reach < allowed:
        return {}
    log_base = math.log(settings.dry_base)
    log_most = math.log(_LARGEST_PENALTY / settings.dry_multiplier)
    # From this length on a longer repeat costs no more, and need not be followed further.
    longest = allowed + math.ceil(max(0.0, log_most) / log_base) if log_base > 0 else allowed
    harmless = {run[0] for run in settings.dry_breakers if len(run) == 1}
    penalties: dict[int, float] = {}
    for token, length in _repeats(history, min(reach, longest)).items():
        if length >= allowed and token not in harmless:
            power = min((length - allowed) * log_base, log_most)
            penalties[token] = settings.dry_multiplier * math.exp(power)
    return penalties


def _repeats(history: Tokens, longest: int) -> dict[int, int]:
    """For each token that would extend a repeat of the ending: how long that repeat is by now."""
    ends = np.flatnonzero(history[:-1] == history[-1])  # where a repeat of the ending could end
    found: dict[int, int] = {}
    length = 0
    while ends.size and length < longest:
        length += 1
        found.update(dict.fromkeys(history[ends + 1].tolist(), length))
        ends = ends[ends >= length]
        if length < len(history):
            ends = ends[history[ends - length] == history[-1 - length]]
    return found


def _since_breaker(history: Tokens, breakers: tuple[tuple[int, ...], ...]) -> int:
    """How many tokens came after the last breaker."""
    since = len(history)
    for run in breakers:
        starts = len(history) - len(run) + 1
        if starts <= 0:
            continue
        match = np.ones(starts, bool)
        for offset, token in enumerate(run):
            match &= history[offset : offset + starts] == token
        found = np.flatnonzero(match)
        if found.size:
            since = min(since, len(history) - (int(found[-1]) + len(run)))
    return since
