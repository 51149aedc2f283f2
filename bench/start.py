"""How long each command takes to start: the default model, a fresh process each time.

    python bench/start.py                            this environment
    python bench/start.py other/.venv/bin/python     beside another one, taking turns

Gives medians in seconds; with two environments the ratio too.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable

QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def whole(*words: str, typed: bytes = b"") -> Callable[[str], float]:
    """Until the process has ended."""

    def measure(python: str) -> float:
        began = time.perf_counter()
        subprocess.run([python, "-m", "unspool", *words], input=typed, **QUIET, check=True)
        return time.perf_counter() - began

    return measure


def first_token(python: str) -> float:
    words = ["Why do leaves change color in fall?", "-n", "8", "-t", "0"]
    began = time.perf_counter()
    with subprocess.Popen(
        [python, "-m", "unspool", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - began


def first_answer(command: str, *more: str) -> Callable[[str], float]:
    """Of a server, asked again and again from the start."""

    def measure(python: str) -> float:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        body = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode()
        address = f"http://127.0.0.1:{port}/v1/completions"
        asked = urllib.request.Request(address, body, {"content-type": "application/json"})
        began = time.perf_counter()
        process = subprocess.Popen(
            [python, "-m", "unspool", command, "--port", port, *more], **QUIET
        )
        try:
            while time.perf_counter() < began + 60:
                try:
                    urllib.request.urlopen(asked).read()
                    return time.perf_counter() - began
                except OSError:
                    time.sleep(0.005)
            raise SystemExit(f"unspool {command} did not answer within a minute")
        finally:
            process.terminate()
            process.wait()

    return measure


WORK = {
    "first token": first_token,
    "run, 1 token": whole("Hi", "-n", "1"),
    "chat, 1 token": whole("chat", "-n", "1", typed=b"Hi\n"),
    "score": whole("score", "The cat sat"),
    "tokenize": whole("tokenize", "The cat sat"),
    "models list": whole("models", "list"),
    "models info": whole("models", "info"),
    "--help": whole("--help"),
    "run --help": whole("run", "--help"),
    "serve, first answer": first_answer("serve"),
    "page, first answer": first_answer("page", "--no-open"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", nargs="?", help="another environment's python, to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    pythons = [sys.executable, *([given.other] if given.other else [])]
    for name, measure in WORK.items():
        rounds = [[measure(python) for python in pythons] for _ in range(given.rounds)]
        ours, *theirs = (statistics.median(each) for each in zip(*rounds, strict=True))
        beside = "".join(f"   other {each:.2f} s   x{ours / each:.2f}" for each in theirs)
        print(f"{name:22}{ours:.2f} s{beside}", flush=True)


if __name__ == "__main__":
    main()
