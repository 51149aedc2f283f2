"""Checkpoints of a run: atomic folders, retention rules, exact resuming.

A checkpoint is a normal model folder with training.json beside the weights. The newest one also has
`state/`: weights and optimizer state as in memory. Together with the step number this resumes
training exactly: batches, random numbers and learning rates are functions of the step.

A folder is written under a temporary name, synced to disk and renamed, so the last checkpoint is
complete whenever a process dies. With several processes, every stage waits for all of them: the
folder is renamed only when all shards are in it.
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
from unspool.train.running.runs import Run, milestone_steps, read_json
from unspool.train.running.state import read_state, write_state

SaveModel = Callable[[Mapping[str, Tensor], Path], None]  # (weights by name, target folder)


class Checkpoints:
    """Writes the checkpoints of one run; used by all training processes together."""

    def __init__(
        self, run: Run, save_model: SaveModel, keep: int = 2, parallel: Parallel | None = None
    ) -> None:
        self.run, self.keep, self._save_model = run, keep, save_model
        self._parallel = parallel or Parallel.single_process("cpu")
        self._folder = run.folder / "checkpoints"
        if self._parallel.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._tidy()

    def _tidy(self) -> None:
        """Clean up after a process that died while saving."""
        for path in self._folder.glob(".*"):
            target = path.with_name(path.name.split(".")[1])
            if path.suffix == ".old" and not target.exists():  # died while replacing it
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def save(
        self,
        facts: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
    ) -> Path:
        """Write the checkpoint of step `facts["step"]` and delete old ones.

        Every process must call it; only the first one needs `weights`.
        """
        target = self._folder / f"{facts['step']:06}"
        part = target.with_name(f".{target.name}.part")
        first = self._parallel.is_first
        try:
            with self._parallel.all_succeed():
                if first:
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir()
                    self._save_model(weights, part)
                    write_json(part / "training.json", dict(facts))
            with self._parallel.all_succeed():
                write_state(part / "state", state, self._parallel)
            with self._parallel.all_succeed():
                if first:
                    self._put_in_place(part, target)
        except BaseException:
            if first:
                shutil.rmtree(part, ignore_errors=True)
            raise
        return target

    def _put_in_place(self, part: Path, target: Path) -> None:
        sync_tree(part)
        if target.exists():  # the same step again, after resuming from an older checkpoint
            old = target.with_name(f".{target.name}.old")
            target.rename(old)
            shutil.rmtree(old)
        part.rename(target)
        sync_folder(self._folder)
        self._clean_up(target)

    def _clean_up(self, newest: Path) -> None:
        """Delete old checkpoints, and the optimizer state of all but the newest.

        Milestones (`film_steps`), the best on held-out text and the newest `keep` others stay.
        """
        checkpoints = self.run.checkpoints()
        permanent = {*milestone_steps(self.run.steps), self.run.best_step}
        others = [checkpoint for checkpoint in checkpoints if checkpoint.step not in permanent]
        for checkpoint in checkpoints:
            state = checkpoint.folder / "state"
            if checkpoint.folder != newest and state.exists():
                (state / "state.json").unlink(missing_ok=True)
                shutil.rmtree(state, ignore_errors=True)
        for checkpoint in others[: max(0, len(others) - self.keep)]:
            doomed = checkpoint.folder.with_name(f".{checkpoint.folder.name}.gone")
            checkpoint.folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def finish(self, step: int) -> None:
        """Record which checkpoint is the run's result: the best on held-out text, else `step`."""
        best_step = self.run.best_step
        result = step if best_step is None else best_step
        write_json(self.run.folder / "final.json", {"checkpoint": f"checkpoints/{result:06}"})


def restore(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Load weights and optimizer state from a checkpoint; returns its training.json."""
    read_state(folder / "state", model, optimizers)
    return read_json(folder / "training.json")


def newest_checkpoint(run: Run, parallel: Parallel) -> Path | None:
    """The checkpoint to resume from; the first process decides for all."""
    checkpoint = run.resumable_checkpoint() if parallel.is_first else None
    name = parallel.broadcast_str(checkpoint.folder.name if checkpoint is not None else "")
    return run.folder / "checkpoints" / name if name else None
