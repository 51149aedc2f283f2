"""All stages by name, and the interface of a stage.

A stage takes the candidates of all rows and returns the remaining ones, or the same with other
logits. It does not modify its input (but `revise` may overwrite the private copy of another
`revise`: `Candidates.is_scratch`), has no state, and treats each row independently.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from unspool.errors import SettingsError
from unspool.sampling.arrays import Array
from unspool.sampling.candidates import INF, SLACK, Candidates
from unspool.sampling.draw import XTC_STREAM
from unspool.sampling.rows import Rows, Tokens
from unspool.sampling.settings import SamplingSettings

# -- Stages that change single tokens: penalties, bias and bans


class RepetitionPenalty:
    """Divides positive logits of tokens that occurred by the penalty, multiplies negative ones.

    (Keskar et al. 2019, with the usual correction for negative logits.)
    """

    name = "repetition_penalty"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row, token, _ = rows.counts(candidates.vocabulary)
        penalty = np.array([s.repetition_penalty for s in rows.settings])[row]
        where = candidates.ops.where
        return candidates.revise(row, token, (penalty,), lambda x, p: where(x > 0, x / p, x * p))


class FrequencyPenalty:
    """Subtracts the penalty from a token's logit for each occurrence."""

    name = "frequency_penalty"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row, token, count = rows.counts(candidates.vocabulary)
        amount = np.array([s.frequency_penalty for s in rows.settings])[row] * count
        return candidates.revise(row, token, (amount,), lambda x, p: x - p)


class PresencePenalty:
    """Subtracts the penalty once from the logit of each token that occurred."""

    name = "presence_penalty"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        row, token, _ = rows.counts(candidates.vocabulary)
        amount = np.array([s.presence_penalty for s in rows.settings])[row]
        return candidates.revise(row, token, (amount,), lambda x, p: x - p)


class LogitBias:
    """Adds to the logits of chosen tokens. -inf bans a token; with +inf only these remain."""

    name = "logit_bias"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        size = candidates.vocabulary
        row: list[int] = []
        token: list[int] = []
        bias: list[float] = []
        forced: list[tuple[int, int]] = []
        for number, settings in enumerate(rows.settings):
            for token_id, amount in settings.logit_bias.items():
                if token_id >= size:
                    raise SettingsError(
                        f"logit_bias has token {token_id}; the largest token id is {size - 1}"
                    )
                if amount == math.inf:
                    forced.append((number, token_id))
                else:
                    row.append(number)
                    token.append(token_id)
                    bias.append(amount)
        if forced:
            candidates = keep_only(candidates, forced)
        row_index = np.array(row, np.int64), np.array(token, np.int64)
        return candidates.revise(*row_index, (np.array(bias),), lambda x, b: x + b)


class Forbidden:
    """Bans `RowInput.forbidden`."""

    name = "forbidden"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        pairs = {(n, int(t)) for n, row in enumerate(rows.inputs) for t in row.forbidden}
        return ban(candidates, sorted(pairs))


class Allowed:
    """Keeps only the tokens that the grammar allows (`RowInput.allowed`)."""

    name = "grammar"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops, width = candidates.ops, candidates.vocabulary
        masks = {n: row.allowed for n, row in enumerate(rows.inputs) if row.allowed is not None}
        padded = np.zeros((len(masks), width), bool)
        for padded_row, mask in zip(padded, masks.values(), strict=True):
            padded_row[: mask.size] = mask[:width]
        row_index = np.array(list(masks), np.int64)
        if candidates.ids is not None:
            padded = np.take_along_axis(padded, ops.to_numpy(candidates.ids)[row_index], axis=-1)
        allowed = ops.to_array_like(padded, candidates.logits)
        if len(masks) == candidates.rows:
            return candidates.with_logits(ops.where(allowed, candidates.logits, -INF))
        logits = ops.copy(candidates.logits)  # other rows do not change
        where = ops.to_array_like(row_index, logits)
        logits[where] = ops.where(allowed, logits[where], -INF)
        return candidates.with_logits(logits)


def _set_minus_inf(logits: Array) -> Array:
    logits[:] = -INF
    return logits


def ban(candidates: Candidates, pairs: list[tuple[int, int]]) -> Candidates:
    """Remove distinct (row, token) pairs; tokens outside the vocabulary are ignored."""
    row_index = np.array(pairs, np.int64).reshape(-1, 2)
    row_index = row_index[(row_index[:, 1] >= 0) & (row_index[:, 1] < candidates.vocabulary)]
    return candidates.revise(row_index[:, 0], row_index[:, 1], (), _set_minus_inf)


