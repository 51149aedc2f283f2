"""Checkpoints of a run: atomic folders, retention rules, exact resuming.

A checkpoint is a normal model folder with training.json beside the weights. The newest one also has
`state/`: weights and optimizer state as in memory. Together with the step number this resumes
training exactly: batches, random numbers and learning rates are functions of the step.

A folder is written under a temporary name, synced to disk and renamed, so the last checkpoint is
complete whenever a process dies. With several processes, every stage waits for all of them: the
folder is renamed only when all shards are in it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unspool.train.running.parallel import Parallel, first_row
from unspool.train.running.runs import (
    Run,
    RunError,
    milestone_steps,
    read_json,
    sync_folder,
    sync_tree,
    write_json,
)


def training_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Trained weights and optimizer state by name; sharded tensors stay sharded."""
    state = {
        f"model.{name}": parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    names: dict[Any, str] = {value: name for name, value in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                state[f"optimizer.{number}.{key}.{names[parameter]}"] = value
    return state


def write_state(folder: Path, state: Mapping[str, Tensor], parallel: Parallel) -> None:
    """Write and sync this process's part; every process must call it."""
    from safetensors.torch import save_file

    parts = parallel.world_size if parallel.shard else 1
    if parallel.rank >= parts:
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            value = value.to_local()
            if not len(value):  # fewer rows than processes
                continue
        elif not parallel.is_first:  # replicated: the first process writes it
            continue
        tensors[name] = value.cpu().contiguous()
    path = folder / _part_name(parallel.rank, parts)
    save_file(tensors, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    if parallel.is_first:
        write_json(folder / "state.json", {"tensors": len(tensors), "parts": parts})


def _part_name(rank: int, parts: int) -> str:
    if parts == 1:
        return "state.safetensors"
    return f"state-{rank + 1:05}-of-{parts:05}.safetensors"


def read_state(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Load weights and optimizer state in place; each process loads its own rows."""
    parameters = dict(model.named_parameters())
    with _StateParts(folder) as parts:
        trained = {f"model.{name}" for name, value in parameters.items() if value.requires_grad}
        if {name for name in parts.names if name.startswith("model.")} != trained:
            raise RunError(
                f"{folder.parent}: belongs to another model than this one; use the settings that "
                "the run was started with"
            )
        for name in parts.names:
            kind, _, path = name.partition(".")
            if kind == "model":
                parts.copy_to(parameters[path], name)
                continue
            number, key, owner = path.split(".", 2)
            _load_optimizer_state(optimizers[int(number)], parameters[owner], key, parts, name)


def _load_optimizer_state(
    optimizer: Optimizer, parameter: nn.Parameter, key: str, parts: _StateParts, name: str
) -> None:
    if parts.shape(name) != tuple(parameter.shape):  # AdamW's step count
        device = parameter.device if parameter.is_cuda else torch.device("cpu")
        optimizer.state[parameter][key] = parts.full_tensor(name).to(device)
        return
    value = torch.zeros_like(parameter, requires_grad=False)
    parts.copy_to(value, name)
    optimizer.state[parameter][key] = value


class _StateParts(ExitStack):
    """The files of one state, read as if they were one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from safetensors import safe_open

        count = int(read_json(folder / "state.json").get("parts", 1))
        paths = [folder / _part_name(rank, count) for rank in range(count)]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise RunError(
                f"{folder}: {', '.join(missing)} is missing; all machines must share the disk of "
                "the run folder"
            )
        self._files: dict[str, list[Any]] = {}  # the parts with rows of a tensor, in order
        for path in paths:
            file = self.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  not a dict
                self._files.setdefault(name, []).append(file)
        self.names = sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [file.get_slice(name).get_shape() for file in self._files[name]]
        if not shapes[0]:
            return ()
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def full_tensor(self, name: str) -> Tensor:
        parts: list[Tensor] = [file.get_tensor(name) for file in self._files[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.no_grad()
    def copy_to(self, target: Tensor, name: str) -> None:
        """Fill a tensor, or this process's rows of a sharded one."""
        if self.shape(name) != tuple(target.shape):
            raise RunError(f"{name} has shape {self.shape(name)}, expected {tuple(target.shape)}")
        local = target.to_local() if isinstance(target, DTensor) else target
        if local.ndim == 0:
            local.copy_(self.full_tensor(name))
            return
        start = first_row(target)
        end, part_start = start + len(local), 0
        for file in self._files[name]:
            rows = file.get_slice(name)
            part_end = part_start + rows.get_shape()[0]
            low, high = max(start, part_start), min(end, part_end)
            if low < high:
                local[low - start : high - start].copy_(rows[low - part_start : high - part_start])
            part_start = part_end


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
        self, facts: Mapping[str, Any], weights: Mapping[str, Tensor], state: Mapping[str, Tensor]
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

        Milestones (`milestone_steps`), the best on held-out text and the newest `keep` others stay.
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
