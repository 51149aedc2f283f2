"""The chain: logits of a batch go through each row's stages, and one token a row comes out.

    chain = Chain([settings_of_row_0, settings_of_row_1])          # once for a batch
    picks = chain.pick(logits, [RowInput(history), ...], top=5, explain=True)

Rows that use the same stages run together. A row's pick is bit-identical alone and in any batch.
Looking (`top`, `explain`) reads the arrays of the same run, and changes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from unspool.errors import SettingsError
from unspool.sampling.arrays import Array
from unspool.sampling.candidates import Candidates
from unspool.sampling.draw import TOKEN_STREAM, landing
from unspool.sampling.faults import ROW_FAULTS, BadLogitsError, NoCandidateError
from unspool.sampling.operations import operations
from unspool.sampling.own_stage import OwnStage
from unspool.sampling.penalties import Allowed, Forbidden
from unspool.sampling.records import (
    Candidate,
    Draw,
    Pick,
    StageReport,
    final_probabilities,
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
_NO_INPUT = RowInput()


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows whose settings use the same stages in the same order."""

    rows: tuple[int, ...]
    stages: tuple[Stage, ...]
    greedy: bool
    settings: RowSettings


class _Fallen(NamedTuple):
    """The token that a row's draw fell on."""

    token: int
    probability: float
    draw: Draw | None = None


