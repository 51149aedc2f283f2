"""How much memory there is, and how much a model needs."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from unspool.errors import SettingsError
from unspool.model.kinds import in_memory

PLANNED_CONTEXT = 4096  # tokens of text that a model should have room for
PLANNED_STATES = 8  # recurrent states of it
_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_FOR_STEPS = 2 << 30  # bytes that steps take on a GPU: activations, logits, graphs
_PROGRAM = 100_000_000  # bytes that the program and its buffers take beside the model


def free_memory() -> int:
    """What the system says is available, in bytes; within a container's limit, if it has one."""
    try:
        told = dict(line.split(":") for line in _MEMINFO.read_text().splitlines() if ":" in line)
        free = int(told["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return _modest_guess()
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        stat = (_CGROUP / "memory.stat").read_text().split()
        kept = int(stat[stat.index("inactive_file") + 1])  # files that can be read again
        used = int((_CGROUP / "memory.current").read_text()) - kept
        return max(0, min(free, limit - used))
    except (OSError, ValueError, LookupError):  # no limit, or "max"
        return free


def release_memory() -> None:
    """Give freed memory back to the system, which allocators would keep for themselves."""
    gc.collect()  # errors and views make cycles
    if "torch" in sys.modules and (torch := sys.modules["torch"]).cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another library than glibc
            ctypes.CDLL(None).malloc_trim(0)


def _modest_guess() -> int:
    """Half of what is built in, where that is all that is told."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def memory_needed(size: int, kind: str | None, text: int | None = None) -> int:
    """About what it takes to run a model: its weights, a long text, and the program.

    `size` is that of its files. `text` is what `memory_of_text` says; not known before the model
    was looked at, and then a tenth of the weights.
    """
    weights = in_memory(size, kind)
    return weights + (weights // 10 if text is None else text) + _PROGRAM


def memory_of_text(kv_bytes: int, context: int, state_bytes: int = 0) -> int:
    """Keys and values of a text of some length, where a token leaves `kv_bytes`; and a few states
    to come back to, if the model has recurrent layers."""
    return kv_bytes * min(context, PLANNED_CONTEXT) + PLANNED_STATES * state_bytes


def share_beside_kernels(free: int) -> int:
    """What keys and values get of a GPU's free memory, unless somebody says how much: steps of our
    own kernels need little of it."""
    return int(max((free - _FOR_STEPS) * 0.8, free // 4))


def share_beside_torch(free: int) -> int:
    """The same beside plain torch, which makes large tables on the way."""
    return free // 2


def size_in(words: str) -> int:
    """80GB, 24 GiB, 500MB, or a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", words, re.IGNORECASE)
    if found is None:
        raise SettingsError(f"{words!r} is no size; it may be 80GB, 24GiB or a number of bytes")
    number, unit, binary = found.groups()
    size = float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")
    if size < 1:
        raise SettingsError(f"{words!r} is no size: it must be more than 0")
    return int(size)


def in_words(size: int) -> str:
    """640 MB, 1.1 GB."""
    if size < 999_500_000:
        return f"{size / 1e6:,.0f} MB"
    return f"{size / 1e9:,.1f} GB"