def keep_only(candidates: Candidates, pairs: list[tuple[int, int]]) -> Candidates:
    """Remove all tokens but these (row, token) pairs, in the rows that occur in them."""
    row_index = np.array(pairs, np.int64).reshape(-1, 2)
    rows = np.zeros((candidates.rows, 1), bool)
    rows[row_index[:, 0]] = True
    allowed = np.zeros((candidates.rows, candidates.vocabulary), bool)
    allowed[row_index[:, 0], row_index[:, 1]] = True
    if candidates.ids is not None:
        allowed = np.take_along_axis(allowed, candidates.ops.to_numpy(candidates.ids), axis=-1)
    mask = candidates.ops.to_array_like(allowed | ~rows, candidates.logits)
    return candidates.with_logits(candidates.ops.where(mask, candidates.logits, -INF))


# -- Stages against repetition: no-repeat n-gram bans it, DRY penalizes it


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


# -- Stages that remove candidates

FIRST_CANDIDATES = 128
"""Number of most likely candidates that are sorted first."""
GROWTH = 8
"""Factor by which it grows if these are not enough."""


class TopK:
    """Keeps the k most likely; ties are broken by lower id."""

    name = "top_k"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        counts = [s.top_k for s in rows.settings]
        truncated = candidates.top(max(counts))
        if min(counts) == max(counts):
            return truncated
        return truncated.first_n(rows.column("top_k", truncated.logits)[:, 0])


class TopP:
    """Keeps the smallest set of most likely candidates whose mass reaches p."""

    name = "top_p"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        stats = candidates.softmax_stats()
        goal = rows.column("top_p", stats.total) * (1 - SLACK) * stats.total
        width = candidates.logits.shape[-1]
        count = width if candidates.is_sorted else FIRST_CANDIDATES
        while True:
            truncated, _, running = candidates.cumulative(count)
            if count >= width or bool((running[:, -1:] >= goal).all()):
                return truncated.first_n(ops.count(running < goal) + 1)
            count *= GROWTH


class MinP:
    """Keeps candidates with at least min_p times the top probability."""

    name = "min_p"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        peak = candidates.peak()
        return candidates.at_or_above(peak + candidates.ops.log(rows.column("min_p", peak)))


class Eta:
    """Keeps p ≥ min(ε, √ε · e^-H), H being the entropy. (Hewitt et al. 2022)"""

    name = "eta"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        stats = candidates.softmax_stats(entropy=True)
        log_epsilon = ops.log(rows.column("eta", stats.peak))
        log_bound = ops.minimum(log_epsilon, 0.5 * log_epsilon - stats.entropy)
        return candidates.at_or_above(stats.peak + ops.log(stats.total) + log_bound)


class TopNSigma:
    """Keeps logits within n standard deviations of the largest."""

    name = "top_n_sigma"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        peak = candidates.peak()
        mask = candidates.logits > -INF
        if candidates.ids is None:
            variance = ops.variance(candidates.logits, mask)
        else:
            num_candidates = ops.to_array_like(ops.count(mask), peak)[:, None]
            mean = ops.where(mask, candidates.logits, 0.0).cumsum(-1)[:, -1:] / num_candidates
            square = ops.where(mask, candidates.logits - mean, 0.0) ** 2
            variance = square.cumsum(-1)[:, -1:] / num_candidates
        return candidates.at_or_above(peak - rows.column("top_n_sigma", peak) * variance**0.5)


class Typical:
    """Keeps candidates whose surprisal is nearest the entropy, until their mass reaches p.

    (Meister et al. 2022)
    """

    name = "typical_p"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        candidates = candidates if candidates.sorted_by_id else candidates.sort_by_logit()
        stats = candidates.softmax_stats(entropy=True)
        typical_logit = stats.peak + ops.log(stats.total) - stats.entropy
        closeness = -abs(ops.to_float64(candidates.logits) - typical_logit)
        goal = rows.column("typical_p", stats.total) * (1 - SLACK) * stats.total
        width = candidates.logits.shape[-1]
        count = FIRST_CANDIDATES
        while True:
            _, columns = ops.largest(closeness, count)
            nearest = ops.to_float64(ops.take_columns(candidates.logits, columns))
            weights = ops.exp(nearest - stats.peak)
            running = weights.cumsum(-1)
            if count >= width or bool((running[:, -1:] >= goal).all()):
                return candidates.select(columns, running - weights < goal)
            count *= GROWTH


