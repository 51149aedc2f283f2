"""How much memory keys and values may take."""

from __future__ import annotations

from pathlib import Path

from unspool.errors import SettingsError


def free_memory() -> int:
    """What the system says is available, in bytes."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30  # not told: a modest guess


def pages_in(memory: int, page: int) -> int:
    """How many pages fit."""
    if memory < page:
        raise SettingsError(
            f"memory is {memory:,} bytes, and a single page of keys and values takes {page:,}; "
            "allow more"
        )
    return int(memory // page)
