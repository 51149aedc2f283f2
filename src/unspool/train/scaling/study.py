"""Scaling study: many small runs, a fitted law, and a larger run to check it.

    grid = plan(config_of_depth, depths=(2, 3, 4, 6), budgets=(1e12, 3e12), length=256)
    study = Study("runs/scaling")
    study.measure(grid, train)          # train(planned, folder) returns the held-out loss
    law = study.fit()
    study.check(config_of_depth, depths, 1e13, length, train)

Every run has a fixed compute budget, spent on a smaller model and more text or the other way
round. Results are saved after each run, so an interrupted study can be resumed.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from unspool.errors import SettingsError, UnspoolError
from unspool.model.config import ModelConfig
from unspool.train.learning.model_size import compute_parameters, training_flops
from unspool.train.running.runs import write_json

# -- Run jobs in parallel, each in its own process

Job = TypeVar("Job")


def run_in_processes(
    jobs: Sequence[Job], work: Callable[[Job], float], at_once: int
) -> Iterator[tuple[Job, float]]:
    """Yield each job with its result as it ends. The first failure terminates the others."""
    context = get_context("spawn")
    pending, active = deque(jobs), dict[Any, tuple[Any, Job]]()
    try:
        while pending or active:
            while pending and len(active) < at_once:
                job = pending.popleft()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_job, args=(sender, work, job), daemon=True)
                process.start()
                sender.close()  # so that the pipe closes when the process ends for any reason
                active[receiver] = process, job
            for ready in wait(list(active)):
                process, job = active.pop(ready)
                yield job, _receive(ready, process)
    finally:
        for process, _ in active.values():
            process.terminate()
        for process, _ in active.values():
            process.join()


def is_orphaned() -> bool:
    """Whether the parent of this process has died."""
    parent = parent_process()
    return parent is not None and not parent.is_alive()


def _run_job(pipe: Connection, work: Callable[[Any], float], job: Any) -> None:
    try:
        result: float | Exception = work(job)
    except Exception as error:
        result = error
    with suppress(BrokenPipeError):  # the parent has died
        pipe.send(result)


def _receive(receiver: Any, process: Any) -> float:
    try:
        result = receiver.recv()
    except EOFError:
        process.join()
        raise UnspoolError(
            f"a run's process exited with {process.exitcode} before it had a result; rerun the "
            "same command to resume from its last checkpoint"
        ) from None
    process.join()
    if isinstance(result, Exception):
        raise result
    return float(result)


# -- Scaling law L = E + A/N^a + B/D^b: fit to runs, confidence intervals, predictions

Floats = npt.NDArray[np.float64]

HUBER_DELTA = 1e-3  # of the difference in log loss: quadratic below, linear above
MIN_RUNS = 6  # five parameters are fitted
_STARTS = tuple(
    product((0.0, 5.0, 10.0, 15.0), (0.1, 0.35, 0.7), (0.0, 5.0, 10.0, 15.0), (0.1, 0.35, 0.7),
            (-1.0, 0.0, 0.7))
)  # fmt: skip
_LOW = np.array([-10.0, 0.0, -10.0, 0.0, -5.0])
_HIGH = np.array([60.0, 3.0, 60.0, 3.0, 3.0])


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run: parameters, tokens, and held-out loss (nats per token)."""

    parameters: float
    tokens: float
    loss: float
    flops: float = 0.0  # of the whole training; 0: use 6ND

    @property
    def compute(self) -> float:
        return self.flops or 6 * self.parameters * self.tokens


