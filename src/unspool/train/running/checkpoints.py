"""Checkpoints of a run: whole folders that appear at once, kept by rule, gone on from exactly.

A checkpoint is a model folder like any other, with training.json beside the weights. The newest has
`state/` too: weights and optimizer as they are in memory, under our own names, in safetensors. With
those and the number of the step training goes on as if it had never stopped: batches, random
numbers and learning rates are all functions of that number.

A folder is written beside its place, brought to the disk, and renamed. Whenever the process dies,
the last checkpoint is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unspool.train.running.atomic import sync_folder, sync_tree, write_json
from unspool.train.running.parallel import put, whole
from unspool.train.running.runs import Run, RunError, Saved, film_steps

SaveModel = Callable[[Mapping[str, Tensor], Path], None]  # weights by our names, into a folder


class Checkpoints:
    """The checkpoints of one run, written by the process that trains."""

    def __init__(self, run: Run, save_model: SaveModel, keep: int = 2) -> None:
        self.run, self.keep, self._save_model = run, keep, save_model
        self._folder = run.folder / "checkpoints"
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
        state: Mapping[str, Any],
    ) -> Path:
        """A checkpoint of step `facts["step"]`; older ones go as the rule says."""
        target = self._folder / f"{facts['step']:06}"
        part = target.with_name(f".{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            self._write(part, facts, weights, state)
            sync_tree(part)
            if target.exists():  # the same step once more, after going on from an older one
                old = target.with_name(f".{target.name}.old")
                target.rename(old)
                shutil.rmtree(old)
            part.rename(target)
            sync_folder(self._folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        self._clean_up(target)
        return target

    def _write(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> None:
        folder.mkdir()
        self._save_model(weights, folder)
        write_json(folder / "training.json", dict(facts))
        write_state(folder / "state", state)

    def _clean_up(self, newest: Path) -> None:
        """Only the newest keeps its state; beside the film's frames only the newest few stay."""
        saved = self.run.checkpoints()
        film = set(film_steps(self.run.steps))
        others = [each for each in saved if each.step not in film]
        for each in saved:
            if each.folder != newest and (each.folder / "state").exists():
                (each.folder / "state" / "state.json").unlink(missing_ok=True)
                shutil.rmtree(each.folder / "state", ignore_errors=True)
        for each in others[: max(0, len(others) - self.keep)]:
            gone = each.folder.with_name(f".{each.folder.name}.gone")
            each.folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def finish(self, step: int) -> None:
        """Say which checkpoint is the finished model."""
        write_json(self.run.folder / "final.json", {"checkpoint": f"checkpoints/{step:06}"})


# -- the state ------------------------------------------------------------------------------


def training_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All that training changes, under names: every process must ask."""
    found = {
        f"model.{name}": whole(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    names: dict[Any, str] = {value: name for name, value in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                found[f"optimizer.{number}.{key}.{names[parameter]}"] = whole(value)
    return found


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    tensors = {name: value.cpu().contiguous() for name, value in state.items()}
    save_file(tensors, folder / "state.safetensors")
    write_json(folder / "state.json", {"tensors": len(tensors)})


def restore(saved: Saved, model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Put weights and optimizers back as they were; gives training.json."""
    from safetensors import safe_open

    path = saved.folder / "state" / "state.safetensors"
    parameters = dict(model.named_parameters())
    with safe_open(path, framework="pt") as file:
        names = sorted(file.keys())  # in one order on all processes
        trained = {f"model.{name}" for name, each in parameters.items() if each.requires_grad}
        if {name for name in names if name.startswith("model.")} != trained:
            raise RunError(
                f"{saved.folder}: was saved of another model than this one; give the settings that "
                "the run was started with"
            )
        for name in names:
            kind, _, rest = name.partition(".")
            if kind == "model":
                put(parameters[rest], file.get_tensor(name))
                continue
            number, key, owner = rest.split(".", 2)
            _put_state(optimizers[int(number)], parameters[owner], key, file.get_tensor(name))
    facts: dict[str, Any] = json.loads((saved.folder / "training.json").read_text("utf-8"))
    return facts


def _put_state(optimizer: Optimizer, parameter: nn.Parameter, key: str, value: Tensor) -> None:
    if value.shape != parameter.shape:  # AdamW's count of steps
        where = parameter.device if parameter.is_cuda else torch.device("cpu")
        optimizer.state[parameter][key] = value.to(where)
        return
    place = torch.zeros_like(parameter, requires_grad=False)
    put(place, value)
    optimizer.state[parameter][key] = place