class Xtc:
    """Exclude top choices: with a probability, drops all with p ≥ threshold but the least likely.

    Its random number has another stream than that of the token.
    """

    name = "xtc"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        candidates = candidates if candidates.sorted_by_id else candidates.sort_by_logit()
        stats = candidates.softmax_stats()
        random = ops.to_array_like(rows.uniform(XTC_STREAM), stats.peak)[:, None]
        is_active = random < rows.column("xtc_probability", stats.peak)
        threshold = ops.log(rows.column("xtc_threshold", stats.peak))
        bound = stats.peak + ops.log(stats.total) + threshold - SLACK
        logits = candidates.logits
        is_top = (logits >= ops.to_array_like(bound, logits)) & (logits > -INF) & is_active
        lowest = ops.amin(ops.where(is_top, logits, INF))
        kept_column = ops.last_true(is_top & (logits == lowest))[:, None]
        is_dropped = is_top & (ops.column_index(logits) != kept_column)
        return candidates.with_logits(ops.where(is_dropped, -INF, logits))


class Mirostat:
    """Mirostat v2: keeps candidates whose surprisal in bits is at most mu.

    Mu is adjusted after each token so that the mean surprisal stays near tau: `mirostat_next`.
    """

    name = "mirostat"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        stats = candidates.softmax_stats()
        mu = ops.to_array_like(rows.mirostat_mu(), stats.peak)
        return candidates.at_or_above(stats.peak + ops.log(stats.total) - mu * math.log(2))


def mirostat_next(mu: float, probability: float, tau: float, eta: float) -> float:
    """Mu for the next token: mu - eta · (surprisal of the pick - tau).

    The surprisal is that after truncation, as in llama.cpp, so that tau has the same meaning.
    """
    return mu - eta * (-math.log2(probability) - tau)


# -- Temperature stages: fixed and dynamic

_MIN_TEMPERATURE = 1e-6
"""Lower bound of the temperature: below it only the best candidates (ties) have probability, and
dividing by less would overflow."""


class Temperature:
    """Divides the logits by the temperature. (At 0 the chain is greedy and skips this.)"""

    name = "temperature"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        return apply_temperature(candidates, rows.column("temperature", candidates.logits))


class DynamicTemperature:
    """Temperature between T - range and T + range: lower if the model is more certain.

    T_min + (T_max - T_min) · (entropy / maximum entropy)^exponent, over the remaining candidates; a
    row with one candidate does not change.
    """

    name = "dynamic_temperature"

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates:
        ops = candidates.ops
        entropy = candidates.softmax_stats(entropy=True).entropy
        num_candidates = ops.to_float64(candidates.remaining()[:, None])
        has_several = num_candidates > 1
        max_entropy = ops.log(ops.where(has_several, num_candidates, 2.0))
        center = rows.column("temperature", entropy)
        span = rows.column("dynatemp_range", entropy)
        minimum = ops.clamp_min(center - span, 0.0)
        uncertainty = ops.clamp_min(entropy, 0.0) / max_entropy
        fraction = uncertainty ** rows.column("dynatemp_exponent", entropy)
        temperature = minimum + (center + span - minimum) * fraction
        temperature = ops.where(has_several, temperature, 1.0)
        return apply_temperature(candidates, ops.to_array_like(temperature, candidates.logits))


def apply_temperature(candidates: Candidates, temperature: Array) -> Candidates:
    divisor = candidates.ops.clamp_min(temperature, _MIN_TEMPERATURE)
    return candidates.with_logits(candidates.logits / divisor, is_sorted=candidates.is_sorted)


class Stage(Protocol):
    """One step of the chain, for all rows of a batch."""

    @property
    def name(self) -> str: ...

    def apply(self, candidates: Candidates, rows: Rows) -> Candidates: ...


_ALL: tuple[Stage, ...] = (
    RepetitionPenalty(),
    FrequencyPenalty(),
    PresencePenalty(),
    NoRepeatNgram(),
    Dry(),
    LogitBias(),
    TopNSigma(),
    TopK(),
    Typical(),
    Eta(),
    TopP(),
    MinP(),
    Xtc(),
    DynamicTemperature(),
    Temperature(),
    Mirostat(),
)
STAGES: dict[str, Stage] = {stage.name: stage for stage in _ALL}
