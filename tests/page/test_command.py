"""`unspool page`: a server for this machine, and the browser opened on it."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from unspool.cli import page as command


def test_the_page_is_opened_and_ctrl_c_ends_it(tmp_path: Path, default_model: Path) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "unspool", "page", "--port", "0", "--model", str(default_model)],
        env={"BROWSER": f"{browser} %s", "HOME": str(Path.home()), "PATH": "/usr/bin:/bin"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line
        assert "Ctrl-C stops" in line
        assert "<title>Unspool</title>" in httpx.get(f"{found[0]}/").text
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(30) == 0 and not rest, rest
        assert opened.read_text().strip() == found[0]
    finally:
        process.kill()
        process.wait(10)


def test_a_taken_port_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(command, "_PORT", port)
        assert command._usual_port() == 0  # any other
    assert command._usual_port() == port
