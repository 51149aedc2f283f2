"""The compiled kernels: found, loaded and described once, through a plain C interface.

The library lies beside `backends/cpu` and knows nothing of Python. Where it was not built (no
compiler at install), `missing()` says so and everything that can do without it goes on.

UNSPOOL_ISA=plain|avx2|avx512|amx|neon in the environment forces a lower instruction set than the
processor has, so that tests cover each.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from pathlib import Path

from unspool.errors import UnspoolError

VERSION = 1  # of the interface; the library must say the same
_NEEDED = (  # each with unspool_ before it
    "above", "copy_page", "counts", "isa", "leading", "measure", "model_free", "model_new",
    "multiply", "packed_bytes", "peaks", "pick", "profile", "quantize", "read_memory", "repack",
    "run", "run_head", "standing", "tally", "unpack",
)  # fmt: skip
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def path() -> Path:
    """Where the library is: in the package, or, where that is a working copy, as installed."""
    name = f"unspool_native{_SUFFIX}"
    beside = Path(__file__).parent / "backends" / "cpu" / name
    if beside.exists():
        return beside
    from importlib import metadata

    try:
        installed = metadata.distribution("unspool")
        return Path(str(installed.locate_file(f"unspool/backends/cpu/{name}")))
    except metadata.PackageNotFoundError:
        return beside


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if not path().exists():
        return None, (
            "the native kernels were not built, because no C++ compiler was found when Unspool "
            "was installed; install one and run pip install again"
        )
    try:
        if _cut_short(path()):
            return None, "the native kernels were not written to the end; install Unspool again"
        found = ctypes.CDLL(str(path()))
        found.unspool_version.restype = ctypes.c_int32
        version = found.unspool_version()
    except (OSError, AttributeError) as error:
        return None, f"the native kernels cannot be loaded ({error}); install Unspool again"
    if version != VERSION:
        return None, (
            f"the native kernels are of version {version} and this Unspool needs {VERSION}; "
            "install it again"
        )
    lacking = [name for name in _NEEDED if not hasattr(found, f"unspool_{name}")]
    if lacking:
        return None, (
            f"the native kernels were built from other sources (they lack {lacking[0]}); "
            "install Unspool again"
        )
    found.unspool_isa.restype = ctypes.c_char_p
    if not found.unspool_isa():
        return None, "UNSPOOL_ISA names an instruction set that this processor does not have"
    return found, None


def _cut_short(file: Path) -> bool:
    """Whether a library's end is missing: loading such a one would end the whole process."""
    with file.open("rb") as handle:
        header = handle.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return False  # of another format; the loader looks at it itself
    (table,) = struct.unpack_from("<Q", header, 0x28)  # of sections, at the end of a file
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return file.stat().st_size < int(table + size * count)


def missing() -> str | None:
    """Why the compiled library cannot be used; None if it can."""
    return _load()[1]


def library() -> ctypes.CDLL:
    found, why = _load()
    if found is None:
        raise UnspoolError(why or "the native kernels are missing")
    return found


def instruction_set() -> str:
    """Which of the kernels run here: plain, neon, avx2, avx512 or amx."""
    return str(library().unspool_isa().decode())
