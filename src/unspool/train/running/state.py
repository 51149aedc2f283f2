"""What training goes on from: weights and optimizer as they are in memory, in safetensors.

A process alone writes one file. Where the model is spread over processes (FSDP), each writes the
rows that it has into a part of its own, so that no process ever holds all of it:

    state.json                            how many parts there are
    state-00001-of-00002.safetensors      the first rows of every tensor
    state-00002-of-00002.safetensors      the rows behind them

A tensor is its rows in all parts, one behind the other. Whoever reads takes the rows that it needs
from whichever parts hold them: one process all of them, four processes a quarter each.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unspool.train.running.atomic import write_json
from unspool.train.running.parallel import Parallel, first_row
from unspool.train.running.runs import RunError, read_json


def training_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All that training changes, under names; of what is spread over processes, a part."""
    found = {
        f"model.{name}": parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    names: dict[Any, str] = {value: name for name, value in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                found[f"optimizer.{number}.{key}.{names[parameter]}"] = value
    return found


def write_state(folder: Path, state: Mapping[str, Tensor], parallel: Parallel) -> None:
    """This process's part, brought to the disk; every process must write its own."""
    from safetensors.torch import save_file

    parts = parallel.world if parallel.shard else 1
    if parallel.rank >= parts:
        return
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            own = value.to_local()
            if not len(own):  # fewer rows than processes
                continue
        elif parallel.first:
            own = value
        else:  # alike everywhere
            continue
        tensors[name] = own.cpu().contiguous()
    path = folder / _name(parallel.rank, parts)
    save_file(tensors, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    if parallel.first:
        write_json(folder / "state.json", {"tensors": len(tensors), "parts": parts})


def _name(rank: int, parts: int) -> str:
    if parts == 1:
        return "state.safetensors"
    return f"state-{rank + 1:05}-of-{parts:05}.safetensors"


def read_state(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Put weights and optimizers back as they were, each process what it has of them."""
    parameters = dict(model.named_parameters())
    with _Parts(folder) as parts:
        trained = {f"model.{name}" for name, each in parameters.items() if each.requires_grad}
        if {name for name in parts.names if name.startswith("model.")} != trained:
            raise RunError(
                f"{folder.parent}: was saved of another model than this one; give the settings "
                "that the run was started with"
            )
        for name in parts.names:
            kind, _, rest = name.partition(".")
            if kind == "model":
                parts.put(parameters[rest], name)
                continue
            number, key, owner = rest.split(".", 2)
            _put_state(optimizers[int(number)], parameters[owner], key, parts, name)


def _put_state(
    optimizer: Optimizer, parameter: nn.Parameter, key: str, parts: _Parts, name: str
) -> None:
    if parts.shape(name) != tuple(parameter.shape):  # AdamW's count of steps
        where = parameter.device if parameter.is_cuda else torch.device("cpu")
        optimizer.state[parameter][key] = parts.whole(name).to(where)
        return
    place = torch.zeros_like(parameter, requires_grad=False)
    parts.put(place, name)
    optimizer.state[parameter][key] = place


class _Parts(ExitStack):
    """The files of one state, read as if they were one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from safetensors import safe_open

        count = int(read_json(folder / "state.json").get("parts", 1))
        paths = [folder / _name(rank, count) for rank in range(count)]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise RunError(
                f"{folder}: lacks {', '.join(missing)}; every machine must see the run's folder, "
                "on a disk that they share"
            )
        self._where: dict[str, list[Any]] = {}  # the parts that have rows of a tensor, in order
        for path in paths:
            file = self.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118  no dictionary
                self._where.setdefault(name, []).append(file)
        self.names = sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        shapes = [file.get_slice(name).get_shape() for file in self._where[name]]
        if not shapes[0]:
            return ()
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def whole(self, name: str) -> Tensor:
        parts: list[Tensor] = [file.get_tensor(name) for file in self._where[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.no_grad()
    def put(self, target: Tensor, name: str) -> None:
        """Fill a tensor, or the rows of it that this process has."""
        if self.shape(name) != tuple(target.shape):
            raise RunError(f"{name} has the shape {self.shape(name)}, not {tuple(target.shape)}")
        own = target.to_local() if isinstance(target, DTensor) else target
        if own.ndim == 0:
            own.copy_(self.whole(name))
            return
        begin = first_row(target)
        end, at = begin + len(own), 0
        for file in self._where[name]:
            rows = file.get_slice(name)
            last = at + rows.get_shape()[0]
            low, high = max(begin, at), min(end, last)
            if low < high:
                own[low - begin : high - begin].copy_(rows[low - at : high - at])
            at = last
