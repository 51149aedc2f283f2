"""The sampling chain: logits of a batch through each row's stages to one token per row.

    chain = Chain([settings_of_row_0, settings_of_row_1])          # once for a batch
    picks = chain.pick(logits, [RowInput(history), ...], top=5, explain=True)

Rows that use the same stages run together. A row's pick is bit-identical alone and in any batch.
Observation (`top`, `explain`) reads the arrays of the same run and does not change the pick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from unspool.errors import SettingsError
from unspool.sampling.arrays import Array, array_operations
from unspool.sampling.candidates import (
    INF,
    ROW_ERRORS,
    BadLogitsError,
    Candidates,
    NoCandidateError,
)
from unspool.sampling.draw import TOKEN_STREAM, sample_index
from unspool.sampling.rows import RowInput, Rows, RowSettings, StageState, Tokens
from unspool.sampling.settings import EDITING_STAGES, CustomStage, SamplingSettings
from unspool.sampling.stages import STAGES, Allowed, Forbidden, Stage, mirostat_next

# -- Results of the chain: the picked token, its probabilities and, if requested, stage reports


@dataclass(frozen=True, slots=True)
class Draw:
    """The random number, and the interval of [0,1) of the picked token."""

    u: float  # the random number, 0 <= u < 1
    low: float  # start of the token's interval
    high: float  # end of the token's interval


class Candidate(NamedTuple):
    """A likely token, before and after the stages.

    (A tuple because dozens are made per step, and a dataclass takes three times as long.)
    """

    token: int
    logprob: float  # of the model, before any stage
    probability: float  # after all stages; 0 if removed


@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage did to one row."""

    name: str  # of the stage, as in the option `stages`
    kept: int  # candidates that remain
    removed: int  # candidates that it removed
    kept_mass: float  # probability mass, before the stage, of the kept candidates
    changed: int  # remaining candidates with another logit
    top: tuple[tuple[int, float], ...]  # most likely tokens after it: (token, probability)

    def __repr__(self) -> str:
        return (
            f"<StageReport {self.name}: kept {self.kept}, removed {self.removed} with "
            f"{self.removed_mass:.3g} of the probability, changed {self.changed}>"
        )

    @property
    def removed_mass(self) -> float:
        """Probability mass, before the stage, of the removed candidates."""
        return max(0.0, 1.0 - self.kept_mass)


@dataclass(frozen=True, slots=True)
class Pick:
    """One picked token.

    `logprob`, `rank` (0: most likely) and `entropy` (nats) are the model's, before any stage;
    `probability` is the token's after all stages. `draw` is None for greedy decoding. `state` must
    be passed with the next token of the same sequence.
    """

    token: int
    logprob: float
    rank: int
    entropy: float
    probability: float
    draw: Draw | None
    state: StageState | None = None
    candidates: tuple[Candidate, ...] = ()
    stages: tuple[StageReport, ...] = ()

    @property
    def margin(self) -> float:
        """Difference between the two largest probabilities of the model; needs two candidates."""
        best = [math.exp(candidate.logprob) for candidate in self.candidates[:2]]
        return best[0] - best[1] if len(best) > 1 else best[0]


Ints = np.ndarray[Any, np.dtype[np.int64]]

REPORT_TOP = 8
"""Number of most likely tokens in a stage report."""


def report(name: str, before: Candidates, after: Candidates) -> list[StageReport]:
    """Report what a stage did to each row."""
    host, stats_after = after.ops.to_numpy, after.softmax_stats()
    num_kept = host(after.remaining())
    removed = host(before.remaining()) - num_kept
    logits_before = _logits_before(before, after)
    changed = _changed(logits_before, before, after, removed)
    masses = _kept_masses(logits_before, before, after, removed, changed)
    most_likely, weights, _ = after.cumulative(REPORT_TOP)
    tokens, probabilities = (
        host(most_likely.ids).tolist(),
        host(weights / stats_after.total).tolist(),
    )
    columns = (num_kept.tolist(), removed.tolist(), masses, changed.tolist())
    tops = [
        tuple(pair for pair in zip(*row, strict=True) if pair[1] > 0)
        for row in zip(tokens, probabilities, strict=True)
    ]
    return [StageReport(name, *numbers) for numbers in zip(*columns, tops, strict=True)]


