"""The lower bound of the time per token: bytes to read divided by memory bandwidth.

bytes_per_token(lm, past=512)      # weights once, KV cache of 512 tokens
bandwidth(lm)                      # bytes per second, measured on the model's device
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.session import Session

if TYPE_CHECKING:
    from unspool.backends.cpu.loaded import CpuModel

_BLOCK = 128_000_000  # bytes: larger than processor caches
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def bytes_per_token(lm: Session, past: int) -> int:
    """Return the bytes to read for one token after `past` tokens."""
    backend = lm.engine.backend
    return weight_bytes(lm) + past * backend.page_bytes // backend.page_size


def weight_bytes(lm: Session) -> int:
    """Return the bytes of the weights read per token: all matrices, of experts the active ones.

    Of the embedding only one row is read, unless it is also the output head.
    """
    if is_native(lm):
        return _packed_bytes(lm.model)  # type: ignore[arg-type]
    from unspool.model.weights import parameter_count, weight_shapes

    config = lm.config
    share = config.experts_per_token / config.experts if config.experts else 1.0
    read = 0.0
    for name, shape in weight_shapes(config).items():
        if name == "embed.weight" and not config.tied:
            continue
        read += math.prod(shape) * (share if len(shape) == 3 else 1.0)
    if lm.model.precision in _BYTES:
        return round(read * _BYTES[lm.model.precision])
    from unspool.model.glance import summarize_model

    stored = summarize_model(lm.path).bytes if lm.path is not None else 2 * parameter_count(config)
    return round(read * stored / parameter_count(config))


def is_native(lm: Session) -> bool:
    """Return whether the native CPU backend runs the model; it can profile each operation."""
    return hasattr(lm.model, "plan") and hasattr(lm.engine.backend, "profile")


def _packed_bytes(model: CpuModel) -> int:
    total = 0.0
    for operation in model.plan.operations:
        if operation.kind in ("linear", "route", "experts"):
            nbytes = sum(model.packed[name].nbytes for name in operation.matrices)
            experts, per_token = operation.experts, operation.experts_per_token
            total += nbytes * (per_token / experts if experts else 1)
    return round(total)


def bandwidth(lm: Session, repeat: int = 7) -> list[float]:
    """Measure memory bandwidth in bytes per second, by reading a block larger than any cache."""
    read = _native_reader(lm) if is_native(lm) else _torch_reader(lm)
    read()
    speeds = []
    for _ in range(repeat):
        started = perf_counter()
        read()
        speeds.append(_BLOCK / (perf_counter() - started))
    return speeds


def _native_reader(lm: Session) -> Callable[[], object]:
    from unspool.backends.cpu.structures import address_of, native_functions

    block = np.ones(_BLOCK, np.uint8)  # written, as untouched memory is one page of zeros
    threads = int(getattr(lm.model, "threads", 1))
    return lambda: native_functions().unspool_read_memory(
        address_of(block), block.nbytes, threads, 1
    )


def _torch_reader(lm: Session) -> Callable[[], object]:
    import torch

    block = torch.ones(_BLOCK // 4, device=lm.model.device)

    def read() -> Any:
        return block.sum().item()  # item() waits for the device

    return read
