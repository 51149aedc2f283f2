"""Many small runs, the law that they follow, and a larger run to hold it against.

    grid = plan(config_of_depth, depths=(2, 3, 4, 6), budgets=(1e12, 3e12), length=256)
    study = Study("runs/scaling")
    study.measure(grid, train)          # train(planned, folder) gives the loss on held-out text
    law = study.fit()
    study.check(config_of_depth, depths, 1e13, length, train)

Every run has a fixed budget of arithmetic, spent on a smaller model and more text or the other way
round. What was measured is written down after each run, so a study that was broken off goes on.
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
from unspool.train.scaling.law import FEWEST, Law, Measured, fit
from unspool.train.scaling.side_by_side import side_by_side

ConfigOf = Callable[[int], ModelConfig]


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of a grid: a depth, and as many tokens as its budget pays for."""

    depth: int
    parameters: int
    tokens: int
    flops: float

    @property
    def name(self) -> str:
        return f"d{self.depth}-{self.flops:.4g}".replace("+", "")

    def measured(self, loss: float) -> Measured:
        return Measured(self.parameters, self.tokens, loss, self.flops)


Train = Callable[[Planned, Path], float]


def plan_one(config_of: ConfigOf, depth: int, flops: float, length: int) -> Planned:
    config = config_of(depth)
    tokens = int(flops / training_flops(config, length))
    return Planned(depth, compute_parameters(config), tokens, flops)


def plan(
    config_of: ConfigOf,
    *,
    depths: Sequence[int],
    budgets: Sequence[float],
    length: int,
    fewest: float = 1.0,
    most: float = 1000.0,
    longest: float = math.inf,
) -> list[Planned]:
    """Every size with every budget, cheapest first, but for the hopeless ones: those with less
    than `fewest` or more than `most` tokens for each parameter, or more than `longest` in all, as
    text that is seen again and again teaches less than the law says."""
    every = [plan_one(config_of, depth, flops, length) for flops in budgets for depth in depths]
    every = [run for run in every if run.tokens <= longest]
    kept = [run for run in every if fewest <= run.tokens / run.parameters <= most]
    if not kept:
        shares = [run.tokens / run.parameters for run in every]
        raise SettingsError(
            f"no run of this grid has {fewest:g} to {most:g} tokens for each parameter (they have "
            f"{min(shares):.2g} to {max(shares):.2g}); give other budgets or depths"
            if shares
            else "every run of this grid would see its text too often; give more text, larger "
            "depths or smaller budgets"
        )
    return sorted(kept, key=lambda run: (run.flops, run.depth))


@dataclass(frozen=True, slots=True)
class Check:
    """A run that the law has not seen: what it said, and what came out."""

    run: Planned
    predicted: float
    interval: tuple[float, float] | None
    measured: float

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return self.predicted / self.measured - 1


class Study:
    """A folder with the runs of a grid, and `scaling.json`: what came out of them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.file = self.folder / "scaling.json"
        self.runs: dict[Planned, float] = {}
        self.law: Law | None = None
        self.checked: Check | None = None
        if self.file.exists():
            self._open()

    def measure(
        self,
        grid: Sequence[Planned],
        train: Train,
        told: Callable[[Planned, float], object] = lambda run, loss: None,
        at_once: int = 1,
    ) -> None:
        """Train what has not been trained yet; `told` hears each result, old ones too.

        Small models leave a GPU idle most of the time: `at_once` trains several side by side, each
        in a process of its own (`train` must be such that it can be sent there).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for run in grid:
            if run in self.runs:
                told(run, self.runs[run])
        missing = [run for run in grid if run not in self.runs]
        for run, loss in self._trained(missing, train, at_once):
            self.runs[run] = loss
            self.save()
            told(run, loss)

    def _trained(
        self, missing: Sequence[Planned], train: Train, at_once: int
    ) -> Iterator[tuple[Planned, float]]:
        if at_once < 2 or len(missing) < 2:
            for run in missing:
                yield run, _in_its_folder(train, self.folder, run)
            return
        largest_first = sorted(missing, key=lambda run: -run.flops)
        yield from side_by_side(largest_first, partial(_in_its_folder, train, self.folder), at_once)

    def fit(self, redraws: int = 200) -> Law:
        self.law = fit([run.measured(loss) for run, loss in self.runs.items()], redraws=redraws)
        self.save()
        return self.law

    def left_out(self) -> dict[Planned, float]:
        """The runs of the largest budget as a fit to all the others predicts them, off by so large
        a share: a check of the law that costs no training. Empty where too few runs are left."""
        largest = max(run.flops for run in self.runs)
        others = [run.measured(loss) for run, loss in self.runs.items() if run.flops < largest]
        if len(others) < FEWEST:
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
        """Train the depth that the law calls best for a budget, and compare."""
        if self.law is None:
            raise SettingsError("fit the law before it is checked")
        largest = max(run.flops for run in self.runs)
        if flops <= largest:
            raise SettingsError(
                f"the budget of the check is {flops:g} and the grid's largest {largest:g}; a law "
                "is checked on a run beyond those it was fitted to"
            )
        every = [plan_one(config_of, depth, flops, length) for depth in depths]
        options = [run for run in every if run.tokens <= longest] or every[-1:]
        run = min(options, key=lambda one: self._law.loss(one.parameters, one.tokens))
        loss = (
            self.checked.measured
            if self.checked is not None and self.checked.run == run
            else train(run, self.folder / run.name)
        )
        law = self.law
        self.checked = Check(
            run,
            law.loss(run.parameters, run.tokens),
            law.interval(run.parameters, run.tokens),
            loss,
        )
        self.save()
        return self.checked

    @property
    def _law(self) -> Law:
        assert self.law is not None
        return self.law

    # -- the file -----------------------------------------------------------------------------

    def save(self) -> None:
        write_json(self.file, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "runs": [{**asdict(run), "loss": loss} for run, loss in self.runs.items()]
        }
        if self.law is not None:
            found["law"] = {**self.law.to_dict(), "redraws": [list(r) for r in self.law.redraws]}
        if self.checked is not None:
            found["check"] = {**asdict(self.checked), "error": self.checked.error}
        return found

    def _open(self) -> None:
        try:
            found = json.loads(self.file.read_text(encoding="utf-8"))
            for row in found["runs"]:
                loss = row.pop("loss")
                self.runs[Planned(**row)] = loss
            if "law" in found:
                numbers = {n: found["law"][n] for n in ("e", "a", "alpha", "b", "beta", "error")}
                self.law = Law(**numbers, redraws=tuple(map(tuple, found["law"]["redraws"])))
            if "check" in found:
                row = found["check"]
                ends = tuple(row["interval"]) if row["interval"] else None
                self.checked = Check(Planned(**row["run"]), row["predicted"], ends, row["measured"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UnspoolError(
                f"{self.file} cannot be read as a study of scaling ({error}); move it away"
            ) from None


def _in_its_folder(train: Train, folder: Path, run: Planned) -> float:
    return train(run, folder / run.name)
