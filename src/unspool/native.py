"""The compiled kernels: found, loaded and described once, through a plain C interface.

The library lies beside `backends/cpu` and knows nothing of Python. Where it is not there or cannot
be loaded, `missing()` says why, and everything that can do without it goes on.

UNSPOOL_ISA=plain|avx2|avx512|amx|neon in the environment forces a lower instruction set than the
processor has, so that tests cover each.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import sys
from pathlib import Path

from unspool.errors import UnspoolError

VERSION = 8  # of the interface; the library must say the same
_NEEDED = (  # each with unspool_ before it
    "above", "copy_page", "counts", "isa", "leading", "measure", "model_free", "model_new",
    "multiply", "packed_bytes", "peaks", "pick", "profile", "quantize", "read_memory", "repack",
    "run", "run_buffers", "run_head", "set_grid", "standing", "tally", "unpack",
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
        return None, _why_not_built()
    try:
        if _cut_short(path()):
            return None, "the native kernels were not written to the end; install Unspool again"
        found = ctypes.CDLL(str(path()))
        found.unspool_version.restype = ctypes.c_int32
        version = found.unspool_version()
    except AttributeError:
        return None, f"{path()} is not Unspool's library; install Unspool again"
    except OSError as error:
        return None, f"the native kernels cannot be loaded: {_why_not_loaded(path(), str(error))}"
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
        return None, (
            "UNSPOOL_ISA names an instruction set that this processor does not have "
            f"({os.environ.get('UNSPOOL_ISA')!r}); leave it out, or set it to plain"
        )
    return found, None


def _why_not_built() -> str:
    """Installing goes on without the kernels where compiling them fails."""
    import shutil

    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        return (
            f"the native kernels are not at {path()}, and there is no C++ compiler here to build "
            "them with; install one and run pip install again"
        )
    return (
        f"the native kernels are not at {path()}, though there is a C++ compiler here "
        f"({compiler}); run pip install again, with -v to see what goes wrong"
    )


def _why_not_loaded(file: Path, said: str) -> str:
    """What the system's loader means, and what to do about it."""
    import platform

    built_for, here = _architecture(file), platform.machine()
    if built_for and here in _MACHINES.values() and built_for != here:
        return f"they were built for {built_for}, and this is {here}; install Unspool again here"
    if needed := re.search(r"version [`'](\S+?)' not found", said):
        return (
            f"they need {needed[1]}, which is newer than what this system has; install Unspool "
            "again here, so that they are built for it"
        )
    lacking = re.search(r"^(\S+): cannot open shared object file", said)
    if lacking and Path(lacking[1]) != file:
        return f"they need {lacking[1]}, which is not installed here; install it"
    if "failed to map segment" in said:
        return f"nothing may be run from {file.parent} (mounted with noexec); install elsewhere"
    return f"{said}; install Unspool again"


# Of ELF's numbers for processors those that people have, as `platform.machine` names them.
_MACHINES = {62: "x86_64", 183: "aarch64", 40: "armv7l", 3: "i686", 243: "riscv64"}


def _architecture(file: Path) -> str | None:
    """Which processor an ELF file is for; None if that cannot be told."""
    with file.open("rb") as handle:
        header = handle.read(20)
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return None
    return _MACHINES.get(struct.unpack_from("<H", header, 18)[0])


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
