"""The folder of stored state: where it is, and which process uses it.

    DIR/texts.db    sessions and branches (`database.py`)
    DIR/pages/      KV-cache pages (`engine/page_files.py`)
    DIR/lock        the process that writes here

One process at a time writes to a folder. The lock is the system's own: it ends with its process,
also after `kill -9`. A folder on a read-only disk, or of another user, can still be read.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Self

from unspool.errors import UnspoolError

PAGES_BYTES = 10 << 30  # default limit of stored KV-cache pages


class FolderInUseError(UnspoolError):
    """Another process writes to the folder."""


def default_folder() -> Path:
    """The folder of the user's texts: UNSPOOL_STATE, or the platform's folder for data."""
    if value := os.environ.get("UNSPOOL_STATE"):
        return Path(value).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "unspool"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "unspool"
    data = os.environ.get("XDG_DATA_HOME", "")
    base = Path(data) if data.startswith("/") else Path.home() / ".local" / "share"
    return base / "unspool"


class StateFolder:
    """A folder that this process may write to, until it is closed."""

    def __init__(self, path: Path, *, allow_readonly: bool = False) -> None:
        """Create the folder if necessary, and lock it.

        With `allow_readonly`, a folder whose texts can only be read is accepted: then `is_readonly`
        is true, and nothing is locked.

        Raises:
            FolderInUseError: Another process writes to it; the message says which.
            UnspoolError: The folder cannot be used.
        """
        self.path = path.expanduser()
        self.is_readonly = False
        self._file: IO[str] | None = None
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = (self.path / "lock").open("a+", encoding="utf-8")
            if self.database.exists() and not os.access(self.database, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            self.close()
            if allow_readonly and os.access(self.database, os.R_OK):
                self.is_readonly = True
                return
            raise UnspoolError(
                f"the state folder {self.path} cannot be used: {error.strerror or error}"
            ) from error
        if not _try_lock(self._file):
            self._file.seek(0)
            holder = _describe_holder(self._file.read())
            self._file.close()
            raise FolderInUseError(
                f"the state folder {self.path} is in use by {holder}; stop that process, or give "
                "this one another folder (--state DIR) or none (--no-state)"
            )
        self._file.seek(0)
        self._file.truncate()
        command = " ".join(["unspool", *sys.argv[1:2]])
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({"pid": os.getpid(), "command": command, "since": since}, self._file)
        self._file.flush()

    @property
    def readonly_note(self) -> str:
        """What to tell the user of a folder that can only be read."""
        return f"the state folder {self.path} can only be read: new texts and changes are not saved"

    @property
    def database(self) -> Path:
        return self.path / "texts.db"

    @property
    def pages(self) -> Path:
        return self.path / "pages"

    def close(self) -> None:
        """Unlock the folder. Safe to call twice."""
        if self._file is not None:
            self._file.close()  # closing releases the lock
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _describe_holder(content: str) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} ({holder['command']}, since {holder['since']})"
    except (ValueError, KeyError, TypeError):
        return "another process"


if sys.platform == "win32":

    def _try_lock(file: IO[str]) -> bool:
        import msvcrt

        file.seek(1 << 20)  # beyond the content, which others may read
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:

    def _try_lock(file: IO[str]) -> bool:
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
