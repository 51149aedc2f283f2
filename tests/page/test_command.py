"""`unspool page`: a server for this machine, and the browser opened on it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.running_server import wait_until
from helpers.tiny_gguf import write_tiny
from unspool.cli import serve as command
from unspool.cli.main import main
from unspool.train.running.runs import Run


def in_cache(cache: Path, repo: str, files: dict[str, bytes]) -> None:
    """A repository as the hub's library keeps it."""
    home = cache / "hub" / f"models--{repo.replace('/', '--')}"
    folder = home / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    (home / "blobs").mkdir()
    for number, (name, data) in enumerate(files.items()):
        blob = home / "blobs" / str(number)
        blob.write_bytes(data)
        (folder / name).symlink_to(blob)


def test_the_page_offers_the_models_of_the_machine_and_ctrl_c_ends_it(
    tmp_path: Path, small_default: Path
) -> None:
    config = json.dumps({"model_type": "mamba9", "architectures": ["Mamba9"]}).encode()
    in_cache(tmp_path, "org/unknown", {"config.json": config, "model.safetensors": b"\0" * 64})
    in_cache(tmp_path, "org/damaged", {"model.gguf": b"GGUF and then nothing"})
    (tmp_path / "hub" / "models--org--empty").mkdir()
    in_cache(tmp_path, "org/tiny", {"tiny.gguf": write_tiny(tmp_path / "tiny.gguf").read_bytes()})
    opened, browser = tmp_path / "opened", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "unspool", "page", "--port", "0", "--model", str(small_default)],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"),
             "BROWSER": f"{browser} %s"},
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert match and "Ctrl-C stops" in line, line
        url = match[0]
        assert "<title>Unspool</title>" in httpx.get(f"{url}/").text

        def models() -> dict[str, Any]:
            return {m["id"]: m for m in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]}

        wait_until(lambda: "org/tiny/tiny.gguf" in models())
        assert [model["unspool"]["loaded"] for model in models().values()].count(True) == 1
        assert not {"org/unknown", "org/damaged", "org/empty"} & models().keys()
        answer = httpx.post(f"{url}/v1/models/org/tiny/tiny.gguf/load", timeout=60).json()
        assert answer["unspool"]["loaded"], answer
        process.send_signal(signal.SIGINT)
        remaining = process.stderr.read()
        assert process.wait(60) == 0 and not remaining, remaining
        assert opened.read_text().strip() == url
    finally:
        process.kill()
        process.wait(10)


def test_a_stored_run_is_opened_with_its_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "speeches", "new", steps=4)
    checkpoint = run.folder / "checkpoints" / "000004"
    checkpoint.mkdir()
    (checkpoint / "training.json").write_text(json.dumps({"step": 4, "tokens": 9}))
    calls: list[Any] = []

    class FakeStarting:
        def __init__(self, chosen: Any) -> None:
            self.chosen = chosen

        def run(self, settings: Any, bound: socket.socket, started: Any, **options: Any) -> None:
            bound.close()
            calls.append((settings.runs, self.chosen[0].model))
            started("http://127.0.0.1:1", ["speeches"])

    monkeypatch.setattr(command, "ServerStartup", FakeStarting)
    options = ["page", "--port", "0", "--no-open", "--run"]
    with pytest.raises(SystemExit) as ended:
        main([*options, str(tmp_path / "speeches")])
    assert ended.value.code == 0
    assert "http://127.0.0.1:1/?run=speeches" in capsys.readouterr().err
    ((runs, model),) = calls
    assert runs == tmp_path and model.startswith("speeches=")
    with pytest.raises(SystemExit) as ended:
        main([*options, str(tmp_path / "nothing")])
    assert ended.value.code == 2 and "not a training run" in capsys.readouterr().err


def test_a_taken_port_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        monkeypatch.setattr(command, "_PAGE_PORT", port)
        assert command._free_page_port() == 0  # any other
    assert command._free_page_port() == port
