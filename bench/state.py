"""Measure stored state: listing 1,000 sessions, reopening a long branch, the cost for each token.

    python bench/state.py [--model model.gguf]

Prints one line for each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

SESSIONS, LONG, WRITTEN = 1000, 4000, 256


@contextmanager
def serving(model: str | None, *options: str) -> Iterator[str]:
    """Start a server in another process; yields its address."""
    command = [sys.executable, "-m", "unspool", "serve", "--port", "0", "--log-format", "json"]
    command += ["--max-body", str(64 << 20), *(["--model", model] if model else []), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if match := re.search(r'"address": ?"([^"]+)"', line):
                break
        else:
            raise RuntimeError("the server did not start")
        reader = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield match[1]
        reader.kill()
        reader.wait()
    finally:
        process.terminate()
        process.wait()


def ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(f"{url}/v1/tree{path}", data), timeout=600) as answer:
        return json.load(answer)


def measure_library(model: str | None, folder: str) -> None:
    with serving(model, "--state", folder) as url:
        for number in range(SESSIONS):
            session = ask(url, "/sessions", {"title": f"Story {number}"})["id"]
            ask(url, "", {"prompt": f"Story {number} begins with a word", "session": session})
    with serving(model, "--state", folder) as url:
        for name in ("first", "next"):
            began = time.perf_counter()
            listed = ask(url, "/sessions?limit=1000")["data"]
            print(f"list {len(listed)} sessions, {name} request: {_ms(began)} ms")
        began = time.perf_counter()
        matches = ask(url, "/sessions?query=story%20777")["data"]
        print(f"search them: {_ms(began)} ms, {len(matches)} match")


def measure_reopening(model: str | None, folder: str) -> None:
    prompt = ("It was a dark and stormy night, and the keeper read on. " * 1000).split(" ")
    with serving(model, "--state", folder) as url:
        text = " ".join(prompt[:LONG])
        branch = ask(url, "", {"prompt": text, "temperature": 0, "end": False})
        tokens = [token["id"] for token in branch["prompt"]["tokens"]][:LONG]
        branch = ask(url, "", {"prompt": tokens, "temperature": 0, "end": False})
        ask(url, f"/{branch['id']}/resume", {"max_tokens": 8})
    for name in ("the last text, restored at the start", "from stored pages", "computed again"):
        if name == "from stored pages":  # of a text that is not the last one
            with serving(model, "--state", folder) as url:
                short = ask(url, "", {"prompt": "Hello " * 40, "temperature": 0})["id"]
                ask(url, f"/{short}/resume", {"max_tokens": 8})
        elif name == "computed again":
            for file in Path(folder).rglob("*.kv"):
                file.unlink()
        with serving(model, "--state", folder) as url:
            time.sleep(1)
            began = time.perf_counter()
            forked = ask(url, f"/{branch['id']}/fork", {})
            opened = _ms(began)
            began = time.perf_counter()
            result = ask(url, f"/{forked['id']}/resume", {"max_tokens": 1})
            last = result["last"]
            print(
                f"branch of {last['tokens_before']} tokens after a restart, {name}: loaded in "
                f"{opened} ms, next token after {_ms(began)} ms ({last['reused_tokens']} reused)"
            )


def measure_tokens(model: str | None, folder: str) -> None:
    for name, options in (("without", ()), ("with", ("--state", folder))):
        with serving(model, *options) as url:
            rates = []
            for seed in range(4):
                branch = ask(url, "", {"prompt": "Once upon a time", "seed": seed, "end": False})
                result = ask(url, f"/{branch['id']}/resume", {"max_tokens": WRITTEN})["last"]
                seconds = result["total_seconds"] - result["first_token_seconds"]
                rates.append((WRITTEN - 1) / seconds)
            best = sorted(rates[1:])
            print(f"{name} --state: {best[len(best) // 2]:.1f} tokens/s, traced steps")


def _ms(began: float) -> int:
    return round(1000 * (time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model file; default: the default model")
    parser.add_argument("--only", default="tokens,reopening,library")
    arguments = parser.parse_args()
    parts = {
        "tokens": measure_tokens, "reopening": measure_reopening, "library": measure_library,
    }  # fmt: skip
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    for name in arguments.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            parts[name](arguments.model, folder)


if __name__ == "__main__":
    main()