def _logits_before(before: Candidates, after: Candidates) -> Array:
    """Logits before the stage of the candidates after it, column by column."""
    if before.ids is after.ids:
        return before.logits
    if before.ids is None:
        return before.ops.take_columns(before.logits, after.ids)
    width = after.logits.shape[-1]
    if width <= before.logits.shape[-1] and bool((before.ids[:, :width] == after.ids).all()):
        return before.logits[:, :width]
    ops, host = before.ops, before.ops.to_numpy
    columns_of = []
    for ids, targets in zip(host(before.ids), host(after.ids), strict=True):
        order = np.argsort(ids, kind="stable")  # padding repeats an id: use the first
        columns_of.append(order[np.searchsorted(ids[order], targets).clip(max=ids.size - 1)])
    return ops.take_columns(before.logits, ops.to_array_like(np.array(columns_of), before.logits))


def _changed(logits_before: Array, before: Candidates, after: Candidates, removed: Ints) -> Ints:
    """Number of remaining candidates of each row with another logit."""
    differ = logits_before != after.logits
    if logits_before is before.logits:  # same columns: removed candidates differ too
        return after.ops.to_numpy(after.ops.count(differ)) - removed
    return after.ops.to_numpy(after.ops.count(differ & (after.logits > -INF)))


def _kept_masses(
    logits_before: Array, before: Candidates, after: Candidates, removed: Ints, changed: Ints
) -> list[float]:
    """Probability mass before the stage of the remaining candidates; exactly 1 if all remain."""
    if not removed.any():
        return [1.0] * after.rows
    ops, stats_before, stats_after = after.ops, before.softmax_stats(), after.softmax_stats()
    # If a row's logits did not change, the sum over the remaining is known already.
    mass = ops.to_numpy(
        stats_after.total * ops.exp(stats_after.peak - stats_before.peak) / stats_before.total
    )[:, 0]
    if (changed > 0).any():
        weights = ops.exp(ops.to_float64(logits_before) - stats_before.peak)
        sums = ops.where(after.logits > -INF, weights, 0.0).cumsum(-1)[:, -1:] / stats_before.total
        mass = np.where(changed > 0, ops.to_numpy(sums)[:, 0], mass)
    masses: list[float] = np.where(removed > 0, mass.clip(max=1.0), 1.0).tolist()
    return masses


def final_probabilities(candidates: Candidates, tokens: Array) -> np.ndarray[Any, Any]:
    """Probabilities of tokens [rows, n] among the candidates; 0 for removed ones."""
    ops, stats = candidates.ops, candidates.softmax_stats()
    if candidates.ids is None:
        logits = ops.to_float64(ops.take_columns(candidates.logits, tokens))
        return ops.to_numpy(ops.exp(logits - stats.peak) / stats.total)
    weights, ids, targets = (
        ops.to_numpy(stats.weights),
        ops.to_numpy(candidates.ids),
        ops.to_numpy(tokens),
    )
    masses = [weights[row] @ (ids[row][:, None] == targets[row]) for row in range(len(ids))]
    return np.asarray(np.array(masses) / ops.to_numpy(stats.total))


