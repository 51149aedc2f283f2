"""`unspool serve` as a process of its own: starting, stopping, dying, and what it logs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest

from unspool.cli import serve as command
from unspool.errors import SettingsError
from unspool.server.http.settings import ServerSettings

SECRET = "a sentence that must not be logged"


class Process:
    """A server, and what it has written to stderr."""

    def __init__(self, *options: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "unspool", "serve", "--port", "0", *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.lines.append(line)

    @property
    def url(self) -> str:
        until = time.monotonic() + 60
        while time.monotonic() < until and self.popen.poll() is None:
            for line in self.lines:
                if '"started"' in line:
                    return str(json.loads(line)["address"])
            time.sleep(0.02)
        raise AssertionError(f"the server did not start: {self.lines}")

    def stop(self, sig: int, seconds: float = 30) -> int:
        self.popen.send_signal(sig)
        code = self.popen.wait(seconds)
        self.reader.join(5)
        return code


@contextmanager
def serving(*options: str) -> Iterator[Process]:
    process = Process(*options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.popen.kill()
        process.popen.wait(10)


def completed(url: str, **params: Any) -> str:
    body = {"prompt": SECRET, "max_tokens": 8, "seed": 3, "unspool": {"end": False}, **params}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_two_servers_one_killed_and_one_asked_to_stop():
    with serving() as item, serving("--drain", "20") as two:
        text = completed(item.url)
        assert completed(two.url) == text
        item.stop(signal.SIGKILL)
        with serving("--log-prompts") as again:  # nothing to repair
            assert completed(again.url) == text
            assert again.stop(signal.SIGINT) == 0
        assert any(SECRET in line for line in again.lines)

        # What runs is finished; who comes later is turned away.
        lines: list[str] = []
        started = threading.Event()

        def listen() -> None:
            body = {"prompt": SECRET, "max_tokens": 150, "stream": True, "unspool": {"end": False}}
            with httpx.stream("POST", f"{two.url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    started.set()

        listener = threading.Thread(target=listen)
        listener.start()
        assert started.wait(30)
        code: list[int] = []
        stopping = threading.Thread(target=lambda: code.append(two.stop(signal.SIGTERM)))
        stopping.start()
        until = time.monotonic() + 60
        while time.monotonic() < until and not any('"stopping"' in line for line in two.lines):
            time.sleep(0.01)
        with pytest.raises((httpx.ConnectError, httpx.RemoteProtocolError, AssertionError)):
            while time.monotonic() < until:  # the door closes a moment after that line
                completed(two.url, max_tokens=1)
        listener.join(60)
        stopping.join(60)
        assert code == [0]
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert [chunk for chunk in chunks if chunk["choices"]][-1]["choices"][0]["finish_reason"]
        assert "data: [DONE]" in lines

    reply = [json.loads(line) for line in two.lines]
    assert reply[0]["event"] == "started" and reply[-1]["event"] == "stopped"
    requests = [line for line in reply if line["event"] == "request"]
    assert {line["status"] for line in requests} <= {200, 503}  # the latter: turned away
    assert requests[-1]["completion_tokens"] == 150 and requests[-1]["model"]
    assert not any(SECRET in line for line in two.lines)


def test_what_takes_too_long_is_cut_off_and_the_end_is_still_a_good_one():
    with serving("--drain", "1") as server:
        body = {"prompt": SECRET, "max_tokens": 4000, "stream": True, "unspool": {"end": False}}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.popen.terminate()
            with suppress(httpx.RemoteProtocolError):
                assert "data: [DONE]" not in list(lines)
        assert server.popen.wait(60) == 0


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    from unspool.cli.main import main

    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = str(used.getsockname()[1])
        empty = tmp_path / "keys.txt"
        empty.write_text("\n# nothing\n")
        for arguments, words in (
            (["--port", port], "choose another with --port"),
            (["--port", "70000"], "got 70000"),
            (["--api-key", "short"], "at least 8"),
            (["--api-key-file", str(tmp_path / "none")], "cannot be read"),
            (["--api-key-file", str(empty)], "holds no key"),
            (["--log-level", "loud"], "loud"),
            (["--log-format", "xml"], "xml"),
            (["--max-running", "0"], "at least 1"),
            (["--model", str(tmp_path / "no.gguf")], "no.gguf"),
            (["--model", "a=x", "--deadline", "-1"], ""),
        ):
            with pytest.raises(SystemExit) as caught:
                main(["serve", *arguments])
            reply = capsys.readouterr().err
            assert caught.value.code == 2 and words in reply and reply.count("\n") == 1


def test_who_listens_everywhere_without_a_key_is_warned(monkeypatch: pytest.MonkeyPatch):
    from unspool.server.http import server, sockets

    message: list[str] = []
    monkeypatch.setattr(sockets, "bind_socket", lambda settings: None)
    monkeypatch.setattr(server, "run", lambda *params, **named: None)
    monkeypatch.setattr(command.o, "say", message.append)
    from unspool.cli.main import main

    for options, warned in (
        ([], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "long-enough-key"], False),
        (["--host", "::1"], False),
    ):
        message.clear()
        with pytest.raises(SystemExit) as caught:
            main(["serve", *options])
        assert caught.value.code == 0
        assert any("anyone who can reach" in line for line in message) == warned


def test_a_log_for_people():
    with serving("--log-format", "text") as server:
        address = ""
        until = time.monotonic() + 60
        while not address and time.monotonic() < until:
            address = next((w[8:] for line in server.lines for w in line.split()
                            if w.startswith("address=")), "")  # fmt: skip
            time.sleep(0.02)
        completed(address)
        assert httpx.get(f"{address}/nonsense").status_code == 404
        assert server.stop(signal.SIGTERM) == 0
    reply = "".join(server.lines)
    assert "POST /v1/completions 200" in reply and "8 generated" in reply and SECRET not in reply
    assert "GET /nonsense 404" in reply and "error=Not Found" in reply


def test_settings_that_cannot_be():
    for bad in (
        {"drain": 0},
        {"max_queued": -1},
        {"max_tokens": 0},
        {"api_keys": ("a b c d e f",)},
    ):
        with pytest.raises(SettingsError):
            ServerSettings(**bad)
    assert ServerSettings(host="localhost").is_local and ServerSettings(host="::1").is_local
    assert not ServerSettings(host="192.168.0.7").is_local


@pytest.mark.parametrize("name", ["serve", "page"])
def test_a_model_that_cannot_be_loaded_is_told_in_one_line(name: str, tmp_path: Any):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(range(64)))
    command = [sys.executable, "-m", "unspool", name, "--port", "0", "--model", str(broken)]
    command += ["--no-open"] if name == "page" else ["--log-level", "warning"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1 and "broken.gguf: not a usable GGUF file" in ended.stderr


def test_the_default_model_is_fetched_while_the_rest_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    """Its name and size are known before; nothing is fetched before it is loaded."""
    from unspool.cli import starting
    from unspool.cli.options import ModelChoice
    from unspool.model.hub import find

    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path))
    monkeypatch.delenv("UNSPOOL_DEFAULT_MODEL", raising=False)
    monkeypatch.setattr(find, "default_model", lambda **_: pytest.fail("fetched too early"))
    result = starting._located(ModelChoice(None, {}), None)
    assert result.name == "SmolLM2-135M-Instruct.Q4_1" and result.size > 90_000_000
    assert result.choice.model is None  # so that loading it fetches it


def test_a_signal_that_comes_while_it_tells_of_its_start_stops_it():
    from starlette.applications import Starlette

    from unspool.server.http import server
    from unspool.server.http.sockets import bind_socket

    stopped = []

    def started(address: str) -> bool:
        signal.raise_signal(signal.SIGTERM)
        return True

    settings = ServerSettings(port=0)
    bound = bind_socket(settings)
    server.run(
        Starlette(), settings, bound, on_stopping=lambda: stopped.append(1), on_started=started
    )
    assert stopped == [1]
