"""Physical limits: memory bandwidth and FLOP/s of a device, and the least that a model needs."""

import time
from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np


class Phase(TypedDict):
    """Bytes to read and operations to compute, at the least."""

    bytes: float
    flops: float


class Limits(TypedDict):
    device: str
    bandwidth: float  # bytes read per second
    flops: float  # per second, of a product of bfloat16 matrices


def cpu_bandwidth(threads: int, megabytes: int, repeat: int = 9) -> float:
    """Bytes per second that the threads read from a block of this size; best of `repeat`.

    The block is written first: untouched memory reads as one shared page of zeros.
    """
    from unspool.backends.cpu.structures import address_of, native_functions

    block = np.ones(megabytes * 1_000_000, np.uint8)
    fastest = 0.0
    for _ in range(repeat):
        start = time.perf_counter()
        native_functions().unspool_read_memory(address_of(block), block.nbytes, threads, 1)
        fastest = max(fastest, block.nbytes / (time.perf_counter() - start))
    return fastest


def measure_limits(device: str, small: bool = False) -> Limits:
    """Read a few gigabytes in several ways and multiply large matrices; the best of each."""
    import torch

    on_gpu = device.startswith("cuda")
    numbers, side = (1 << 31, 8192) if on_gpu and not small else (1 << 22, 128)

    def mean_seconds(work: Callable[[], Any]) -> float:
        for repeat in (3, 10):  # the first three warm up
            start = time.perf_counter()
            for _ in range(repeat):
                work()
            if on_gpu:
                torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / repeat

    block = torch.randn(1 << 20, dtype=torch.bfloat16, device=device)
    data = block.repeat(numbers >> 20)
    reads: list[Callable[[], Any]] = [
        lambda: torch.mv(data.view(-1, 8192), block[:8192]),
        lambda: data.view(torch.int32).amax(),
        lambda: data.view(torch.float32).sum(),
    ]
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else device,
        "bandwidth": max(data.nbytes / mean_seconds(read) for read in reads),
        "flops": 2 * side**3 / mean_seconds(lambda: torch.mm(a, b)),
    }


def least_seconds(phases: list[Phase], limits: Limits) -> float:
    """Time that no program on this device can go below."""
    return sum(
        max(phase["bytes"] / limits["bandwidth"], phase["flops"] / limits["flops"])
        for phase in phases
    )


def weight_bytes(config: Any, bytes_per_number: float) -> float:
    """Bytes of weights read for one token; of an untied embedding only a row is read."""
    from unspool.model.weights import weight_shapes

    numbers = sum(int(np.prod(size)) for size in weight_shapes(config).values())
    if not config.tied:
        numbers -= config.vocab_size * config.width
    return numbers * bytes_per_number


class ModelCosts:
    """What a model must read and compute for prompts and for decoding."""

    def __init__(self, config: Any, weight_bytes: float, kv_bytes: int = 2) -> None:
        from unspool.model.weights import weight_shapes

        layers = {n: s for n, s in weight_shapes(config).items() if n.startswith("layers.")}
        self.layers = sum(size[0] * size[1] for size in layers.values() if len(size) > 1)
        self.head = config.vocab_size * config.width
        self.weight_bytes = weight_bytes
        self.kv_token = config.kv_floats_per_token * kv_bytes
        self.attention = 4 * config.layers * config.heads * config.head_width  # per token pair

    def prompt(self, rows: int, length: int, max_batch: int = 8192) -> Phase:
        """Prefill: all weights once per `max_batch` tokens, the head for the last token."""
        tokens = rows * length
        passes = max(1, -(-tokens // max_batch))
        pairs = rows * length * (length + 1) / 2
        return {
            "bytes": passes * self.weight_bytes + tokens * self.kv_token,
            "flops": 2 * (tokens * self.layers + rows * self.head) + pairs * self.attention,
        }

    def decode(self, rows: int, start: int, steps: int) -> Phase:
        """Decoding of `steps` tokens in every row, after `start` tokens."""
        contexts = sum(range(start + 1, start + steps + 1))
        return {
            "bytes": steps * self.weight_bytes + rows * contexts * self.kv_token,
            "flops": rows * (2 * steps * (self.layers + self.head) + contexts * self.attention),
        }