_FIRST_CANDIDATES = 64  # number of most likely candidates that are sorted first ...
_GROWTH = 16  # ... and how much it grows if the draw is beyond them
_MAX_SORT = 256  # up to this many candidates are all sorted
_ALLOWED = Allowed()
_FORBIDDEN = Forbidden()
_NO_INPUT = RowInput()


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows whose settings use the same stages in the same order."""

    rows: tuple[int, ...]
    stages: tuple[Stage, ...]
    greedy: bool
    settings: RowSettings


class _SampledToken(NamedTuple):
    """The sampled token of a row."""

    token: int
    probability: float
    draw: Draw | None = None


class Chain:
    """Picks tokens for a batch of rows with different settings."""

    def __init__(self, settings: SamplingSettings | Sequence[SamplingSettings]) -> None:
        rows = (settings,) if isinstance(settings, SamplingSettings) else tuple(settings)
        self.settings = rows
        groups: dict[tuple[bool, tuple[str | CustomStage, ...]], list[int]] = {}
        for number, row in enumerate(rows):
            groups.setdefault((row.greedy, active_stages(row)), []).append(number)
        self._groups = [
            _Group(
                tuple(row_values),
                tuple(STAGES[stage] if isinstance(stage, str) else stage for stage in stages),
                greedy,
                RowSettings([rows[n] for n in row_values]),
            )
            for (greedy, stages), row_values in groups.items()
        ]

    def pick(
        self,
        logits: Array,
        rows: Sequence[RowInput] | None = None,
        *,
        top: int = 0,
        explain: bool = False,
    ) -> list[Pick]:
        """Pick one token for each row of logits [rows, vocabulary], numpy or torch.

        Args:
            top: number of most likely candidates to report.
            explain: whether to report what each stage did.
        """
        logits = array_operations(logits).prepare(logits)
        inputs = [_NO_INPUT] * len(self.settings) if rows is None else list(rows)
        if logits.ndim != 2 or logits.shape[0] != len(self.settings) or len(inputs) != len(logits):
            raise SettingsError(
                f"logits have the shape {tuple(logits.shape)} and there are {len(inputs)} row"
                f" inputs; this chain needs {len(self.settings)} rows"
            )
        picks: list[Pick] = [None] * len(inputs)  # type: ignore[list-item]
        with np.errstate(all="ignore"):
            for group in self._groups:
                is_all = len(group.rows) == len(inputs)
                part = logits if is_all else logits[list(group.rows)]
                try:
                    group_picks = self._pick_group(
                        group, part, [inputs[n] for n in group.rows], top, explain
                    )
                except ROW_ERRORS as error:
                    error.rows = tuple(group.rows[n] for n in error.rows)
                    raise
                for number, pick in zip(group.rows, group_picks, strict=True):
                    picks[number] = pick
        return picks

    def likeliest(
        self, logits: Array, rows: Sequence[RowInput], top: int
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.float64]]]:
        """The `top` most likely tokens of each row after all stages, and their probabilities.

        Both arrays are [rows, top]; where fewer tokens are left, the other probabilities are 0.
        """
        logits = array_operations(logits).prepare(logits)
        tokens = np.zeros((len(rows), top), np.int64)
        probabilities = np.zeros((len(rows), top))
        with np.errstate(all="ignore"):
            for group in self._groups:
                inputs = Rows(group.settings, [rows[n] for n in group.rows])
                final, _ = _run(group.stages, Candidates(logits[list(group.rows)]), inputs, False)
                best = final.top(min(1 if group.greedy else top, final.logits.shape[-1]))
                ids = final.ops.to_numpy(best.ids)
                chances = np.ones(ids.shape) if group.greedy else final_probabilities(final, ids)
                place = np.ix_(group.rows, range(ids.shape[1]))
                tokens[place], probabilities[place] = ids, chances
        return tokens, probabilities

    def pick_one(
        self, logits: Array, row: RowInput = _NO_INPUT, *, top: int = 0, explain: bool = False
    ) -> Pick:
        """`pick` for a single row: logits [vocabulary]."""
        return self.pick(logits.reshape(1, -1), [row], top=top, explain=explain)[0]

    def _pick_group(
        self, group: _Group, logits: Array, inputs: list[RowInput], top: int, explain: bool
    ) -> list[Pick]:
        model = Candidates(logits)
        try:
            stats = model.softmax_stats(entropy=True)
        except NoCandidateError as error:
            raise BadLogitsError("all logits of the model are -inf", error.rows) from None
        rows = Rows(group.settings, inputs)
        stages = group.stages
        if any(len(row.forbidden) for row in inputs):
            stages = (_FORBIDDEN, *stages)
        if any(row.allowed is not None for row in inputs):
            stages = (_ALLOWED, *stages)
        final, reports = _run(stages, model, rows, explain)
        sampled = _greedy(final) if group.greedy else _sample(final, rows)
        if explain and group.greedy:
            reports.append(report("greedy", final, final.top(1)))

        ops, host = model.ops, model.ops.to_numpy
        tokens = np.array([choice.token for choice in sampled])
        logit, rank = ops.logit_and_rank(model.logits, tokens)
        ranks = host(rank).tolist()
        logprob = host(logit - stats.peak - ops.log(stats.total))[:, 0].tolist()
        entropy = host(stats.entropy)[:, 0].tolist()
        candidates = _top_candidates(model, final, sampled, group.greedy, top) if top > 0 else None
        return [
            Pick(
                token=choice.token,
                logprob=logprob[n],
                rank=ranks[n],
                entropy=max(0.0, entropy[n]),
                probability=choice.probability,
                draw=choice.draw,
                state=next_state(rows.settings[n], inputs[n].state, choice.probability),
                candidates=() if candidates is None else candidates[n],
                stages=tuple(stage[n] for stage in reports if _concerns(stage[n], inputs[n])),
            )
            for n, choice in enumerate(sampled)
        ]


def active_stages(settings: SamplingSettings) -> tuple[str | CustomStage, ...]:
    """Stages that have an effect, in the user's order; greedy: only those that edit logits."""
    listed = (stage for stage in settings.stages if not settings.is_neutral(stage))
    if not settings.greedy:
        return tuple(listed)
    return tuple(
        stage for stage in listed if isinstance(stage, CustomStage) or stage in EDITING_STAGES
    )


