"""LoRA training: trainable low-rank matrices beside frozen weights.

    add_lora(model, Lora(rank=16))          # freezes the model, adds trainable down and up
    adapter = adapter_of(model)             # the trained adapter, to be saved or served
    merge(model, adapter)                   # into the weights of a model without LoRA

A matrix W becomes W + scale * up @ down (arXiv 2106.09685). `up` is initialized with zeros, so that
training starts at the base model, and `down` as in PEFT.

Frozen weights are needed as floats for products and gradients, so a quantized checkpoint is
dequantized once, when it is loaded, instead of twice in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.errors import SettingsError
from unspool.model.adapters import Adapter, Floats, LowRank, adaptable_shapes
from unspool.model.layers.transformer import Transformer

# Module names by the usual short names.
TARGETS = {
    "q": "attention.q", "k": "attention.k", "v": "attention.v", "o": "attention.out",
    "gate": "feed.gate", "up": "feed.up", "down": "feed.down",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA settings."""

    rank: int = 16
    alpha: float | None = None  # the scale is alpha / rank; None: twice the rank
    dropout: float = 0.0
    targets: tuple[str, ...] = tuple(TARGETS)
    layers: int | None = None  # only the last n layers: gradients stop there

    def __post_init__(self) -> None:
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            raise SettingsError(
                f"LoRA cannot be added to {', '.join(unknown) or 'no target'}; choose from "
                f"{', '.join(TARGETS)}"
            )
        if self.rank < 1 or not 0 <= self.dropout < 1:
            raise SettingsError(
                f"the LoRA rank must be >= 1 and dropout >= 0 and < 1, got rank {self.rank} and "
                f"dropout {self.dropout}"
            )

    @property
    def scale(self) -> float:
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank


class LoraLinear(nn.Linear):
    """A frozen linear layer with trainable low-rank matrices. `weight` keeps its name."""

    def __init__(self, base: nn.Linear, lora: LoraConfig) -> None:
        with torch.device("meta"):  # no allocation: the weights are those of `base`
            super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        zeros = partial(torch.zeros, device=base.weight.device, dtype=torch.float32)
        self.down = nn.Parameter(zeros(lora.rank, base.in_features))
        self.up = nn.Parameter(zeros(base.out_features, lora.rank))
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


def add_lora(model: Transformer, lora: LoraConfig, *, seed: int = 0) -> None:
    """Freeze a model and add LoRA layers, initialized from `seed`."""
    model.requires_grad_(False)
    ends = tuple(f".{TARGETS[name]}.weight" for name in lora.targets)
    first = model.config.layers - (lora.layers or model.config.layers)
    names = [
        name
        for name in adaptable_shapes(model.config)
        if name.endswith(ends) and int(name.split(".")[1]) >= first
    ]
    if not names:
        raise SettingsError("the model has none of the LoRA target matrices")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in names:
            parent, _, last = name.removesuffix(".weight").rpartition(".")
            owner = model.get_submodule(parent)
            setattr(owner, last, LoraLinear(getattr(owner, last), lora))


def lora_modules(model: Transformer) -> Iterator[tuple[str, LoraLinear]]:
    """Yield the LoRA layers with the names of their weights."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield f"{name}.weight", module


def switch_lora(model: Transformer, on: bool) -> None:
    """Enable or disable the LoRA layers; disabled, the model computes as its base."""
    for _, module in lora_modules(model):
        module.is_on = on


def adapter_of(model: Transformer, base: str = "") -> Adapter:
    """A copy of the trained adapter."""
    parts = {
        name: LowRank(_to_numpy(module.down), _to_numpy(module.up), module.scale)
        for name, module in lora_modules(model)
    }
    return Adapter(parts, base)


def adapter_from_weights(weights: Mapping[str, Tensor], scale: float, base: str) -> Adapter:
    """The adapter in a state dict of a model with LoRA layers."""
    names = [name.removesuffix(".down") for name in weights if name.endswith(".down")]
    parts = {
        f"{name}.weight": LowRank(
            _to_numpy(weights[f"{name}.down"]), _to_numpy(weights[f"{name}.up"]), scale
        )
        for name in names
    }
    return Adapter(parts, base)


def load_adapter(model: Transformer, adapter: Adapter) -> None:
    """Load an adapter of the same rank and target matrices into the LoRA layers."""
    modules = dict(lora_modules(model))
    ranks = {name: part.rank for name, part in adapter.parts.items()}
    if ranks != {name: len(module.down) for name, module in modules.items()}:
        raise SettingsError(
            "the adapter has another rank or other target matrices; give the --lora and --targets "
            "that it was trained with"
        )
    with torch.no_grad():
        for name, module in modules.items():
            part = adapter.parts[name]
            module.down.copy_(torch.from_numpy(part.down))
            module.up.copy_(torch.from_numpy(part.up) * (part.scale / module.scale))


def merge(model: Transformer, adapter: Adapter) -> None:
    """Merge an adapter into the weights of a model."""
    with torch.no_grad():
        for name, part in adapter.parts.items():
            weight = model.get_parameter(name)
            weight.add_(torch.from_numpy(part.delta()).to(weight))


def _to_numpy(parameter: Tensor) -> Floats:
    return parameter.detach().float().cpu().numpy().copy()
