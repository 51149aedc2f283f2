"""The chain: logits of a batch go through each row's stages, and one token a row comes out.

    chain = Chain([settings_of_row_0, settings_of_row_1])          # once for a batch
    picks = chain.pick(logits, [RowInput(history), ...], top=5, explain=True)

Rows that use the same stages run together. A row's pick is bit-identical alone and in any batch.
Looking (`top`, `explain`) reads the arrays of the same run, and changes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.errors import SettingsError
from unspool.sampling.arrays import Array, operations
from unspool.sampling.candidates import Candidates
from unspool.sampling.draw import TOKEN_STREAM, landing
from unspool.sampling.faults import BadLogitsError, NoCandidateError
from unspool.sampling.penalties import Allowed, Forbidden
from unspool.sampling.records import (
    Candidate,
    Draw,
    Pick,
    StageReport,
    final_probabilities,
    greedy_report,
    report,
)
from unspool.sampling.rows import RowInput, Rows, RowSettings, StageState
from unspool.sampling.settings import EDITING_STAGES, SamplingSettings
from unspool.sampling.stages import STAGES, Stage
from unspool.sampling.truncation import mirostat_next

_FIRST_LOOK = 64  # of how many likeliest candidates the draw first sees whether it falls on them
_WIDER = 16
_SORT_WHOLE = 256  # so few are put in order at once
_ALLOWED = Allowed()
_FORBIDDEN = Forbidden()
_NOTHING_SAID = RowInput()


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows whose settings use the same stages in the same order."""

    rows: tuple[int, ...]
    stages: tuple[Stage, ...]
    greedy: bool
    settings: RowSettings


@dataclass(frozen=True, slots=True)
class _Fallen:
    """Where the draw of each row fell, in host numbers [rows]."""

    tokens: np.ndarray[Any, Any]
    probability: np.ndarray[Any, Any]
    u: np.ndarray[Any, Any] | None = None
    low: np.ndarray[Any, Any] | None = None
    high: np.ndarray[Any, Any] | None = None


class Chain:
    """Picks tokens for a batch of rows, each with its own settings.

    `first` are stages that run before all others in every row: constraints that are no setting,
    such as a grammar.
    """

    def __init__(
        self,
        settings: SamplingSettings | Sequence[SamplingSettings],
        first: Sequence[Stage] = (),
    ) -> None:
        rows = (settings,) if isinstance(settings, SamplingSettings) else tuple(settings)
        self.settings = rows
        self._first = tuple(first)
        members: dict[tuple[bool, tuple[str, ...]], list[int]] = {}
        for number, row in enumerate(rows):
            members.setdefault((row.greedy, active_stages(row)), []).append(number)
        self._groups = [
            _Group(
                tuple(numbers),
                tuple(STAGES[name] for name in names),
                greedy,
                RowSettings([rows[n] for n in numbers]),
            )
            for (greedy, names), numbers in members.items()
        ]

    def pick(
        self,
        logits: Array,
        rows: Sequence[RowInput] | None = None,
        *,
        top: int = 0,
        explain: bool = False,
    ) -> list[Pick]:
        """One token for each row of logits [rows, vocabulary], numpy or torch.

        `top`: also the model's likeliest candidates, so many. `explain`: also what each stage did.
        """
        logits = operations(logits).prepare(logits)
        said = [_NOTHING_SAID] * len(self.settings) if rows is None else list(rows)
        if logits.ndim != 2 or logits.shape[0] != len(self.settings) or len(said) != len(logits):
            raise SettingsError(
                f"logits were {tuple(logits.shape)} with {len(said)} row inputs; this chain takes"
                f" {len(self.settings)} rows of a vocabulary each"
            )
        picks: list[Pick] = [None] * len(said)  # type: ignore[list-item]
        with np.errstate(all="ignore"):
            for group in self._groups:
                alone = len(group.rows) == len(said)
                part = logits if alone else logits[list(group.rows)]
                try:
                    found = self._pick_group(
                        group, part, [said[n] for n in group.rows], top, explain
                    )
                except (BadLogitsError, NoCandidateError) as error:
                    error.rows = tuple(group.rows[n] for n in error.rows)
                    raise
                for number, pick in zip(group.rows, found, strict=True):
                    picks[number] = pick
        return picks

    def pick_one(
        self, logits: Array, row: RowInput = _NOTHING_SAID, *, top: int = 0, explain: bool = False
    ) -> Pick:
        """`pick` for a single row: logits [vocabulary]."""
        return self.pick(logits.reshape(1, -1), [row], top=top, explain=explain)[0]

    def _pick_group(
        self, group: _Group, logits: Array, said: list[RowInput], top: int, explain: bool
    ) -> list[Pick]:
        model = Candidates(logits)
        try:
            own = model.measure(entropy=True)
        except NoCandidateError as error:
            raise BadLogitsError("the model gave every token the logit -inf", error.rows) from None
        rows = Rows(group.settings, said)
        stages = (*self._first, *group.stages)
        if any(len(row.forbidden) for row in said):
            stages = (_FORBIDDEN, *stages)
        if any(row.allowed is not None for row in said):
            stages = (_ALLOWED, *stages)
        final, reports = _run(stages, model, rows, explain)
        fallen = _likeliest(final) if group.greedy else _draw(final, rows)
        if explain and group.greedy:
            reports.append(greedy_report(final, fallen.tokens))

        host = model.ops.host
        tokens = model.ops.like(fallen.tokens, logits)[:, None]
        level = model.ops.take(model.logits, tokens)
        rank = host(model.ops.count(model.logits > level))
        logprob = host(model.ops.double(level) - own.peak - model.ops.log(own.total))[:, 0]
        entropy = host(own.entropy)[:, 0]
        candidates = _likely(model, final, fallen, group.greedy, top) if top > 0 else None
        return [
            Pick(
                token=int(fallen.tokens[n]),
                logprob=float(logprob[n]),
                rank=int(rank[n]),
                entropy=max(0.0, float(entropy[n])),
                probability=float(fallen.probability[n]),
                draw=_draw_record(fallen, n),
                state=next_state(rows.settings[n], said[n].state, float(fallen.probability[n])),
                candidates=() if candidates is None else candidates[n],
                stages=tuple(stage[n] for stage in reports if _concerns(stage[n], said[n])),
            )
            for n in range(len(said))
        ]