def _concerns(stage: StageReport, row: RowInput) -> bool:
    """Whether a row has this stage, or only shares its group with rows that have it."""
    if stage.name == _ALLOWED.name:
        return row.allowed is not None
    return stage.name != _FORBIDDEN.name or len(row.forbidden) > 0


def _run(
    stages: tuple[Stage, ...], model: Candidates, rows: Rows, explain: bool
) -> tuple[Candidates, list[list[StageReport]]]:
    reports: list[list[StageReport]] = []
    candidates = model
    try:
        for stage in stages:
            before = candidates
            candidates = stage.apply(before, rows)
            if explain:
                candidates.is_scratch = False  # the next report reads it
                candidates.softmax_stats()
                reports.append(report(stage.name, before, candidates))
        candidates.peak()
    except NoCandidateError as error:
        raise NoCandidateError(
            f"no candidate token is left: {_emptying_stage(stages, model, rows)} removed the last"
            " one; relax the settings",
            error.rows,
        ) from None
    return candidates, reports


def _emptying_stage(stages: tuple[Stage, ...], candidates: Candidates, rows: Rows) -> str:
    """Name of the stage that removed a row's last candidate."""
    for stage in stages:
        try:
            candidates = stage.apply(candidates, rows)
            candidates.peak()
        except NoCandidateError:
            return stage.name
    return "none"


def _greedy(candidates: Candidates) -> list[_SampledToken]:
    columns = candidates.ops.first_max(candidates.logits)[:, None]
    ids = candidates.ids
    tokens = columns if ids is None else candidates.ops.take_columns(ids, columns)
    return [_SampledToken(token, 1.0) for token in candidates.ops.to_numpy(tokens)[:, 0].tolist()]


def _sample(candidates: Candidates, rows: Rows) -> list[_SampledToken]:
    """Sample from each row: find where its random number falls in the cumulative distribution.

    If many candidates remain, only the most likely are sorted, as long as that is enough.
    """
    host = candidates.ops.to_numpy
    width = candidates.logits.shape[-1]
    # Summed before sorting, because how many are sorted depends on the widest row.
    total = host(candidates.softmax_stats().total)[:, 0]
    random = rows.uniform(TOKEN_STREAM)
    target = random * total
    count = width if candidates.is_sorted or width <= _MAX_SORT else _FIRST_CANDIDATES
    while True:
        sorted_part, weights, running = candidates.cumulative(count)
        if count >= width or bool((host(running)[:, -1] > target).all()):
            break
        count *= _GROWTH
    ids, weights, running = host(sorted_part.ids), host(weights), host(running)
    sampled = []
    row_values = zip(random.tolist(), target.tolist(), total.tolist(), strict=True)
    for row, (u, target_mass, total_mass) in enumerate(row_values):
        column = sample_index(target_mass, running[row], weights[row])
        probability = float(weights[row, column]) / total_mass
        high = float(running[row, column]) / total_mass
        draw = Draw(u, max(high - probability, 0.0), min(high, 1.0))
        sampled.append(_SampledToken(int(ids[row, column]), min(probability, 1.0), draw))
    return sampled