@dataclass(frozen=True, slots=True)
class Law:
    """Parameters of the law; `redraws` are those of the bootstrap fits."""

    e: float
    a: float
    alpha: float
    b: float
    beta: float
    error: float = 0.0  # mean absolute difference in log loss on the fitted runs
    redraws: tuple[tuple[float, ...], ...] = field(default=(), repr=False)

    def loss(self, parameters: float, tokens: float) -> float:
        return float(_losses(self._row, parameters, tokens))

    def interval(
        self, parameters: float, tokens: float, share: float = 0.9
    ) -> tuple[float, float] | None:
        """Confidence interval of the loss; None without bootstrap fits."""
        if not self.redraws:
            return None
        return _central_interval(_losses(np.array(self.redraws), parameters, tokens), share)

    def intervals(self, share: float = 0.9) -> dict[str, tuple[float, float]]:
        """Confidence interval of each parameter of the law."""
        if not self.redraws:
            return {}
        rows = np.array(self.redraws)
        rows = np.stack(
            [np.exp(rows[:, 4]), np.exp(rows[:, 0]), rows[:, 1], np.exp(rows[:, 2]), rows[:, 3]], 1
        )
        names = ("e", "a", "alpha", "b", "beta")
        return {name: _central_interval(rows[:, n], share) for n, name in enumerate(names)}

    def best_at(self, flops: float) -> tuple[float, float]:
        """Compute-optimal parameters and tokens, with C = 6ND."""
        if min(self.alpha, self.beta, self.a, self.b) <= 0:
            raise SettingsError(
                "the fitted law has no optimal size, because one of its terms does not decrease; "
                "add runs of more sizes or budgets"
            )
        exponent_sum = self.alpha + self.beta
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / exponent_sum)
        parameters = ratio * (flops / 6) ** (self.beta / exponent_sum)
        return parameters, flops / 6 / parameters

    @property
    def _row(self) -> Floats:
        return np.array([np.log(self.a), self.alpha, np.log(self.b), self.beta, np.log(self.e)])

    def to_dict(self) -> dict[str, Any]:
        names = ("e", "a", "alpha", "b", "beta", "error")
        return {
            **{name: getattr(self, name) for name in names},
            "intervals_90": {name: list(ends) for name, ends in self.intervals().items()},
        }


def fit(runs: Sequence[RunResult], *, redraws: int = 200, seed: int = 0) -> Law:
    """Fit the law to runs, with `redraws` bootstrap samples for the intervals."""
    if len(runs) < MIN_RUNS:
        raise SettingsError(f"a scaling law needs at least {MIN_RUNS} runs, got {len(runs)}")
    if len({run.parameters for run in runs}) < 2 or len({run.tokens for run in runs}) < 2:
        raise SettingsError("the runs need at least two sizes and two amounts of data")
    x = np.log([run.parameters for run in runs])
    y = np.log([run.tokens for run in runs])
    z = np.log([run.loss for run in runs])
    weights = np.ones((len(_STARTS), len(runs)))
    fits, cost = _minimize(np.array(_STARTS), x, y, z, weights)
    order = np.argsort(cost)
    best = fits[order[0]]
    rows = _bootstrap(fits[order[:8]], x, y, z, redraws, seed) if redraws else np.empty((0, 5))
    residual = np.abs(_log_losses(best[None], x, y)[0][0] - z)
    a, alpha, b, beta, e = best
    return Law(
        float(np.exp(e)), float(np.exp(a)), float(alpha), float(np.exp(b)), float(beta),
        float(residual.mean()), tuple(tuple(map(float, row)) for row in rows),
    )  # fmt: skip


def _bootstrap(starts: Floats, x: Floats, y: Floats, z: Floats, count: int, seed: int) -> Floats:
    """The best fit to each of `count` samples of the runs, drawn with replacement."""
    samples = np.random.default_rng(seed).integers(0, len(x), (count, len(x)))
    weights = np.stack([np.bincount(row, minlength=len(x)) for row in samples]).astype(float)
    # A sample with a single size or budget cannot be fitted.
    varied = [
        len(set(x[w > 0])) > 1 and len(set(y[w > 0])) > 1 and (w > 0).sum() >= 5 for w in weights
    ]
    weights = weights[varied]
    all_starts = np.tile(starts, (len(weights), 1))
    fits, cost = _minimize(all_starts, x, y, z, np.repeat(weights, len(starts), 0))
    best = cost.reshape(len(weights), -1).argmin(1)
    rows: Floats = fits.reshape(len(weights), -1, 5)[np.arange(len(weights)), best]
    return rows


