"""`unspool serve` as a process: starting, stopping, what it logs, and the memory it gives back."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from helpers.running_server import running, wait_until
from unspool.cli import serve as command
from unspool.cli.main import main
from unspool.cli.options import ModelChoice
from unspool.errors import SettingsError
from unspool.model.hub import find
from unspool.server.http import server as http_server
from unspool.server.http import sockets
from unspool.server.http.settings import ServerSettings
from unspool.server.runtime.registry import ModelEntry

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
        line = wait_until(lambda: next((line for line in self.lines if '"started"' in line), ""))
        return str(json.loads(line)["address"])


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


def test_a_server_that_was_killed_starts_again_and_stops_when_its_texts_are_done(small_model):
    """The first one has a log for people, the second one for programs."""
    endless = {"end": False, "endless": True}
    body = {"prompt": SECRET, "max_tokens": 1500, "stream": True, "unspool": endless}
    model = ("--model", str(small_model))
    with serving(*model, "--log-format", "text", "--log-prompts") as killed:
        match = wait_until(lambda: re.search(r"address=(\S+)", "".join(killed.lines)))
        address = match[1]
        text = completed(address)
        assert httpx.get(f"{address}/nonsense").status_code == 404
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
            killed.popen.kill()
            assert killed.popen.wait(60) == -signal.SIGKILL
        killed.reader.join(5)
    log = "".join(killed.lines)
    assert "POST /v1/completions 200" in log and "8 generated" in log and SECRET in log
    assert "GET /nonsense 404" in log and "error=Not Found" in log

    lines: list[str] = []
    started = threading.Event()

    def listen() -> None:
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                started.set()

    port = address.rpartition(":")[2]
    with serving(*model, "--port", port, "--drain", "60") as server:
        assert server.url == address and completed(address) == text
        listener = threading.Thread(target=listen)
        listener.start()
        assert started.wait(30)
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: any('"stopping"' in line for line in server.lines))
        end = time.monotonic() + 60
        with pytest.raises((httpx.ConnectError, httpx.RemoteProtocolError, AssertionError)):
            while time.monotonic() < end:  # it stops listening a moment after that line
                completed(address, max_tokens=1)
        listener.join(60)
        assert server.popen.wait(60) == 0
        server.reader.join(5)
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [chunk for chunk in chunks if chunk["choices"]][-1]["choices"][0]["finish_reason"]
    assert "data: [DONE]" in lines
    events = [json.loads(line) for line in server.lines]
    assert events[0]["event"] == "started" and events[-1]["event"] == "stopped"
    requests = [line for line in events if line["event"] == "request"]
    assert {line["status"] for line in requests} <= {200, 503}  # 503: refused while stopping
    assert requests[-1]["completion_tokens"] == 1500 and requests[-1]["model"]
    assert not any(SECRET in line for line in server.lines)


def test_a_text_that_takes_longer_than_the_drain_time_is_cut_off(small_entry: ModelEntry):
    body = {"prompt": "a", "max_tokens": 10**6, "stream": True}
    body["unspool"] = {"end": False, "endless": True}
    with (
        running([small_entry], drain=0.2) as server,
        server.http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.stop()
        with suppress(httpx.RemoteProtocolError):
            assert "data: [DONE]" not in list(lines)


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = str(used.getsockname()[1])
        empty = tmp_path / "keys.txt"
        empty.write_text("\n# nothing\n")
        broken = tmp_path / "models" / "broken.gguf"
        broken.parent.mkdir()
        broken.write_bytes(b"GGUF" + bytes(range(64)))
        for arguments, words in (
            (["--port", port], "choose another with --port"),
            (["--port", "70000"], "got 70000"),
            (["--api-key", "short"], "at least 8"),
            (["--api-key-file", str(tmp_path / "none")], "cannot be read"),
            (["--api-key-file", str(empty)], "contains no key"),
            (["--log-level", "loud"], "loud"),
            (["--log-format", "xml"], "xml"),
            (["--max-running", "0"], "at least 1"),
            (["--model", str(tmp_path / "no.gguf")], "no.gguf"),
            (
                ["--port", "0", "--model", str(broken), "--log-level", "warning"],
                "broken.gguf: not a usable GGUF file",
            ),
            (["--model", "a=x", "--deadline", "-1"], ""),
        ):
            with pytest.raises(SystemExit) as caught:
                main(["serve", *arguments])
            reply = capsys.readouterr().err
            assert caught.value.code == 2 and words in reply and reply.count("\n") == 1


def test_who_listens_everywhere_without_a_key_is_warned(monkeypatch: pytest.MonkeyPatch):
    message: list[str] = []
    monkeypatch.setattr(sockets, "bind_socket", lambda settings: None)
    monkeypatch.setattr(http_server, "run", lambda *params, **named: None)
    monkeypatch.setattr(command, "say", message.append)
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


def test_the_default_model_is_fetched_while_the_rest_starts(monkeypatch, tmp_path):
    """Its name and size are known before; nothing is fetched before it is loaded."""
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path))
    monkeypatch.delenv("UNSPOOL_DEFAULT_MODEL", raising=False)
    monkeypatch.setattr(find, "default_model", lambda **_: pytest.fail("fetched too early"))
    result = command._locate(ModelChoice(None, {}), None)
    assert result.name == "SmolLM2-135M-Instruct.Q4_1" and result.size > 90_000_000
    assert result.choice.model is None  # so that loading it fetches it


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_while_it_tells_of_its_start_stops_it(number: signal.Signals):
    stopped = []

    def started(address: str) -> bool:
        signal.raise_signal(number)
        return True

    settings = ServerSettings(port=0)
    bound = sockets.bind_socket(settings)
    http_server.run(
        Starlette(), settings, bound, on_stopping=lambda: stopped.append(1), on_started=started
    )
    assert stopped == [1]


# As a server runs: objects that exist after the start are frozen.
SCRIPT = """
import asyncio, gc, json, sys
from pathlib import Path

