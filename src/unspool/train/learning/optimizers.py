"""Optimizers: Muon for the matrices inside the layers, AdamW for everything else.

Muon (https://kellerjordan.github.io/posts/muon/) replaces a matrix's update by the nearest
orthogonal matrix, so that rare directions are learned too. Its learning rate is scaled as in
arXiv 2502.16982: updates have the usual RMS of AdamW, so one learning rate suits both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

# Polynomial that moves the singular values towards 1, and how often it is applied.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonal(matrices: Tensor) -> Tensor:
    """Approximate nearest orthogonal matrices: singular values near 1."""
    x = _to_compute_dtype(matrices)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    batch = x.flatten(0, -3)
    batch = batch / batch.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = batch @ batch.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        batch = torch.baddbmm(batch, update, batch, beta=a)
    x = batch.view(x.shape)
    return x.mT if tall else x


def _to_compute_dtype(matrices: Tensor) -> Tensor:
    return matrices.bfloat16() if matrices.is_cuda else matrices.float()


def orthogonalize(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Nearest orthogonal matrices of matrices of one shape; of sharded ones the local rows."""
    first = matrices[0]
    if not isinstance(first, DTensor):
        return list(orthogonal(torch.stack(list(matrices))))
    local = [matrix.to_local() for matrix in matrices if isinstance(matrix, DTensor)]
    if first.ndim > 2:  # experts are sharded as full matrices
        return list(orthogonal(torch.stack(local))) if local[0].numel() else local
    return _orthogonalize_sharded(local, len(first), first.device_mesh.get_group())


def _orthogonalize_sharded(
    local: list[Tensor], rows: int, group: dist.ProcessGroup
) -> list[Tensor]:
    """The local rows of each result; process r of W computes matrices r, r + W, ..."""
    world, rank = group.size(), group.rank()
    columns, count = local[0].shape[1], len(local)
    shard_rows = -(-rows // world)
    rows_of = [min(rows, (r + 1) * shard_rows) - min(rows, r * shard_rows) for r in range(world)]
    num_owned = [len(range(r, count, world)) for r in range(world)]  # matrices by process
    ordered = [matrix for r in range(world) for matrix in local[r::world]]
    to_owners = [num_owned[r] * rows_of[rank] * columns for r in range(world)]
    from_all = [num_owned[rank] * rows_of[r] * columns for r in range(world)]

    def exchange(values: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        received = values.new_empty(sum(receive_sizes))
        dist.all_to_all_single(received, values, receive_sizes, send_sizes, group=group)
        return received

    shards = _to_compute_dtype(torch.stack(ordered)).reshape(-1)
    pieces = exchange(shards, to_owners, from_all).split(from_all)
    results = shards.new_empty(0)
    if num_owned[rank]:
        owned = [
            piece.view(num_owned[rank], r, columns)
            for piece, r in zip(pieces, rows_of, strict=True)
        ]
        full = orthogonal(torch.cat(owned, 1))
        results = torch.cat([part.reshape(-1) for part in full.split(rows_of, 1)])
    local_results = exchange(results, from_all, to_owners).view(count, rows_of[rank], columns)
    order = [n for r in range(world) for n in range(r, count, world)]
    by_number = dict(zip(order, local_results, strict=True))
    return [by_number[n] for n in range(count)]


@dataclass(frozen=True, slots=True)
class Rates:
    """Hyperparameters of the optimizers."""

    matrices: float = 4e-3
    embedding: float = 4e-3  # also the output head, if tied
    head: float = 4e-3
    vectors: float = 4e-3  # norms and biases
    weight_decay: float = 0.1  # of matrices
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)

    def times(self, factor: float) -> Rates:
        """All learning rates multiplied by `factor`."""
        return replace(
            self,
            matrices=self.matrices * factor,
            embedding=self.embedding * factor,
            head=self.head * factor,
            vectors=self.vectors * factor,
        )


Kind = Literal["muon", "adamw"]


def make_optimizers(model: nn.Module, rates: Rates, kind: Kind = "muon") -> list[Optimizer]:
    """Optimizers for all trainable parameters of a model."""
    groups = parameter_groups(model)
    others: list[dict[str, Any]] = [
        {"params": groups["embedding"], "lr": rates.embedding, "weight_decay": 0.0},
        {"params": groups["head"], "lr": rates.head, "weight_decay": 0.0},
        {"params": groups["vectors"], "lr": rates.vectors, "weight_decay": 0.0},
    ]
    matrices = {
        "params": groups["matrices"], "lr": rates.matrices, "weight_decay": rates.weight_decay
    }  # fmt: skip
    if kind == "adamw":
        return [_adamw([matrices, *others], rates)]
    optimizers: list[Optimizer] = []
    if any(group["params"] for group in others):
        optimizers.append(_adamw(others, rates))
    if groups["matrices"]:
        optimizers.append(Muon([matrices], momentum=rates.momentum))
    return optimizers


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Trainable parameters by kind: matrices (of layers), embedding, head, vectors."""
    groups: dict[str, list[nn.Parameter]] = {
        "matrices": [], "embedding": [], "head": [], "vectors": []
    }  # fmt: skip
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or name.endswith(".conv.weight"):
            kind = "vectors"
        elif "embed" in name:
            kind = "embedding"
        elif name.startswith("head") or name.endswith("router.weight"):
            kind = "head"
        else:
            kind = "matrices"
        groups[kind].append(parameter)
    return groups


def _adamw(groups: list[dict[str, Any]], rates: Rates) -> AdamW:
    non_empty = [group for group in groups if group["params"]]
    return AdamW(non_empty, betas=rates.betas, eps=1e-10, fused=True)


class Muon(Optimizer):
    """Orthogonalized momentum.

    The same results as `torch.optim.Muon` with `match_rms_adamw`, which always computes in bfloat16
    (several hundred times slower on most CPUs). Here a CPU uses float32, and matrices of one shape
    are processed in one batch, expert matrices with three axes included.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(tuple(parameter.shape), []).append(parameter)
            for shape, parameters in shapes.items():
                directions = self._directions(parameters, group["momentum"])
                size = group["lr"] * 0.2 * math.sqrt(max(shape[-2:]))
                updates = [
                    _shard_like(parameter, update.to(parameter.dtype))
                    for parameter, update in zip(parameters, orthogonalize(directions), strict=True)
                ]
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, updates, alpha=-size)

    def _directions(self, parameters: list[Tensor], momentum: float) -> list[Tensor]:
        """Nesterov momentum of each parameter; reuses the memory of the gradients."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        torch._foreach_lerp_(gradients, buffers, momentum)
        return gradients


def _shard_like(parameter: Tensor, update: Tensor) -> Tensor:
    """An update of this process's rows, as a DTensor if the parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return update
    return DTensor.from_local(
        update, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warmup-stable-decay schedule: the learning rate factor of each step (arXiv 2404.06395).

    Unlike a cosine, the constant part can be extended with more steps.
    """

    steps: int
    warmup: int = 0  # steps
    decay: float = 0.4  # share of the steps, at the end
    floor: float = 0.0  # factor of the last step

    def __call__(self, step: int) -> float:
        """Factor of the step after `step` completed steps."""
        up = min(1.0, (step + 1) / (self.warmup + 1))
        length = max(1, round(self.steps * self.decay))
        down = min(1.0, max(0, self.steps - step) / length)
        return up * (self.floor + (1 - self.floor) * down)


def set_rates(optimizers: Sequence[Optimizer], share: float) -> None:
    """Set the learning rate of every group to `share` of its initial one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * share