class Chain:
    """Picks tokens for a batch of rows, each with its own settings."""

    def __init__(self, settings: SamplingSettings | Sequence[SamplingSettings]) -> None:
        rows = (settings,) if isinstance(settings, SamplingSettings) else tuple(settings)
        self.settings = rows
        members: dict[tuple[bool, tuple[str | OwnStage, ...]], list[int]] = {}
        for number, row in enumerate(rows):
            members.setdefault((row.greedy, active_stages(row)), []).append(number)
        self._groups = [
            _Group(
                tuple(numbers),
                tuple(STAGES[one] if isinstance(one, str) else one for one in used),
                greedy,
                RowSettings([rows[n] for n in numbers]),
            )
            for (greedy, used), numbers in members.items()
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
        inputs = [_NO_INPUT] * len(self.settings) if rows is None else list(rows)
        if logits.ndim != 2 or logits.shape[0] != len(self.settings) or len(inputs) != len(logits):
            raise SettingsError(
                f"logits were {tuple(logits.shape)} with {len(inputs)} row inputs; this chain takes"
                f" {len(self.settings)} rows of a vocabulary each"
            )
        picks: list[Pick] = [None] * len(inputs)  # type: ignore[list-item]
        with np.errstate(all="ignore"):
            for group in self._groups:
                alone = len(group.rows) == len(inputs)
                part = logits if alone else logits[list(group.rows)]
                try:
                    found = self._pick_group(
                        group, part, [inputs[n] for n in group.rows], top, explain
                    )
                except ROW_FAULTS as error:
                    error.rows = tuple(group.rows[n] for n in error.rows)
                    raise
                for number, pick in zip(group.rows, found, strict=True):
                    picks[number] = pick
        return picks

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
            own = model.measure(entropy=True)
        except NoCandidateError as error:
            raise BadLogitsError("the model gave every token the logit -inf", error.rows) from None
        rows = Rows(group.settings, inputs)
        stages = group.stages
        if any(len(row.forbidden) for row in inputs):
            stages = (_FORBIDDEN, *stages)
        if any(row.allowed is not None for row in inputs):
            stages = (_ALLOWED, *stages)
        final, reports = _run(stages, model, rows, explain)
        fallen = _likeliest(final) if group.greedy else _draw(final, rows)
        if explain and group.greedy:
            reports.append(report("greedy", final, final.lead(1)))

        ops, host = model.ops, model.ops.host
        level, above = ops.standing(model.logits, np.array([one.token for one in fallen]))
        rank = host(above).tolist()
        logprob = host(level - own.peak - ops.log(own.total))[:, 0].tolist()
        entropy = host(own.entropy)[:, 0].tolist()
        candidates = _likely(model, final, fallen, group.greedy, top) if top > 0 else None
        return [
            Pick(
                token=one.token,
                logprob=logprob[n],
                rank=rank[n],
                entropy=max(0.0, entropy[n]),
                probability=one.probability,
                draw=one.draw,
                state=next_state(rows.settings[n], inputs[n].state, one.probability),
                candidates=() if candidates is None else candidates[n],
                stages=tuple(stage[n] for stage in reports if _concerns(stage[n], inputs[n])),
            )
            for n, one in enumerate(fallen)
        ]


def active_stages(settings: SamplingSettings) -> tuple[str | OwnStage, ...]:
    """The stages that have something to do, in the user's order; greedy, only those that edit."""
    listed = (stage for stage in settings.stages if not settings.is_neutral(stage))
    if not settings.greedy:
        return tuple(listed)
    return tuple(
        stage for stage in listed if isinstance(stage, OwnStage) or stage in EDITING_STAGES
    )


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
                candidates.passing = False  # the next report looks at it
                candidates.measure()
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


def _likeliest(candidates: Candidates) -> list[_Fallen]:
    columns = candidates.ops.first_max(candidates.logits)[:, None]
    ids = candidates.ids
    tokens = columns if ids is None else candidates.ops.take(ids, columns)
    return [_Fallen(token, 1.0) for token in candidates.ops.host(tokens)[:, 0].tolist()]


def _draw(candidates: Candidates, rows: Rows) -> list[_Fallen]:
    """Lets each row's number fall on its candidates, likeliest first.

    Where many remain, only the likeliest are put in order, as long as every number falls on them.
    """
    host = candidates.ops.host
    width = candidates.logits.shape[-1]
    # Summed before anything is put in order: whether that happens depends on the widest row.
    whole = candidates.measure()
    total = host(whole.total)[:, 0]
    drawn = rows.uniform(TOKEN_STREAM)
    target = drawn * total
    look = width if candidates.ordered or width <= _SORT_WHOLE else _FIRST_LOOK
    while True:
        line, weights, running = candidates.line(look)
        if look >= width or bool((host(running)[:, -1] > target).all()):
            break
        look *= _WIDER
    ids, weights, running = host(line.ids), host(weights), host(running)
    fallen = []
    numbers = zip(drawn.tolist(), target.tolist(), total.tolist(), strict=True)
    for row, (u, at, whole_mass) in enumerate(numbers):
        column = landing(at, running[row], weights[row])
        chance = float(weights[row, column]) / whole_mass
        high = float(running[row, column]) / whole_mass
        draw = Draw(u, max(high - chance, 0.0), min(high, 1.0))
        fallen.append(_Fallen(int(ids[row, column]), min(chance, 1.0), draw))
    return fallen


def next_state(
    settings: SamplingSettings, state: StageState | None, probability: float
) -> StageState | None:
    """What the stages carry on from a token that was picked with this probability."""
    if settings.mirostat_tau == 0 or settings.greedy:
        return state
    mu = state.mirostat_mu if state else 2.0 * settings.mirostat_tau
    return StageState(mirostat_next(mu, probability, settings.mirostat_tau, settings.mirostat_eta))


def _likely(
    model: Candidates, final: Candidates, fallen: list[_Fallen], greedy: bool, top: int
) -> list[tuple[Candidate, ...]]:
    """The model's likeliest of each row, and their probabilities after all stages."""
    best = model.lead(top)
    own = model.measure()
    host = model.ops.host
    if greedy:
        chances = (host(best.ids) == [[one.token] for one in fallen]).astype(np.float64)
    else:
        chances = final_probabilities(final, best.ids)
    logprobs = host(best.logits - own.peak - model.ops.log(own.total))
    numbers = host(best.ids).tolist(), logprobs.tolist(), chances.tolist()
    return [tuple(map(Candidate, *columns)) for columns in zip(*numbers, strict=True)]
