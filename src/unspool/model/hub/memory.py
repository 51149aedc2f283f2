"""Free memory, and the memory that a model needs."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from unspool.errors import SettingsError

# Best first if memory suffices: small and fast with little loss, then better but larger.
READABLE = (
    "Q4_K_M", "MXFP4_MOE", "MXFP4", "Q4_K_S", "IQ4_XS", "IQ4_NL", "Q4_1", "Q4_0", "NVFP4", "Q8_0",
    "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K", "Q3_K_L", "Q3_K_M", "IQ3_M", "IQ3_S", "Q3_K_S",
    "IQ3_XS", "IQ3_XXS", "Q2_K", "IQ2_M", "IQ2_S", "Q2_K_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "TQ1_0",
    "IQ1_M", "IQ1_S", "Q1_0", "BF16", "F16", "F32",
)  # fmt: skip
SMALL = 1_000_000_000  # bytes of Q8_0: below this, 4 bits lose too much quality for the speed

# Size in memory over size in the file, by the prefix of the kind.
_GROWTH = {
    "Q1": 1.33, "Q2": 1.19, "Q3": 1.04, "Q4_K": 1.03, "Q5_K": 1.02,
    "IQ1": 2.07, "IQ2": 1.5, "IQ3": 1.33, "TQ1": 1.37, "TQ2": 1.12,
}  # fmt: skip

# general.file_type of a GGUF file -> kind. Unreadable kinds are listed for the error message.
FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
    39: "NVFP4", 40: "Q1_0",
}  # fmt: skip

_IN_NAME = re.compile(
    r"(?:^|[-._:/ ])(UD-)?"  # Unsloth's mixtures
    r"(I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32)(?=$|[-./])",
    re.IGNORECASE,
)
_UNREADABLE = re.compile(r"Q2_0|I?Q\d_(0_\d|NL_\d)")


def kind_in_name(name: str) -> str | None:
    """The kind in a file's name: `m-q4_k_m.gguf` is Q4_K_M; None: there is none."""
    matches = list(_IN_NAME.finditer(name))
    if not matches:
        return None
    kind = matches[-1][2].upper().replace("FP16", "F16").replace("FP32", "F32")
    return f"UD-{kind}" if matches[-1][1] else kind


def is_readable(kind: str | None) -> bool:
    """Whether weights of a kind can be read; unknown kinds are assumed to be."""
    return kind is None or not _UNREADABLE.match(kind.removeprefix("UD-"))


def loaded_bytes(size: int, kind: str | None) -> int:
    """Approximate bytes of a file's weights after loading."""
    for start, growth in _GROWTH.items():
        if (kind or "").startswith(start):
            return int(size * growth)
    return size


def by_preference(sizes: Mapping[str, int]) -> list[str]:
    """The readable kinds among these (kind -> file size), best first."""
    readable = [kind for kind in READABLE if kind in sizes]
    if 0 < sizes.get("Q8_0", 0) <= SMALL:
        readable.remove("Q8_0")
        readable.insert(0, "Q8_0")
    return readable


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
