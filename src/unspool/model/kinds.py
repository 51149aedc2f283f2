"""Quantization kinds of GGUF files (Q4_K_M, Q8_0, ...): readable ones, memory, preference.

Kinds have llama.cpp's names. The kernels keep 4 or 8 bits per weight in memory, so a file of 5 or 6
bits grows to 8 and one of 1 to 3 bits to 4: such files save download size, not memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    "Q2": 1.7, "Q3": 1.35, "Q4_K": 1.1, "Q5": 1.56, "Q6": 1.31, "Q1": 4.0,
    "IQ1": 2.68, "IQ2": 1.93, "IQ3": 1.33, "TQ1": 2.56, "TQ2": 2.09,
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