def next_state(
    settings: SamplingSettings, state: StageState | None, probability: float
) -> StageState | None:
    """State of the stages after a token with this probability was picked."""
    if settings.mirostat_tau == 0 or settings.greedy:
        return state
    mu = state.mirostat_mu if state else 2.0 * settings.mirostat_tau
    return StageState(mirostat_next(mu, probability, settings.mirostat_tau, settings.mirostat_eta))


def _top_candidates(
    model: Candidates, final: Candidates, sampled: list[_SampledToken], greedy: bool, top: int
) -> list[tuple[Candidate, ...]]:
    """Most likely tokens of each row, and their probabilities after all stages."""
    most_likely = model.top(top)
    stats = model.softmax_stats()
    host = model.ops.to_numpy
    if greedy:
        picked = [[choice.token] for choice in sampled]
        probabilities = (host(most_likely.ids) == picked).astype(np.float64)
    else:
        probabilities = final_probabilities(final, most_likely.ids)
    logprobs = host(most_likely.logits - stats.peak - model.ops.log(stats.total))
    row_values = host(most_likely.ids).tolist(), logprobs.tolist(), probabilities.tolist()
    return [tuple(map(Candidate, *columns)) for columns in zip(*row_values, strict=True)]


# -- Log-probabilities and ranks of target tokens: the computation of `lm.score`

_ROWS_PER_CHUNK = 64  # bounds the size of intermediate arrays

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probability and rank of each target, and the most likely tokens there."""

    logprobs: Floats  # [T]
    ranks: Tokens  # [T], 0: most likely
    entropies: Floats  # [T], nats
    top_tokens: Tokens  # [T, top]
    top_logprobs: Floats  # [T, top]


def log_softmax(logits: Array) -> Array:
    """Log-probabilities [rows, vocabulary], in the same type of array."""
    ops = array_operations(logits)
    model = Candidates(ops.prepare(logits))
    stats = model.softmax_stats()
    return model.logits - ops.to_array_like(stats.peak + ops.log(stats.total), model.logits)


def score(logits: Array, targets: Sequence[int] | Tokens, top: int = 0) -> Scores:
    """Score a target at every row of logits, with the `top` most likely tokens."""
    ops = array_operations(logits)
    target_ids = np.asarray(targets, dtype=np.int64)
    length, size = logits.shape
    if target_ids.shape != (length,):
        raise SettingsError(f"got {target_ids.size} targets for {length} rows of logits")
    if length and (target_ids.min() < 0 or target_ids.max() >= size):
        raise SettingsError(
            f"a target is outside of the vocabulary; it must be from 0 to {size - 1}"
        )
    top = max(0, min(top, size))
    scores = Scores(
        np.empty(length),
        np.empty(length, np.int64),
        np.empty(length),
        np.empty((length, top), np.int64),
        np.empty((length, top)),
    )
    for start in range(0, length, _ROWS_PER_CHUNK):
        chunk = slice(start, start + _ROWS_PER_CHUNK)
        model = Candidates(ops.prepare(logits[chunk]))
        stats = model.softmax_stats(entropy=True)
        norm = stats.peak + ops.log(stats.total)
        logit, rank = ops.logit_and_rank(model.logits, target_ids[chunk])
        scores.logprobs[chunk] = ops.to_numpy(logit - norm)[:, 0]
        scores.ranks[chunk] = ops.to_numpy(rank)
        scores.entropies[chunk] = ops.to_numpy(stats.entropy)[:, 0]
        if top:
            most_likely = model.top(top)
            scores.top_tokens[chunk] = ops.to_numpy(most_likely.ids)
            scores.top_logprobs[chunk] = ops.to_numpy(most_likely.logits - norm)
    return scores
