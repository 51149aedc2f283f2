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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unspool.errors import SettingsError, UnspoolError
from unspool.model.config import ModelConfig
from unspool.train.learning.flops import compute_parameters, training_flops
from unspool.train.running.atomic import write_json
from unspool.train.scaling.law import MIN_RUNS, Law, RunResult, fit
from unspool.train.scaling.side_by_side import run_in_processes

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

    # -- the file -----------------------------------------------------------------------------

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
