"""`/v1/catalogue`: what can be downloaded, a download with its progress, and one that is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import httpx
import pytest

from helpers.running_server import Running
from helpers.tree_client import read
from unspool.model.hub.catalogue import CatalogueEntry, catalogue
from unspool.server.dialects import catalogue as dialect
from unspool.server.runtime.registry import ModelEntry

NAME = next(entry.name for entry in catalogue().values() if not entry.is_default)


def _unloaded() -> ModelEntry:
    def load() -> None:
        raise AssertionError("nothing is generated here")

    return ModelEntry("small", load, 1 << 20)  # type: ignore[arg-type]


@pytest.fixture
def serving(
    small_server: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Running]:
    """A download is a process that writes bytes, waits for a file `go`, and ends."""
    monkeypatch.setattr(dialect, "_folder", lambda entry: tmp_path / "blobs")
    monkeypatch.setattr(dialect, "_command", lambda entry: _command(tmp_path))
    monkeypatch.setattr(dialect, "_POLL_SECONDS", 0.05)
    yield small_server


def _command(folder: Path, end: str = "") -> list[str]:
    code = f"""
import os, pathlib, sys, time
folder = pathlib.Path({str(folder)!r})
(folder / "blobs").mkdir(exist_ok=True)
(folder / "blobs" / "part").write_bytes(bytes(1000))
(folder / "starting").write_text(str(os.getpid()))
(folder / "starting").rename(folder / "started")
while not (folder / "go").exists():
    time.sleep(0.02)
{end}
"""
    return [sys.executable, "-c", code]


def test_the_catalogue_says_what_fits(serving: Running) -> None:
    reply = serving.http.get("/v1/catalogue").json()
    assert reply["may_download"] is True
    assert [item["id"] for item in reply["data"]] == list(catalogue())
    assert all(item["bytes"] > 0 and item["licence"] for item in reply["data"])


def test_a_download_reports_its_progress_and_adds_the_model(
    serving: Running, tmp_path: Path
) -> None:
    registry = serving.state.registry
    before = registry.entries
    registry.find_local = lambda: [_unloaded()]
    try:
        with serving.http.stream("POST", f"/v1/catalogue/{NAME}/pull") as answer:
            observed = []
            for name, data, _ in read(answer):
                observed.append((name, data))
                if name == "progress" and data["done"] == 1000:
                    (tmp_path / "go").touch()
        assert observed[-1] == ("done", {"models": ["small"]})
        assert any(data.get("done") == 1000 for _, data in observed)
        assert "small" in registry.entries
    finally:
        registry.entries, registry.find_local = before, list


def test_a_client_that_leaves_ends_the_download(serving: Running, tmp_path: Path) -> None:
    with httpx.Client(base_url=serving.url) as client:  # noqa: SIM117
        with client.stream("POST", f"/v1/catalogue/{NAME}/pull") as answer:
            events = read(answer)  # closed, it would close the answer
            next(events)
            end = monotonic() + 30
            while not (tmp_path / "started").exists():
                assert monotonic() < end
                sleep(0.02)
    process = int((tmp_path / "started").read_text())
    while _exists(process):
        assert monotonic() < end
        sleep(0.02)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_why_a_download_fails_is_the_answer(
    serving: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def command(entry: CatalogueEntry) -> list[str]:
        return _command(tmp_path, 'sys.exit("no space left on the disk")')

    monkeypatch.setattr(dialect, "_command", command)
    (tmp_path / "go").touch()
    with serving.http.stream("POST", f"/v1/catalogue/{NAME}/pull") as answer:
        *_, (name, data, _) = read(answer)
    assert name == "error"
    assert data["error"]["message"] == f"{NAME} could not be downloaded: no space left on the disk"
    unknown = serving.http.post("/v1/catalogue/no-such/pull")
    assert unknown.status_code == 404 and "no-such" in unknown.json()["error"]["message"]
