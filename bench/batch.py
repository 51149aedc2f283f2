"""Batches that are killed, and how fast they are: python bench/batch.py [--rows 2000]

Killed: the rows are answered once undisturbed on this machine, and once on Ray with two workers, of
which one gets a SIGKILL at half; a little later the driver gets one too, and the same command is
given once more. Counted are rows lost, rows doubled, and rows whose text is another one.

Speed: tokens a second of a whole batch (file in, journal, file out) against `lm.generate` with the
same prompts in a list, in turns on the same model; the cache of prefixes is emptied before each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import unspool
from unspool.scale.batch.job import LocalPool, WorkerActor, job_identity, run_batch
from unspool.scale.batch.journal import Journal, unfinished_folder
from unspool.scale.batch.rows import BatchSettings, scan_input
from unspool.scale.batch.worker import BatchWorker, WorkerPlan

THINGS = ("a river", "an old clock", "the moon", "a train", "a garden", "bread", "rain", "a map")
WAYS = ("Describe", "Tell a story about", "Explain", "Praise", "Write a poem about")


def rows_of(count: int, tokens: int) -> list[dict[str, Any]]:
    """Prompts that differ, and lengths that do: from half of `tokens` to one and a half."""
    return [
        {
            "id": f"row-{number}",
            "prompt": f"{WAYS[number % 5]} {THINGS[number // 5 % 8]}, number {number}.",
            "max_tokens": tokens // 2 + number * 7919 % (tokens + 1),
            "end": False,
        }
        for number in range(count)
    ]


# -- killed ------------------------------------------------------------------------------------


def command(folder: Path, output: str, model: str | None, *more: str) -> list[str]:
    named = ["-m", model] if model else []
    files = [str(folder / "in.jsonl"), str(folder / output)]
    return [sys.executable, "-m", "unspool", "batch", *files, *named, "--seed", "7", *more]


def done(folder: Path, output: str) -> int:
    journal = unfinished_folder(folder / output) / "answers.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def workers_below(root: int) -> list[int]:
    """The workers' processes among all that a driver has started."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
    lines = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    below, found = {root}, list[int]()
    while below:
        children = [(int(pid), name) for pid, parent, name in lines if int(parent) in below]
        found += [pid for pid, name in children if name.startswith(f"ray::{WorkerActor.__name__}")]
        below = {pid for pid, _ in children}
    return found


def wait_for(driver: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    while done(folder, "killed.jsonl") < count:
        if driver.poll() is not None:
            raise SystemExit(f"the batch ended before {count} rows were done; give it more --rows")
        time.sleep(0.02)


def killed(folder: Path, count: int, model: str | None, workers: int) -> dict[str, Any]:
    began = time.monotonic()
    subprocess.run(command(folder, "undisturbed.jsonl", model), check=True)
    alone = time.monotonic() - began
    on_ray = command(folder, "killed.jsonl", model, "--address", "local", "--workers", str(workers))
    driver = subprocess.Popen(on_ray)
    wait_for(driver, folder, count // 2)
    os.kill(workers_below(driver.pid)[0], signal.SIGKILL)
    at_worker = done(folder, "killed.jsonl")
    wait_for(driver, folder, count // 2 + count // 10)
    driver.kill()
    driver.wait()
    at_driver = done(folder, "killed.jsonl")
    subprocess.run(on_ray, check=True)
    wanted = [json.loads(line) for line in (folder / "undisturbed.jsonl").open()]
    found = [json.loads(line) for line in (folder / "killed.jsonl").open()]
    by_id = {row["id"]: row for row in found}
    return {
        "rows": count,
        "rows done when the worker was killed": at_worker,
        "rows done when the driver was killed": at_driver,
        "lost": sum(row["id"] not in by_id for row in wanted),
        "doubled": len(found) - len(by_id),
        "texts that differ": sum(by_id.get(row["id"]) != row for row in wanted),
        "seconds undisturbed, with loading": round(alone, 1),
    }


# -- speed -------------------------------------------------------------------------------------


class _Kept(LocalPool):
    """A pool whose model is used again."""

    def close(self) -> None:
        pass


def batch_seconds(lm: Any, folder: Path, turn: int) -> tuple[float, int]:
    settings = BatchSettings(seed=7, chat=False)
    plan = WorkerPlan(None, {}, settings)
    began = time.perf_counter()
    with Journal(folder / f"speed-{turn}.jsonl") as journal:
        journal.open(job_identity(scan_input(folder / "in.jsonl"), plan))
        state = run_batch(
            folder / "in.jsonl",
            journal,
            lambda: _Kept(BatchWorker(lm, settings, "model")),
            lambda state: None,
        )
    return time.perf_counter() - began, state.tokens


def list_seconds(lm: Any, prompts: list[str], tokens: int) -> tuple[float, int]:
    began = time.perf_counter()
    texts = lm.generate(prompts, max_tokens=tokens, end=False, progress=False)
    return time.perf_counter() - began, sum(len(text.tokens) for text in texts)


def speed(
    folder: Path, rows: list[dict[str, Any]], model: str | None, turns: int
) -> dict[str, Any]:
    """All rows of one length here, as `lm.generate` has one for all."""
    tokens = rows[0]["max_tokens"]
    alike = [{**row, "max_tokens": tokens} for row in rows]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in alike))
    lm = unspool.load(model)
    prompts = [row["prompt"] for row in rows]
    found: dict[str, list[float]] = {"batch": [], "generate": []}
    for turn in range(turns + 1):
        for name in found:
            lm.engine.call(lambda: lm.engine.tree.index.clear())
            if name == "batch":
                seconds, written = batch_seconds(lm, folder, turn)
            else:
                seconds, written = list_seconds(lm, prompts, tokens)
            if turn:  # the first is to warm up
                found[name].append(written / seconds)
    lm.close()
    ratios = [a / b for a, b in zip(found["batch"], found["generate"], strict=True)]
    return {
        "tokens/s, batch": round(statistics.median(found["batch"]), 1),
        "tokens/s, lm.generate of a list": round(statistics.median(found["generate"]), 1),
        "ratio, median of turns": round(statistics.median(ratios), 3),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=2000)
    options.add_argument("--tokens", type=int, default=32, help="of an answer, on the average")
    options.add_argument("--model", help="a model; the default one otherwise")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--only", choices=("killed", "speed"))
    given = options.parse_args()
    rows = rows_of(given.rows, given.tokens)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        result: dict[str, Any] = {}
        if given.only != "speed":
            result |= killed(folder, given.rows, given.model, given.workers)
        if given.only != "killed":
            few = rows[: max(64, given.rows // 8)]
            result |= speed(folder, few, given.model, given.turns)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
