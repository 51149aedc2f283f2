"""Checkpoints of a run: whole folders that appear at once, kept by rule, gone on from exactly.

A checkpoint is a model folder like any other, with training.json beside the weights. The newest has
`state/` too: weights and optimizer as they are in memory, under our own names (`state.py`). With
those and the number of the step training goes on as if it had never stopped: batches, random
numbers and learning rates are all functions of that number.

A folder is written beside its place, brought to the disk, and renamed. Whenever a process dies,
the last checkpoint is whole. Where several processes write parts of it, each step is gone on from
only when all have done theirs, so a folder is renamed only if every part is in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unspool.train.running.atomic import sync_folder, sync_tree, write_json
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run, Saved, film_steps, read_json
from unspool.train.running.state import read_state, write_state

SaveModel = Callable[[Mapping[str, Tensor], Path], None]  # weights by our names, into a folder


class Checkpoints:
    """The checkpoints of one run, written by the processes that train."""

    def __init__(
        self, run: Run, save_model: SaveModel, keep: int = 2, parallel: Parallel | None = None
    ) -> None:
        self.run, self.keep, self._save_model = run, keep, save_model
        self._parallel = parallel or Parallel.alone("cpu")
        self._folder = run.folder / "checkpoints"
        if self._parallel.first:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._tidy()

    def _tidy(self) -> None:
        """Put in order what a process left that died."""
        for left in self._folder.glob(".*"):
            target = left.with_name(left.name.split(".")[1])
            if left.suffix == ".old" and not target.exists():  # died while it was replaced
                left.rename(target)
            else:
                shutil.rmtree(left, ignore_errors=True)

    def save(
        self,
        facts: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> Path:
        """A checkpoint of step `facts["step"]`, by all processes together; older ones go as the
        rule says. `weights` are needed by the first process only."""
        target = self._folder / f"{facts['step']:06}"
        part = target.with_name(f".{target.name}.part")
        first = self._parallel.first
        try:
            with self._parallel.agreed():
                if first:
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir()
                    self._save_model(weights, part)
                    write_json(part / "training.json", dict(facts))
            with self._parallel.agreed():
                write_state(part / "state", state, self._parallel)
            with self._parallel.agreed():
                if first:
                    self._put_in_place(part, target)
        except BaseException:
            if first:
                shutil.rmtree(part, ignore_errors=True)
            raise
        return target

    def _put_in_place(self, part: Path, target: Path) -> None:
        sync_tree(part)
        if target.exists():  # the same step once more, after going on from an older one
            old = target.with_name(f".{target.name}.old")
            target.rename(old)
            shutil.rmtree(old)
        part.rename(target)
        sync_folder(self._folder)
        self._clean_up(target)

    def _clean_up(self, newest: Path) -> None:
        """Only the newest keeps its state; beside the film's frames and the best on held-out text
        only the newest few stay."""
        saved = self.run.checkpoints()
        kept_steps = {*film_steps(self.run.steps), self.run.best_step}
        others = [each for each in saved if each.step not in kept_steps]
        for each in saved:
            if each.folder != newest and (each.folder / "state").exists():
                (each.folder / "state" / "state.json").unlink(missing_ok=True)
                shutil.rmtree(each.folder / "state", ignore_errors=True)
        for each in others[: max(0, len(others) - self.keep)]:
            gone = each.folder.with_name(f".{each.folder.name}.gone")
            each.folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def finish(self, step: int) -> None:
        """Record which checkpoint is the run's result: the best on held-out text, else `step`."""
        best_step = self.run.best_step
        result = step if best_step is None else best_step
        write_json(self.run.folder / "final.json", {"checkpoint": f"checkpoints/{result:06}"})


def restore(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Put weights and optimizers back as they were; gives training.json."""
    read_state(folder / "state", model, optimizers)
    return read_json(folder / "training.json")


def newest(run: Run, parallel: Parallel) -> Path | None:
    """The checkpoint to go on from, the same for all processes: the first one says which."""
    saved: Saved | None = run.resumable() if parallel.first else None
    name = parallel.told(saved.folder.name if saved is not None else "")
    return run.folder / "checkpoints" / name if name else None