def _minimize(
    starts: Floats, x: Floats, y: Floats, z: Floats, weights: Floats, steps: int = 400
) -> tuple[Floats, Floats]:
    """Minimize the weighted Huber loss from each start; returns the parameters and the loss."""
    at, damping = starts.copy(), np.full(len(starts), 1e-2)
    predicted, slopes = _log_losses(at, x, y)
    cost = _huber(predicted - z, weights)
    for _ in range(steps):
        residual = predicted - z
        factor = weights * np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residual), 1e-300))
        square = np.einsum("sr,sri,srj->sij", factor, slopes, slopes)
        gradient = np.einsum("sr,sri,sr->si", factor, slopes, residual)
        scale = np.einsum("sii->si", square) + 1e-9
        step = np.linalg.solve(
            square + damping[:, None, None] * scale[:, :, None] * np.eye(5), gradient[..., None]
        )[..., 0]
        trial = np.clip(at - step, _LOW, _HIGH)
        new_predicted, new_slopes = _log_losses(trial, x, y)
        new_cost = _huber(new_predicted - z, weights)
        better = new_cost < cost
        change = np.abs(trial - at).max()
        at[better], predicted[better], slopes[better] = (
            trial[better], new_predicted[better], new_slopes[better],
        )  # fmt: skip
        cost = np.where(better, new_cost, cost)
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e8)
        if change < 1e-12:
            break
    return at, cost


