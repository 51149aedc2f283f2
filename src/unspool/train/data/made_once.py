"""A folder that is made once and found again; never half there, whatever stops the work."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from unspool.errors import DataError


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """The folder `target`; if it is not there, `make` fills one beside it, which is renamed when
    it is whole and on the disk. Of several processes one makes it, and the others wait."""
    from filelock import FileLock

    if target.is_dir():
        return target
    root = target.parent
    with _in_words(root):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{target.name}.lock"):
            if not target.is_dir():
                _make(target, make)
    return target


def _make(target: Path, make: Callable[[Path], None]) -> None:
    fresh = target.with_name(target.name + ".part")
    shutil.rmtree(fresh, ignore_errors=True)  # what a killed process left
    fresh.mkdir()
    try:
        make(fresh)
        for file in fresh.rglob("*"):
            if file.is_file():
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


@contextmanager
def _in_words(root: Path) -> Iterator[None]:
    """What goes wrong on the disk, as one line that says what to do."""
    try:
        yield
    except OSError as error:
        what = f"{root} cannot be written ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"the disk is full at {root}, make room there"
        raise DataError(f"{what}, or set UNSPOOL_CACHE to another folder") from None
