"""Optimizers: Muon for the matrices inside the layers, AdamW for everything else.

Muon (https://kellerjordan.github.io/posts/muon/) replaces a matrix's update by the nearest one
that turns all directions alike, so that rare directions are learned too. Its learning rate is
scaled as in arXiv 2502.16982, by which the numbers of an update have AdamW's usual size: one
learning rate is right for both.

`schedule` gives the share of the learning rate in each step: warm-up, constant, decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from unspool.train.learning.orthogonal import turned


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates and what else the optimizers want to know."""

    matrices: float = 4e-3
    embedding: float = 4e-3  # the output head too, where it is the same table
    head: float = 4e-3
    vectors: float = 4e-3  # norms and biases
    weight_decay: float = 0.1  # of matrices
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)

    def times(self, factor: float) -> Rates:
        """The same proportions, faster or slower."""
        return replace(
            self,
            matrices=self.matrices * factor,
            embedding=self.embedding * factor,
            head=self.head * factor,
            vectors=self.vectors * factor,
        )


Kind = Literal["muon", "adamw"]


def make_optimizers(model: nn.Module, rates: Rates, kind: Kind = "muon") -> list[Optimizer]:
    """The optimizers of all weights that are to be trained."""
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
    found: list[Optimizer] = [_adamw(others, rates)] if any(g["params"] for g in others) else []
    if groups["matrices"]:
        found.append(Muon([matrices], momentum=rates.momentum))
    return found


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Trainable weights by what they are: matrices (of layers), embedding, head, vectors."""
    found: dict[str, list[nn.Parameter]] = {
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
        found[kind].append(parameter)
    return found


def _adamw(groups: list[dict[str, Any]], rates: Rates) -> AdamW:
    filled = [group for group in groups if group["params"]]
    return AdamW(filled, betas=rates.betas, eps=1e-10, fused=True)


class Muon(Optimizer):
    """Momentum, made orthogonal.

    The same numbers as `torch.optim.Muon` with `match_rms_adamw`. That one computes in bfloat16
    always, which most CPUs do not have (several hundred times slower); here a CPU uses float32, and
    matrices of one shape are turned together, also those of experts, which lie in three axes.
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
                    _like(parameter, update.to(parameter.dtype))
                    for parameter, update in zip(parameters, turned(directions), strict=True)
                ]
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, updates, alpha=-size)

    def _directions(self, parameters: list[Tensor], momentum: float) -> list[Tensor]:
        """Where the momentum points one step ahead (Nesterov)."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        past = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(past, gradients, 1 - momentum)
        torch._foreach_lerp_(gradients, past, momentum)  # they are of no use any more
        return gradients


def _like(parameter: Tensor, update: Tensor) -> Tensor:
    """An update of the rows that this process has, as its matrix is spread."""
    if not isinstance(parameter, DTensor):
        return update
    return DTensor.from_local(
        update, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up, constant, decay: the share of the learning rate in each step (arXiv 2404.06395).

    The constant part can be gone on from with more steps, which a cosine cannot.
    """

    steps: int
    warmup: int = 0  # steps
    decay: float = 0.4  # share of the steps, at the end
    floor: float = 0.0  # what is left in the last step

    def __call__(self, step: int) -> float:
        """For the step after `step` steps are done."""
        up = min(1.0, (step + 1) / (self.warmup + 1))
        length = max(1, round(self.steps * self.decay))
        down = min(1.0, max(0, self.steps - step) / length)
        return up * (self.floor + (1 - self.floor) * down)


def set_rates(optimizers: Sequence[Optimizer], share: float) -> None:
    """Every group's learning rate, as a share of the one it was made with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * share
