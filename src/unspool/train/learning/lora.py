"""LoRA over the plain transformer: a few trained numbers beside every frozen matrix.

    add_lora(model, Lora(rank=16))          # freezes the model, adds trainable down and up
    adapter = adapter_of(model)             # what was trained, to be saved or served
    merge(model, adapter)                   # into the weights of a model without LoRA

A matrix W becomes W + scale * up @ down (arXiv 2106.09685). `up` begins with zeros, so that
training begins at the model itself, and `down` with PEFT's random numbers.

The model's own weights are needed as floats for products and gradients, so those of a quantized
checkpoint are unpacked once, when it is loaded. Packed ones would have to be unpacked again twice
in every step; what is trained, and the optimizer's state, is small either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.errors import SettingsError
from unspool.model.adapters import Adapter, Floats, LowRank, adaptable
from unspool.model.transformer import Transformer

# Our matrices by the names that people know them by.
TARGETS = {
    "q": "attention.q", "k": "attention.k", "v": "attention.v", "o": "attention.out",
    "gate": "feed.gate", "up": "feed.up", "down": "feed.down",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """What is added to which matrices."""

    rank: int = 16
    alpha: float | None = None  # the scale is alpha / rank; None: twice the rank
    dropout: float = 0.0
    targets: tuple[str, ...] = tuple(TARGETS)
    layers: int | None = None  # only in so many last ones: gradients need go no further down

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise SettingsError(
                f"LoRA cannot be added to {', '.join(unknown) or 'nothing'}; choose from "
                f"{', '.join(TARGETS)}"
            )
        if self.rank < 1 or not 0 <= self.dropout < 1:
            raise SettingsError(
                f"the rank is {self.rank} and dropout {self.dropout}; the rank must be at least 1, "
                "and dropout from 0 to below 1"
            )

    @property
    def scale(self) -> float:
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


class LoraLinear(nn.Linear):
    """A frozen matrix with something trained beside it. The weight keeps its place and name."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        with torch.device("meta"):  # no memory: the weights are the base's
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        like = partial(torch.empty, device=base.weight.device, dtype=torch.float32)
        self.down = nn.Parameter(like(lora.rank, base.in_features))
        self.up = nn.Parameter(torch.zeros_like(like(base.out_features, lora.rank)))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.scale, self.dropout = lora.scale, lora.dropout
        self.is_on = True

    def forward(self, input: Tensor) -> Tensor:
        product = super().forward(input)
        if not self.is_on:
            return product
        x = functional.dropout(input, self.dropout, self.training) if self.dropout else input
        low = functional.linear(x.to(self.down.dtype), self.down * self.scale)
        return product + functional.linear(low, self.up).to(product.dtype)


def add_lora(model: Transformer, lora: Lora, *, seed: int = 0) -> None:
    """Freeze a model and add LoRA to it; the random numbers follow from the seed."""
    model.requires_grad_(False)
    ends = tuple(f".{TARGETS[name]}.weight" for name in lora.targets)
    first = model.config.layers - (lora.layers or model.config.layers)
    names = [
        name
        for name in adaptable(model.config)
        if name.endswith(ends) and int(name.split(".")[1]) >= first
    ]
    if not names:
        raise SettingsError("the model has none of the matrices that LoRA was to be added to")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in names:
            parent, _, last = name.removesuffix(".weight").rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, last, LoraLinear(getattr(owner, last), lora))


def lora_modules(model: Transformer) -> Iterator[tuple[str, LoraLinear]]:
    """What `add_lora` added, by our names of the matrices."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield f"{name}.weight", module


def switch_lora(model: Transformer, on: bool) -> None:
    """Let the model compute with what was added, or as it was before."""
    for _, module in lora_modules(model):
        module.is_on = on


def adapter_of(model: Transformer, base: str = "") -> Adapter:
    """What was trained, as it is now."""
    parts = {
        name: LowRank(_host(module.down), _host(module.up), module.scale)
        for name, module in lora_modules(model)
    }
    return Adapter(parts, base)


def put_adapter(model: Transformer, adapter: Adapter) -> None:
    """Go on from an adapter that was trained before, of the same rank and matrices."""
    modules = dict(lora_modules(model))
    ranks = {name: part.rank for name, part in adapter.parts.items()}
    if ranks != {name: len(module.down) for name, module in modules.items()}:
        raise SettingsError(
            "the adapter to go on from has another rank, or adds to other matrices; give the same "
            "--lora and --targets as when it was trained"
        )
    with torch.no_grad():
        for name, module in modules.items():
            part = adapter.parts[name]
            module.down.copy_(torch.from_numpy(part.down))
            module.up.copy_(torch.from_numpy(part.up) * (part.scale / module.scale))


def merge(model: Transformer, adapter: Adapter) -> None:
    """Add an adapter to the weights themselves."""
    with torch.no_grad():
        for name, part in adapter.parts.items():
            weight = model.get_parameter(name)
            weight.add_(torch.from_numpy(part.delta()).to(weight))


def _host(parameter: Tensor) -> Floats:
    return parameter.detach().float().cpu().numpy().copy()
