"""How much memory there is, and how much a model needs."""

from __future__ import annotations

from pathlib import Path

from unspool.model.kinds import in_memory

PLANNED_CONTEXT = 4096  # tokens of text that a model should have room for
_PROGRAM = 150_000_000  # bytes that the program and its buffers take beside the model


def free_memory() -> int:
    """What the system says is available, in bytes."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30  # not told: a modest guess


def memory_needed(size: int, kind: str | None, text: int | None = None) -> int:
    """About what it takes to run a model: its weights, a long text, and the program.

    `size` is that of its files. `text` is what `memory_of_text` says; not known before the model
    was looked at, and then a tenth of the weights.
    """
    weights = in_memory(size, kind)
    return weights + (weights // 10 if text is None else text) + _PROGRAM


def memory_of_text(kv_bytes: int, context: int) -> int:
    """Keys and values of a text of some length, where a token leaves `kv_bytes`."""
    return kv_bytes * min(context, PLANNED_CONTEXT)


def in_words(size: int) -> str:
    """640 MB, 1.1 GB."""
    if size < 999_500_000:
        return f"{size / 1e6:,.0f} MB"
    return f"{size / 1e9:,.1f} GB"
