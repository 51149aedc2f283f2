"""Download one file: resumable, with a checksum and a progress bar.

The bytes go to a `.part` file, which stays when the download is interrupted (also by Ctrl-C); the
next call resumes from it. A file with a wrong checksum is downloaded once more from the start,
because its first part may be from an earlier, different file.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from unspool.errors import ModelFileError, UnspoolError

Advance = Callable[[int, int | None], None]  # bytes so far, total bytes (None: unknown)

_CHUNK = 1 << 20
_TIMEOUT = 30.0  # seconds without data
_ATTEMPTS = 4  # consecutive attempts without progress


class DownloadError(UnspoolError):
    """A download failed; the bytes received so far are kept."""


class _BrokenOffError(Exception):
    """The response ended early; a retry may help."""


def fetch(url: str, part: Path, *, sha256: str, advance: Advance | None = None) -> None:
    """Download `url` to the file `part` and check its SHA-256."""
    for attempt in ("first", "again"):
        digest = _fetch_all(url, part, advance or (lambda done, total: None), sha256)
        if digest == sha256:
            return
        part.unlink(missing_ok=True)
        if attempt == "again":
            raise ModelFileError(
                f"{_file_name(url)} came with the wrong checksum twice (sha256 {digest[:16]}...,"
                f" expected {sha256[:16]}...): the source has another file, or a proxy changes it"
            )


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    _feed(digest, path)
    return digest.hexdigest()


def _feed(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)


def _fetch_all(url: str, part: Path, advance: Advance, expected_sha256: str) -> str:
    """Retry until the file is complete; return its SHA-256."""
    import http.client
    import urllib.error

    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _fetch_rest(url, part, before, advance, expected_sha256)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise DownloadError(
                    f"{_file_name(url)} cannot be downloaded: the server answered {error.code}"
                    f" {error.reason}"
                ) from None
            problem: Exception = error
        except (urllib.error.URLError, http.client.HTTPException, _BrokenOffError) as error:
            problem = error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(part.parent).free
                raise DownloadError(
                    f"the disk is full ({free / 1e6:.0f} MB free at {part.parent}): free some"
                    " space and rerun to resume"
                ) from None
            if error.filename is not None:
                raise DownloadError(f"cannot write {part}: {error.strerror}") from None
            problem = error  # the connection
        after = part.stat().st_size if part.exists() else 0
        idle = 0 if after > before else idle + 1
        if idle >= _ATTEMPTS:
            raise DownloadError(
                f"{_file_name(url)} cannot be downloaded ({_reason(problem)}): check the network"
                " and rerun to resume"
            ) from None
        time.sleep(min(0.2 * 2**idle, 5.0) if idle else 0.05)


def _fetch_rest(
    url: str, part: Path, num_present: int, advance: Advance, expected_sha256: str
) -> str:
    digest = hashlib.sha256()
    if num_present:
        _feed(digest, part)
        if (
            digest.hexdigest() == expected_sha256
        ):  # complete, and only the next step was interrupted
            return expected_sha256
    with _open(url, num_present) as (answer, start, total):
        if start != num_present:
            digest = hashlib.sha256()
        with part.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            done = start
            advance(done, total)
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                advance(done, total)
    if total is not None and done < total:
        raise _BrokenOffError(f"the answer ended after {done:,} of {total:,} bytes")
    return digest.hexdigest()


@contextmanager
def _open(url: str, num_present: int) -> Iterator[tuple[IO[bytes], int, int | None]]:
    """Open the rest of the file; yields the response, its start, and the total length."""
    if urlsplit(url).scheme in ("", "file"):
        path = _local_path(url)
        try:
            file = path.open("rb")
        except OSError as error:
            raise DownloadError(f"{path} cannot be read: {error.strerror}") from None
        with file:
            yield file, 0, path.stat().st_size
        return
    import urllib.error
    import urllib.request

    headers = {"User-Agent": "unspool", "Accept-Encoding": "identity"}
    if num_present:
        headers["Range"] = f"bytes={num_present}-"
    try:
        reply = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=_TIMEOUT
        )
    except urllib.error.HTTPError as error:
        if error.code != 416 or not num_present:
            raise
        error.close()  # the partial file is not a prefix of this file: start again
        with _open(url, 0) as response:
            yield response
        return
    with reply:
        length = reply.headers.get("Content-Length")
        start = 0
        if reply.status == 206:
            answered = reply.headers.get("Content-Range", "")
            start = num_present if answered.startswith(f"bytes {num_present}-") else -1
            if start < 0:
                raise _BrokenOffError(f"the server sent another range: {answered!r}")
        yield reply, start, start + int(length) if length and length.isdigit() else None


def _local_path(url: str) -> Path:
    """The path of a file:// URL or of a bare path."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return Path(url)
    from urllib.request import url2pathname

    return Path(url2pathname(unquote(parts.path)))


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2]) or "the file"


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None) or error
    return " ".join(str(inner).split())[:200] or type(error).__name__


@contextmanager
def progress_bar(label: str, *, show: bool) -> Iterator[Advance]:
    """Show a progress bar on stderr if it is a terminal, else print one line."""
    if not show:
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        print(f"fetching {label} ...", file=sys.stderr, flush=True)
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
