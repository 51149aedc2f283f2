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


class ModelCosts:
    """What a model must read and compute for prompts and for decoding, at the least."""

    def __init__(self, config: Any, weight_bits: float, kv_bytes: int = 2) -> None:
        from unspool.model.weights import weight_shapes

        shapes = weight_shapes(config)
        sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        tables = {"embed.weight", "token_inputs.embed.weight", "position_embed.weight"}
        experts = {name for name in shapes if name.startswith("layers.") and len(shapes[name]) == 3}
        self.head = config.vocab_size * config.width
        self.dense = sum(n for name, n in sizes.items() if name not in tables | experts)
        self.dense += self.head if config.tied else 0
        self.experts = sum(sizes[name] for name in experts)
        self.num_experts, self.experts_per_token = config.experts, config.experts_per_token
        self.weight_bytes = weight_bits / 8
        self.kv_token = config.kv_floats_per_token * kv_bytes
        self.state = 2 * config.state_bytes  # read and written
        # Per pair of tokens.
        self.attention = sum(
            4 * config.shape(layer).out_width
            for layer in range(config.layers)
            if config.mixer(layer) == "attention"
        )

    def read_bytes(self, tokens: int) -> float:
        """Bytes of weights that a step of these tokens reads; experts as the router chooses them
        at random."""
        experts = 0.0
        if self.experts:
            missed = (1 - self.experts_per_token / self.num_experts) ** tokens
            experts = self.experts * (1 - missed)
        return (self.dense + experts) * self.weight_bytes

    @property
    def flops(self) -> float:
        """Operations of a token in all matrices but the head."""
        experts = self.experts * self.experts_per_token / max(1, self.num_experts)
        return 2 * (self.dense - self.head + experts)

    def prompt(self, rows: int, length: int, max_batch: int = 8192) -> Phase:
        """Prefill: all weights once per `max_batch` tokens, the head for the last token."""
        tokens = rows * length
        passes = max(1, -(-tokens // max_batch))
        pairs = rows * length * (length + 1) / 2
        weights = passes * self.read_bytes(min(tokens, max_batch))
        return {
            "bytes": weights + tokens * self.kv_token + rows * self.state / 2,
            "flops": tokens * self.flops + rows * 2 * self.head + pairs * self.attention,
        }

    def decode(self, rows: int, start: int, steps: int) -> Phase:
        """Decoding of `steps` tokens in every row, after `start` tokens."""
        contexts = sum(range(start + 1, start + steps + 1))
        reads = steps * (self.read_bytes(rows) + rows * self.state)
        return {
            "bytes": reads + rows * contexts * self.kv_token,
            "flops": rows * (steps * (self.flops + 2 * self.head) + contexts * self.attention),
        }
