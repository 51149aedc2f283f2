"""Free memory, and the memory that a model needs."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from unspool.errors import SettingsError
from unspool.model.kinds import loaded_bytes

PLANNED_CONTEXT = 4096  # tokens of KV cache to plan for
PLANNED_STATES = 8  # recurrent states to plan for
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_FOR_STEPS = 2 << 30  # bytes for activations, logits and captured graphs on a GPU
_PROGRAM = 100_000_000  # bytes of the program and its buffers


def free_memory() -> int:
    """Available memory in bytes, within the container's limit if there is one."""
    try:
        meminfo = dict(line.split(":") for line in _MEMINFO.read_text().splitlines() if ":" in line)
        free = int(meminfo["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return _modest_guess()
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        stat = (_CGROUP / "memory.stat").read_text().split()
        reclaimable = int(stat[stat.index("inactive_file") + 1])  # files that can be read again
        used = int((_CGROUP / "memory.current").read_text()) - reclaimable
        return max(0, min(free, limit - used))
    except (OSError, ValueError, LookupError):  # no limit, or "max"
        return free


def release_memory() -> None:
    """Return freed memory from the allocators to the system."""
    gc.collect()  # exceptions and views make reference cycles
    if "torch" in sys.modules and (torch := sys.modules["torch"]).cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def _modest_guess() -> int:
    """Half of the physical memory, if the available memory is unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def memory_needed(size: int, kind: str | None, text: int | None = None) -> int:
    """Approximate bytes to run a model: weights, one long sequence, and the program.

    Args:
        size: Bytes of the files.
        text: `sequence_memory` of the model; None (not known yet): a tenth of the weights.
    """
    weights = loaded_bytes(size, kind)
    return weights + (weights // 10 if text is None else text) + _PROGRAM


def sequence_memory(kv_bytes: int, context: int, state_bytes: int = 0) -> int:
    """Bytes of KV cache for one sequence of planned length (`kv_bytes` per token), and of a few
    recurrent states."""
    return kv_bytes * min(context, PLANNED_CONTEXT) + PLANNED_STATES * state_bytes


def kv_budget_with_kernels(free: int) -> int:
    """Default KV cache size for a GPU's free memory with Unspool's kernels, whose steps need
    little."""
    return int(max((free - _FOR_STEPS) * 0.8, free // 4))


def kv_budget_with_torch(free: int) -> int:
    """The same with plain torch, which allocates large intermediate tensors."""
    return free // 2


def parse_size(words: str) -> int:
    """Parse a size: 80GB, 24 GiB, 500MB, or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", words, re.IGNORECASE)
    if match is None:
        raise SettingsError(f"size must be like 80GB, 24GiB or a number of bytes, got {words!r}")
    number, unit, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")
    if size < 1:
        raise SettingsError(f"size must be more than 0, got {words!r}")
    return int(size)


def format_bytes(size: int) -> str:
    """Format bytes: 640 MB, 1.1 GB."""
    if size < 999_500_000:
        return f"{size / 1e6:,.0f} MB"
    return f"{size / 1e9:,.1f} GB"
