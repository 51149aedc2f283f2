"""Loads the native library (compiled C++ kernels) through its C interface.

The library is in `backends/cpu` and does not depend on Python. If it is missing or cannot be
loaded, `missing()` returns the reason; other backends work without it.

The environment variable UNSPOOL_ISA selects another instruction set than the best one that the
processor has, for tests (see `instruction_set`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import UnspoolError

VERSION = 13  # of the interface; the library must have the same
_FUNCTIONS = (  # of the library, each with the prefix unspool_
    "above", "available_isas", "compiler", "copy_page", "counts", "exp", "isa", "join_strings",
    "leading", "log", "measure", "model_free", "model_new", "multiply", "pack_parts",
    "packed_bytes", "peaks", "pick", "profile", "read_memory", "repack", "run", "run_head",
    "set_grid", "standing", "tally", "unpack",
)  # fmt: skip
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def path() -> Path:
    """Return the library's path: in this package or, for a working copy, as installed."""
    name = f"unspool_native{_SUFFIX}"
    in_package = Path(__file__).parent / "backends" / "cpu" / name
    if in_package.exists():
        return in_package
    from importlib import metadata

    try:
        installed = metadata.distribution("unspool")
        return Path(str(installed.locate_file(f"unspool/backends/cpu/{name}")))
    except metadata.PackageNotFoundError:
        return in_package


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    if not path().exists():
        return None, _why_not_built()
    try:
        if _is_truncated(path()):
            return None, "the file of the native kernels is incomplete; install Unspool again"
        loaded = ctypes.CDLL(str(path()))
        loaded.unspool_version.restype = ctypes.c_int32
        version = loaded.unspool_version()
    except AttributeError:
        return None, f"{path()} is not Unspool's library; install Unspool again"
    except OSError as error:
        return None, f"the native kernels cannot be loaded: {_why_not_loaded(path(), str(error))}"
    if version != VERSION:
        return None, (
            f"the native kernels have version {version} and this Unspool needs {VERSION}; "
            "install it again"
        )
    absent = [name for name in _FUNCTIONS if not hasattr(loaded, f"unspool_{name}")]
    if absent:
        return None, (
            f"the native kernels were built from other sources (they lack {absent[0]}); "
            "install Unspool again"
        )
    for name in ("isa", "available_isas", "compiler"):
        getattr(loaded, f"unspool_{name}").restype = ctypes.c_char_p
    if not loaded.unspool_isa():
        return None, (
            "UNSPOOL_ISA names an instruction set that this processor does not have "
            f"({os.environ.get('UNSPOOL_ISA')!r}); leave it out, or set it to plain"
        )
    return loaded, None


def _why_not_built() -> str:
    """Return why there is no library: an installation continues if compiling it fails."""
    if (compiler_name := compiler_on_path()) is None:
        return (
            f"the native kernels are not at {path()}, and there is no C++ compiler here to build "
            "them with; install one and run pip install again"
        )
    return (
        f"the native kernels are not at {path()}, though there is a C++ compiler here "
        f"({compiler_name}); run pip install again, with -v to see what goes wrong"
    )


def compiler_on_path() -> str | None:
    """Return the name of a C++ compiler of this machine; None if there is none."""
    import shutil

    names = ("c++", "g++", "clang++", "clang-cl")
    return next((name for name in names if shutil.which(name)), None)


def _why_not_loaded(file: Path, message: str) -> str:
    """Explain an error message of the system's loader, and what to do."""
    import platform

    built_for, here = _architecture(file), platform.machine()
    if built_for and here in _MACHINES.values() and built_for != here:
        return f"they were built for {built_for}, and this is {here}; install Unspool again here"
    if needed := re.search(r"version [`'](\S+?)' not found", message):
        return (
            f"they need {needed[1]}, which is newer than what this system has; install Unspool "
            "again here, so that they are built for it"
        )
    dependency = re.search(r"^(\S+): cannot open shared object file", message)
    if dependency and Path(dependency[1]) != file:
        return f"they need {dependency[1]}, which is not installed here; install it"
    if "failed to map segment" in message:
        return f"{file.parent} is mounted with noexec; install elsewhere"
    return f"{message}; install Unspool again"


# ELF machine numbers, and their names in `platform.machine`.
_MACHINES = {62: "x86_64", 183: "aarch64", 40: "armv7l", 3: "i686", 243: "riscv64"}


def _architecture(file: Path) -> str | None:
    """Return the processor an ELF file is for; None if unknown."""
    with file.open("rb") as handle:
        header = handle.read(20)
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return None
    return _MACHINES.get(struct.unpack_from("<H", header, 18)[0])


def _is_truncated(file: Path) -> bool:
    """Return whether the end of a library is missing: loading it would crash the process."""
    with file.open("rb") as handle:
        header = handle.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return False  # another format; the loader checks it
    (table,) = struct.unpack_from("<Q", header, 0x28)  # the section headers, at the end of a file
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return file.stat().st_size < int(table + size * count)


def missing_reason() -> str | None:
    """Return why the library cannot be used; None if it can."""
    return _load()[1]


def library() -> ctypes.CDLL:
    """Return the library; raise UnspoolError if it cannot be used."""
    loaded, reason = _load()
    if loaded is None:
        raise UnspoolError(reason or "the native kernels are missing")
    return loaded


def exp(numbers: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """exp(x); numpy's differs in the last bit between processors, this one does not."""
    return _apply(library().unspool_exp, numbers)


def log(numbers: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The natural logarithm, with the same bits on every processor."""
    return _apply(library().unspool_log, numbers)


def _apply(function: Any, numbers: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    result = np.array(numbers, np.float64, order="C")
    address, count = ctypes.c_void_p(result.ctypes.data), ctypes.c_int64(result.size)
    function(address, count)
    return result


def read_strings(
    data: npt.NDArray[np.uint8], start: int, count: int
) -> tuple[list[str], int] | None:
    """Read an array of GGUF strings that begins at `data[start]`; return it and its end.

    None: the library is missing, a string contains a zero byte, the array is longer than `data`, or
    the file changes meanwhile.
    Raises UnicodeDecodeError for a string that is not UTF-8.
    """
    if missing_reason() is not None or not count:
        return None
    join = library().unspool_join_strings
    join.restype = ctypes.c_int64
    arguments = [ctypes.c_void_p(data.ctypes.data), *map(ctypes.c_int64, (data.size, start, count))]
    end = join(*arguments, None, ctypes.c_int64(0))
    if end < 0:
        return None
    joined = np.empty(end - start - 7 * count, np.uint8)  # a zero byte replaces 8 bytes of length
    target = ctypes.c_void_p(joined.ctypes.data), ctypes.c_int64(joined.size)
    if join(*arguments, *target) != end:
        return None
    strings = str(joined.data, "utf-8").split("\0")
    strings.pop()
    return (strings, end) if len(strings) == count else None


def instruction_set() -> str:
    """Return the instruction set in use: plain, neon, i8mm, avx2, avxvnni, avx512 or amx."""
    return str(library().unspool_isa().decode())


def available_instruction_sets() -> list[str]:
    """Return the instruction sets that this processor can run, the fastest first."""
    return str(library().unspool_available_isas().decode()).split()


def compiler() -> str:
    """Return name and version of the compiler that compiled the kernels."""
    return " ".join(str(library().unspool_compiler().decode()).split()[:3])
