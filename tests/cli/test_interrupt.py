"""Ctrl-C at every moment: no traceback, exit code 130, soon. Real processes, real signals."""

from __future__ import annotations

import json
import os
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

from helpers.terminal import Terminal

START = "from unspool.cli import main; main()"  # as the installed program does

# Sends Ctrl-C when the Nth module is imported: an exact moment on every machine.
AT_IMPORT = """
import signal, sys
from unspool.cli import main
countdown = int(sys.argv.pop(1))
def on_event(event, _):
    global countdown
    if event == "import":
        countdown -= 1
        if countdown == 0:
            signal.raise_signal(signal.SIGINT)
sys.addaudithook(on_event)
main()
"""


def wait(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The exit code, and the content of stderr."""
    try:
        return process.wait(60), process.communicate()[1].decode()
    finally:
        process.kill()


def start(*arguments: str, code: str = START, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **env},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "command"), [(1, "chat"), (90, "chat"), (200, "chat"), (600, "serve")]
)
def test_while_modules_are_imported(number: int, command: str, words_folder: Path):
    """`serve` imports the web framework while a thread loads the model."""
    port = ("--port", "0") if command == "serve" else ()
    process = start(str(number), command, "-m", str(words_folder), *port, code=AT_IMPORT)
    assert wait(process) == (130, "")


@contextmanager
def silent_server() -> Iterator[tuple[str, threading.Event]]:
    """An address that accepts connections and never responds; the event: one has come."""
    connected = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connections = []

        def accept() -> None:
            while True:
                try:
                    connections.append(listening.accept())
                except OSError:
                    return
                connected.set()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", connected


def test_while_a_model_is_downloaded(tmp_path: Path):
    with silent_server() as (address, connected):
        process = start("Hi", "-m", "some/model", UNSPOOL_CACHE=str(tmp_path),
                        HF_HOME=str(tmp_path), HF_ENDPOINT=address)  # fmt: skip
        assert connected.wait(60)
        while process.poll() is None:  # again: a signal just before a system call does not end it
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
        assert wait(process) == (130, "")


def test_it_is_ignored_in_the_background_of_a_shell(tmp_path: Path):
    """While the default model is downloaded."""
    with silent_server() as (address, connected):
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", START, "Hi"],
            env={**os.environ, "UNSPOOL_CACHE": str(tmp_path),
                 "PIP_INDEX_URL": f"{address}/simple", "UNSPOOL_DEFAULT_MODEL": ""},
        )  # fmt: skip
        assert connected.wait(60)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()
        process.wait(30)


# -- a server that streams -------------------------------------------------------------------------

LONG = {"max_tokens": 60_000, "unspool": {"end": False}}
CHAT = {"messages": [{"role": "user", "content": "Count."}], **LONG, "stream": True}


def read_stream(
    url: str, body: dict[str, Any], has_started: threading.Event, lines: list[str]
) -> None:
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        for line in response.iter_lines():
            has_started.set()
            if line:
                lines.append(line)


def test_while_a_server_streams(long_words_folder: Path):
    process = start("serve", "--port", "0", "-m", str(long_words_folder))
    try:
        assert process.stderr is not None
        match = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline().decode())
        assert match
        url, threads, streams = match[0], [], []
        status_codes: list[int] = []
        plain = {"prompt": "Count:", **LONG}
        threads.append(threading.Thread(target=lambda: status_codes.append(
            httpx.post(f"{url}/v1/completions", json=plain, timeout=60).status_code)))  # fmt: skip
        threads[-1].start()
        branch = httpx.post(f"{url}/v1/tree", json={"prompt": "Count:"}, timeout=60).json()["id"]
        resume = {"max_tokens": 60_000, "stream": True, "end": False}
        for path, body in (("/v1/chat/completions", CHAT), (f"/v1/tree/{branch}/resume", resume)):
            has_started, lines = threading.Event(), list[str]()
            parameters = (f"{url}{path}", body, has_started, lines)
            threads.append(threading.Thread(target=read_stream, args=parameters))
            threads[-1].start()
            assert has_started.wait(60)
            streams.append(lines)
        until = time.monotonic() + 60
        while "unspool_sequences_running 3.0" not in httpx.get(f"{url}/metrics", timeout=60).text:
            assert time.monotonic() < until, "not all three are running"
        process.send_signal(signal.SIGINT)
        code, err = wait(process)
        assert code == 0 and "Traceback" not in err and "Cancel" not in err, err
        assert len(err.splitlines()) <= 7, err
        assert all(json.loads(line)["level"] == "info" for line in err.splitlines())
        for thread in threads:
            thread.join(30)
        assert all("shutting_down" in lines[-1] for lines in streams) and status_codes == [503]
    finally:
        process.kill()
        process.wait(30)


# -- at a terminal ---------------------------------------------------------------------------------


def test_in_a_chat_it_ends_the_answer_and_then_the_chat(long_words_folder: Path, words: Any):
    letter = words.tokenizer.encode("x")[0]
    options = ("-n", "60000", "--logit-bias", f"{letter}=100", "-m", str(long_words_folder))
    with Terminal("chat", *options) as screen:
        screen.wait_for("› ")
        screen.type("Count.\n")
        screen.wait_for("xxxx")
        screen.type("\x03")
        screen.wait_for("stopped; ")
        screen.wait_for("prompt tokens from the cache")
        screen.type("/undo\n")
        screen.wait_for("removed: Count.\n› ")
        screen.type("\x03")
        assert screen.ended(again="\x03") == 130 and "Traceback" not in screen.display_text


def test_explore_restores_the_screen(words_folder: Path):
    with Terminal("explore", "Once upon a time", "-m", str(words_folder)) as screen:
        screen.wait_for("next token")
        screen.type("\x03")
        assert screen.ended() == 130 and "Traceback" not in screen.display_text
        assert screen.raw.rindex("\x1b[?1049l") > screen.raw.rindex("\x1b[?1049h")
        assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")