def _log_losses(rows: Floats, x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """log L of each run for each row of parameters [rows, runs], and its slopes [rows, runs, 5]."""
    a, alpha, b, beta, e = (rows[:, n, None] for n in range(5))
    terms = np.stack([a - alpha * x, b - beta * y, np.broadcast_to(e, (len(rows), len(x)))], -1)
    peak = terms.max(-1, keepdims=True)
    parts = np.exp(terms - peak)
    total = parts.sum(-1, keepdims=True)
    share = parts / total
    slopes = np.stack(
        [share[..., 0], -x * share[..., 0], share[..., 1], -y * share[..., 1], share[..., 2]], -1
    )
    return (peak + np.log(total))[..., 0], slopes


def _huber(residual: Floats, weights: Floats) -> Floats:
    size = np.abs(residual)
    linear = HUBER_DELTA * (size - HUBER_DELTA / 2)
    loss = np.where(size < HUBER_DELTA, residual**2 / 2, linear)
    total: Floats = (weights * loss).sum(-1)
    return total


def _losses(rows: Floats, parameters: float, tokens: float) -> Floats:
    log_losses = _log_losses(np.atleast_2d(rows), np.log([parameters]), np.log([tokens]))[0]
    losses = np.exp(log_losses[:, 0])
    return losses if rows.ndim == 2 else losses[0]


def _central_interval(values: Floats, share: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


ConfigOf = Callable[[int], ModelConfig]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a grid: a depth, and the number of tokens that fits its budget."""

    depth: int
    parameters: int
    tokens: int
    flops: float

    @property
    def name(self) -> str:
        return f"d{self.depth}-{self.flops:.4g}".replace("+", "")

    def measured(self, loss: float) -> RunResult:
        return RunResult(self.parameters, self.tokens, loss, self.flops)


Train = Callable[[PlannedRun, Path], float]


def plan_one(config_of: ConfigOf, depth: int, flops: float, length: int) -> PlannedRun:
    config = config_of(depth)
    tokens = int(flops / training_flops(config, length))
    return PlannedRun(depth, compute_parameters(config), tokens, flops)


def plan(
    config_of: ConfigOf,
    *,
    depths: Sequence[int],
    budgets: Sequence[float],
    length: int,
    fewest: float = 1.0,
    most: float = 1000.0,
    longest: float = math.inf,
) -> list[PlannedRun]:
    """Every size with every budget, cheapest first.

    Dropped are runs with less than `fewest` or more than `most` tokens per parameter, and runs of
    more than `longest` tokens, because repeated text teaches less than the law says.
    """
    runs = [plan_one(config_of, depth, flops, length) for flops in budgets for depth in depths]
    runs = [run for run in runs if run.tokens <= longest]
    useful = [run for run in runs if fewest <= run.tokens / run.parameters <= most]
    if not useful:
        ratios = [run.tokens / run.parameters for run in runs]
        raise SettingsError(
            f"no run of this grid has {fewest:g} to {most:g} tokens per parameter (they have "
            f"{min(ratios):.2g} to {max(ratios):.2g}); give other budgets or depths"
            if ratios
            else "every run of this grid would repeat its text too often; give more text, larger "
            "depths or smaller budgets"
        )
    return sorted(useful, key=lambda run: (run.flops, run.depth))


@dataclass(frozen=True, slots=True)
class Check:
    """A run that was not part of the fit: predicted and measured loss."""

    run: PlannedRun
    predicted: float
    interval: tuple[float, float] | None
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


class Study:
    """A folder with the runs of a grid and their results in `scaling.json`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.file = self.folder / "scaling.json"
        self.runs: dict[PlannedRun, float] = {}
        self.law: Law | None = None
        self.checked: Check | None = None
        if self.file.exists():
            self._open()

    def measure(
        self,
        grid: Sequence[PlannedRun],
        train: Train,
        on_result: Callable[[PlannedRun, float], object] = lambda run, loss: None,
        at_once: int = 1,
    ) -> None:
        """Train the missing runs; `on_result` gets all results, old ones too.

        Small models leave a GPU idle most of the time: with `at_once` > 1 several runs train in
        parallel, each in its own process (`train` must be picklable).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for run in grid:
            if run in self.runs:
                on_result(run, self.runs[run])
        missing = [run for run in grid if run not in self.runs]
        for run, loss in self._train_all(missing, train, at_once):
            self.runs[run] = loss
            self.save()
            on_result(run, loss)

    def _train_all(
        self, missing: Sequence[PlannedRun], train: Train, at_once: int
    ) -> Iterator[tuple[PlannedRun, float]]:
        if at_once < 2 or len(missing) < 2:
            for run in missing:
                yield run, _train_in_folder(train, self.folder, run)
            return
        largest_first = sorted(missing, key=lambda run: -run.flops)
        work = partial(_train_in_folder, train, self.folder)
        yield from run_in_processes(largest_first, work, at_once)

    def fit(self, redraws: int = 200) -> Law:
        self.law = fit([run.measured(loss) for run, loss in self.runs.items()], redraws=redraws)
        self.save()
        return self.law

    def left_out(self) -> dict[PlannedRun, float]:
        """Relative errors of a fit without the largest budget on the runs of that budget.

        A check of the law that costs no training. Empty if too few runs remain for a fit.
        """
        largest = max(run.flops for run in self.runs)
        others = [run.measured(loss) for run, loss in self.runs.items() if run.flops < largest]
        if len(others) < MIN_RUNS:
            return {}
        law = fit(others, redraws=0)
        return {
            run: law.loss(run.parameters, run.tokens) / loss - 1
            for run, loss in self.runs.items()
            if run.flops == largest
        }

    def check(
        self,
        config_of: ConfigOf,
        depths: Sequence[int],
        flops: float,
        length: int,
        train: Train,
        longest: float = math.inf,
    ) -> Check:
        """Train the optimal depth for a larger budget, and compare its loss with the prediction."""
        law = self.law
        if law is None:
            raise SettingsError("fit the law before checking it")
        largest = max(run.flops for run in self.runs)
        if flops <= largest:
            raise SettingsError(
                f"the budget of the check must be larger than the grid's largest, {largest:g}; got "
                f"{flops:g}"
            )
        runs = [plan_one(config_of, depth, flops, length) for depth in depths]
        options = [run for run in runs if run.tokens <= longest] or runs[-1:]
        run = min(options, key=lambda option: law.loss(option.parameters, option.tokens))
        loss = (
            self.checked.measured
            if self.checked is not None and self.checked.run == run
            else train(run, self.folder / run.name)
        )
        self.checked = Check(
            run,
            law.loss(run.parameters, run.tokens),
            law.interval(run.parameters, run.tokens),
            loss,
        )
        self.save()
        return self.checked

    def save(self) -> None:
        write_json(self.file, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "runs": [{**asdict(run), "loss": loss} for run, loss in self.runs.items()]
        }
        if self.law is not None:
            content["law"] = {**self.law.to_dict(), "redraws": [list(r) for r in self.law.redraws]}
        if self.checked is not None:
            content["check"] = {**asdict(self.checked), "error": self.checked.error}
        return content

    def _open(self) -> None:
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            for row in content["runs"]:
                loss = row.pop("loss")
                self.runs[PlannedRun(**row)] = loss
            if "law" in content:
                law = content["law"]
                numbers = {n: law[n] for n in ("e", "a", "alpha", "b", "beta", "error")}
                self.law = Law(**numbers, redraws=tuple(map(tuple, law["redraws"])))
            if "check" in content:
                row = content["check"]
                ends = tuple(row["interval"]) if row["interval"] else None
                self.checked = Check(
                    PlannedRun(**row["run"]), row["predicted"], ends, row["measured"]
                )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnspoolError(
                f"{self.file} cannot be read as a scaling study ({error}); move it away"
            ) from None


def _train_in_folder(train: Train, folder: Path, run: PlannedRun) -> float:
    return train(run, folder / run.name)
