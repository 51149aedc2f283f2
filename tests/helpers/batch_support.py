"""Helpers for batch tests: input files, the command in this process or in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

SETTINGS = ("--seed", "7", "--max-tokens", "12")


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def some_rows(count: int) -> list[dict[str, Any]]:
    """Prompts and chats, with and without ids, some with their own settings."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        text = f"A branch of {number} nodes has"
        row: dict[str, Any] = {"prompt": text, "id": f"row-{number}"}
        if number % 3 == 1:
            row = {"messages": [{"role": "user", "content": text}], "temperature": 1.5}
        if number % 3 == 2:
            row["max_tokens"] = number % 5
        rows.append(row)
    return rows


def command(model: Path, rows: Path, output: Path, *options: str) -> list[str]:
    return ["batch", str(rows), str(output), "-m", str(model), *SETTINGS, *options]


def batch(model: Path, rows: Path, output: Path, *options: str) -> int:
    """Run the command in this process and return its exit code."""
    from unspool.cli.main import _exit_code

    return _exit_code(command(model, rows, output, *options))


def started(model: Path, rows: Path, output: Path, *options: str) -> subprocess.Popen[str]:
    """Start the command in a child process."""
    return subprocess.Popen(
        [sys.executable, "-m", "unspool", *command(model, rows, output, *options)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def done_rows(output: Path) -> int:
    """Count the rows in the journal."""
    journal = output.with_name(f"{output.name}.unfinished") / "answers.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline, "timeout"
        assert process is None or process.poll() is None, process and process.communicate()
        time.sleep(0.01)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and stderr."""
    try:
        _, stderr = process.communicate(timeout=120)
        return process.returncode, stderr
    finally:
        process.kill()


def processes_below(root: int, title: str = "") -> list[int]:
    """Return the descendants of a process whose command line contains `title`."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
    lines = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    parents: Sequence[int] = [root]
    descendants: list[tuple[int, str]] = []
    while parents:
        children = [(int(pid), name) for pid, parent, name in lines if int(parent) in parents]
        descendants += children
        parents = [pid for pid, _ in children]
    return [pid for pid, name in descendants if title in name]
