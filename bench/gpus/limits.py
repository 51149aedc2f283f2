"""What the device can do at the most, measured in the same run, and what a work takes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypedDict


class Phase(TypedDict):
    """Bytes that must be read and products that must be computed, at the least."""

    bytes: float
    flops: float


class Limits(TypedDict):
    device: str
    bandwidth: float  # bytes a second, reading
    flops: float  # a second, of a product of bfloat16 matrices


def measured(device: str, small: bool = False) -> Limits:
    """Read a few gigabytes in several ways, and multiply large matrices; the best of each."""
    import torch

    on_gpu = device.startswith("cuda")
    large = on_gpu and not small
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device,
        "bandwidth": _bandwidth(device, 1 << (31 if large else 22)),
        "flops": _flops(device, 8192 if large else 128),
    }


def _bandwidth(device: str, numbers: int) -> float:
    import torch

    block = torch.randn(1 << 20, dtype=torch.bfloat16, device=device)
    data = block.repeat(numbers >> 20)
    ways: list[Callable[[], Any]] = [
        lambda: torch.mv(data.view(-1, 8192), block[:8192]),
        lambda: data.view(torch.int32).amax(),
        lambda: data.view(torch.float32).sum(),
    ]
    return max(data.nbytes / _seconds(way, device) for way in ways)


def _flops(device: str, side: int) -> float:
    import torch

    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: torch.mm(a, b), device)


def _seconds(work: Callable[[], Any], device: str, times: int = 10) -> float:
    """The mean of several runs, behind three that warm up."""
    import torch

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    for _ in range(3):
        work()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - began) / times


def floor(phases: list[Phase], limits: Limits) -> float:
    """Seconds that no program can go below on this device."""
    return sum(
        max(phase["bytes"] / limits["bandwidth"], phase["flops"] / limits["flops"])
        for phase in phases
    )


class Costs:
    """What a model must read and compute for a piece of work."""

    def __init__(self, config: Any, weight_bytes: float, kv_bytes: int = 2) -> None:
        from unspool.model.weights import weight_shapes

        matrices = {name: size for name, size in weight_shapes(config).items() if len(size) > 1}
        table = config.vocab_size * config.width
        # Of the embedding a text needs one row; where it is the head too, it is read as the head.
        self.layers = sum(
            size[0] * size[1] for name, size in matrices.items() if name.startswith("layers.")
        )
        self.head = table
        self.weight_bytes = weight_bytes
        self.kv_token = config.kv_floats_per_token * kv_bytes
        self.attention = 4 * config.layers * config.heads * config.head_width  # a pair of tokens

    def prompt(self, rows: int, length: int, at_once: int = 8192) -> Phase:
        """Reading prompts: each weight at least once for so many tokens, the head for the last."""
        tokens = rows * length
        passes = max(1, -(-tokens // at_once))
        pairs = rows * length * (length + 1) / 2
        return {
            "bytes": passes * self.weight_bytes + tokens * self.kv_token,
            "flops": 2 * (tokens * self.layers + rows * self.head) + pairs * self.attention,
        }

    def decode(self, rows: int, start: int, steps: int) -> Phase:
        """Writing so many tokens behind `start` in every row."""
        pasts = sum(range(start + 1, start + steps + 1))
        return {
            "bytes": steps * self.weight_bytes + rows * pasts * self.kv_token,
            "flops": rows * (2 * steps * (self.layers + self.head) + pasts * self.attention),
        }
