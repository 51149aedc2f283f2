"""A cache folder that is built once, atomically, by one process."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from unspool.errors import DataError


def build_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return the folder `target`, building it with `make(temporary_folder)` if it is missing.

    The temporary folder is synced to disk and then renamed, so readers never see a partial one.
    Other processes wait on a file lock while one builds.
    """
    from filelock import FileLock

    if target.is_dir():
        return target
    root = target.parent
    with _disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{target.name}.lock"):
            if not target.is_dir():
                _make_atomically(target, make)
    return target


def _make_atomically(target: Path, make: Callable[[Path], None]) -> None:
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process
    part.mkdir()
    try:
        make(part)
        for path in part.rglob("*"):
            if path.is_file():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    """Turn an error of the disk into one line that says what to do."""
    try:
        yield
    except OSError as error:
        reason = f"{root} cannot be written ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk is full at {root}: free some space"
        raise DataError(f"{reason}, or set UNSPOOL_CACHE to another folder") from None