def active_stages(settings: SamplingSettings) -> tuple[str, ...]:
    """The stages that have something to do, in the user's order; greedy, only those that edit."""
    listed = (name for name in settings.stages if not settings.is_neutral(name))
    return tuple(name for name in listed if not settings.greedy or name in EDITING_STAGES)


def _concerns(stage: StageReport, row: RowInput) -> bool:
    """Whether a row has this stage itself, or only shares its group with rows that have it."""
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
                candidates.peak()
                reports.append(report(stage.name, before, candidates))
        candidates.peak()
    except NoCandidateError as error:
        raise NoCandidateError(
            f"the stages leave no token: {_emptying(stages, model, rows)} took the last one"
            " that others had left; allow some",
            error.rows,
        ) from None
    return candidates, reports


def _emptying(stages: tuple[Stage, ...], candidates: Candidates, rows: Rows) -> str:
    """The stage after which a row has no candidate left; looked for only once it has happened."""
    for stage in stages:
        try:
            candidates = stage.apply(candidates, rows)
            candidates.peak()
        except NoCandidateError:
            return stage.name
    return "none"


def _likeliest(candidates: Candidates) -> _Fallen:
    tokens = candidates.ops.first_max(candidates.logits)
    if candidates.ids is not None:
        tokens = candidates.ops.take(candidates.ids, tokens[:, None])[:, 0]
    tokens = candidates.ops.host(tokens)
    return _Fallen(tokens, np.ones(len(tokens)))


def _draw(candidates: Candidates, rows: Rows) -> _Fallen:
    """Lets each row's number fall on its candidates, likeliest first.

    Where many remain, only the likeliest are put in order, as long as every number falls on them.
    """
    ops, host = candidates.ops, candidates.ops.host
    width = candidates.logits.shape[-1]
    # Summed before anything is put in order: whether that happens depends on the widest row.
    whole = candidates.measure()
    few = candidates.in_order() if width <= _SORT_WHOLE else candidates
    drawn = rows.uniform(TOKEN_STREAM)
    target = ops.like(drawn, whole.total)[:, None] * whole.total
    look = width if few.ordered else _FIRST_LOOK
    weights: Array
    while True:
        line = few.lead(look)
        weights = whole.weights if line is candidates else ops.exp(line.logits - whole.peak)
        running = weights.cumsum(-1)
        if look >= width or bool((running[:, -1:] > target).all()):
            break
        look *= _WIDER
    column = landing(target, running, weights)[:, None]
    total = whole.total
    width_of_pick = host(ops.take(weights, column) / total)[:, 0]
    high = host(ops.take(running, column) / total)[:, 0]
    return _Fallen(
        host(ops.take(line.ids, column))[:, 0],
        np.minimum(width_of_pick, 1.0),
        drawn,
        np.maximum(high - width_of_pick, 0.0),
        np.minimum(high, 1.0),
    )


def _draw_record(fallen: _Fallen, row: int) -> Draw | None:
    if fallen.u is None or fallen.low is None or fallen.high is None:
        return None
    return Draw(float(fallen.u[row]), float(fallen.low[row]), float(fallen.high[row]))


def next_state(
    settings: SamplingSettings, state: StageState | None, probability: float
) -> StageState | None:
    """What the stages carry on from a token that was picked with this probability."""
    if settings.mirostat_tau == 0 or settings.greedy:
        return state
    mu = state.mirostat_mu if state else 2.0 * settings.mirostat_tau
    return StageState(mirostat_next(mu, probability, settings.mirostat_tau, settings.mirostat_eta))


def _likely(
    model: Candidates, final: Candidates, fallen: _Fallen, greedy: bool, top: int
) -> list[tuple[Candidate, ...]]:
    """The model's likeliest of each row, and their probabilities after all stages."""
    best = model.lead(top)
    own = model.measure()
    host = model.ops.host
    tokens = host(best.ids)
    logprobs = host(best.logits - own.peak - model.ops.log(own.total))
    rows = []
    for row in range(model.rows):
        if greedy:
            chances = (tokens[row] == fallen.tokens[row]).astype(np.float64)
        else:
            chances = final_probabilities(final, row, tokens[row])
        columns = (tokens[row].tolist(), logprobs[row].tolist(), chances.tolist())
        rows.append(tuple(Candidate(*column) for column in zip(*columns, strict=True)))
    return rows
