"""Memory plans: a model on one GPU, its layers over several, or tensor parallel.

Needs only the model's settings. The KV cache, and weights on several GPUs, are counted in 16 bits;
on one GPU packed weights stay packed.

    for fit in fits(config, gpus=4, memory=80_000_000_000, packed=65_000_000_000):
        fit.how, fit.weights, fit.tokens        # "split over 4", 16.4e9 bytes a GPU, 240,000
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unspool.errors import SettingsError
from unspool.model.config import ModelConfig
from unspool.model.layer_places import build_device_map
from unspool.model.memory import kv_budget_with_kernels, kv_budget_with_torch
from unspool.model.split import TensorParallelRank, reason_not_splittable, shard_of
from unspool.model.weights import weight_shapes

PROCESS = 1_000_000_000  # bytes of GPU memory of an idle process
_NUMBER = 2  # bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One way to place a model on GPUs. Sizes are those of the fullest GPU."""

    how: str
    gpus: int
    options: str  # command line options
    weights: int = 0  # bytes on a GPU
    token: int = 0  # KV cache bytes per token and GPU
    state: int = 0  # bytes of a sequence's recurrent state per GPU
    tokens: int = 0  # capacity of the KV cache; 0: the weights leave no room
    problem: str = ""  # why it is impossible

    def texts(self, context: int) -> int:
        """Number of sequences of `context` tokens that fit."""
        return self.tokens // context if context else 0


def plan_memory(config: ModelConfig, *, gpus: int, memory: int, packed: int) -> list[MemoryPlan]:
    """The ways to place a model on `gpus` GPUs with `memory` bytes each. `packed`: bytes of its
    weights on one GPU."""
    options = [_on_one(config, memory, packed)]
    if gpus > 1:
        options += [_by_layers(config, gpus, memory), _split(config, gpus, memory)]
    return options


def _on_one(config: ModelConfig, memory: int, packed: int) -> MemoryPlan:
    token = _NUMBER * config.kv_floats_per_token
    room = kv_budget_with_kernels(max(0, memory - PROCESS - packed))
    tokens = _tokens(room, token, config.state_bytes)
    return MemoryPlan("one GPU", 1, "--device cuda", packed, token, config.state_bytes, tokens)


def _by_layers(config: ModelConfig, gpus: int, memory: int) -> MemoryPlan:
    how, options = f"layers over {gpus} GPUs", "--devices auto"
    try:
        places = build_device_map(config, [str(number) for number in range(gpus)])
    except SettingsError as error:
        return MemoryPlan(how, gpus, options, problem=str(error))
    weights, token, state = ([0] * gpus for _ in range(3))
    for name, shape in weight_shapes(config).items():
        weights[int(places.device_of(name))] += _NUMBER * math.prod(shape)
    for layer, place in enumerate(map(int, places.layers)):
        if layer in config.kv_layers:
            token[place] += _NUMBER * 2 * config.shape(layer).kv_width
        state[place] += 4 * config.state_floats(layer)
    rooms = (
        kv_budget_with_torch(max(0, memory - PROCESS - weight_bytes)) for weight_bytes in weights
    )
    tokens = min(_tokens(*device) for device in zip(rooms, token, state, strict=True))
    return MemoryPlan(how, gpus, options, max(weights), max(token), max(state), tokens)


def _split(config: ModelConfig, gpus: int, memory: int) -> MemoryPlan:
    how, options = f"split over {gpus} GPUs", f"--tensor-parallel {gpus}"
    if reason := reason_not_splittable(config, gpus):
        return MemoryPlan(how, gpus, options, problem=f"cannot be: {reason}")
    share = TensorParallelRank(0, gpus)
    weights = 0
    for name, shape in weight_shapes(config).items():
        cut = shard_of(config, name, share)
        part = math.prod(shape) if cut is None else math.prod(shape) // shape[cut.axis]
        weights += _NUMBER * part * (1 if cut is None else len(cut.indices))
    token = sum(
        _NUMBER * 2 * len(share.local_kv_heads(config.shape(layer).kv_heads))
        * config.shape(layer).head_width
        for layer in config.kv_layers
    )  # fmt: skip
    state = config.state_bytes // (gpus if "delta" in config.mixers else 1)
    room = kv_budget_with_torch(max(0, memory - PROCESS - weights))
    return MemoryPlan(how, gpus, options, weights, token, state, _tokens(room, token, state))


def _tokens(room: int, token: int, state: int) -> int:
    """Tokens that fit into `room` bytes; recurrent states take half of it if there are any."""
    return (room // 2 if state else room) // max(1, token)