import unspool
from unspool.server.runtime.registry import ModelEntry, ModelRegistry

path = Path(sys.argv[1])
size = path.stat().st_size


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


async def generate(registry, name):
    async with registry.use(name) as served:
        lm = served.lm
        await asyncio.to_thread(lambda: lm.generate("Once upon a time", max_tokens=2).text)
        await asyncio.to_thread(lambda: lm.score("The cat sat on the mat").perplexity)


async def peak(registry, *names):
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    for name in names:
        await generate(registry, name)
    return status("VmHWM")


async def main():
    load = lambda: unspool.load(path, memory=64 << 20, threads=1)
    entries = [ModelEntry(name, load, size) for name in ("one", "two")]
    registry = ModelRegistry(entries, model_memory=size * 3 // 2)
    idle = asyncio.ensure_future(registry.close_idle())
    async with registry.use(None):
        gc.freeze()
    after = []
    for _ in range(2):
        alone = await peak(registry, "one")
        registry.unload("one")
        while registry.loaded or registry._closing:
            await asyncio.sleep(0.005)
        after.append(status("VmRSS"))
    together = await peak(registry, "one", "two")
    await registry.close_all()
    idle.cancel()
    print(json.dumps({"size": size, "after": after, "alone": alone, "together": together}))


asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_unloaded_models_goes_back(default_model: Path):
    command = [sys.executable, "-c", SCRIPT, str(default_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout)
    after, size = figures["after"], figures["size"]
    assert figures["alone"] - after[0] > size * 3 // 4  # the weights are gone
    # Less than one model (98 MB): the allocator keeps a little, and by chance.
    assert after[-1] <= after[0] + (64 << 20)
    assert figures["together"] <= figures["alone"] + size // 2  # two would take a whole one more
