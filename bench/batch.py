"""Batch jobs that are killed, and their speed: python bench/batch.py [--rows 2000]

Killed: the rows are answered once undisturbed on this machine, and once on Ray with two workers, of
which one is killed (SIGKILL) at half; a little later the driver is killed too, and the same command
is run again. Counted are rows lost, rows duplicated, and rows with another text.

Speed: tokens/s of a complete batch job (file in, journal, file out) against `lm.generate` with the
same prompts in a list, in turns on the same model; the prefix cache is cleared before each.
"""

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
from lib.arguments import add_options, make_parser
from unspool.scale.batch.job import LocalPool, WorkerActor, job_identity, run_batch
from unspool.scale.batch.journal import Journal, unfinished_folder
from unspool.scale.batch.rows import BatchSettings, scan_input
from unspool.scale.batch.worker import BatchWorker, WorkerPlan

TOPICS = ("a river", "an old clock", "the moon", "a train", "a garden", "bread", "rain", "a map")
VERBS = ("Describe", "Tell a story about", "Explain", "Praise", "Write a poem about")


def make_rows(count: int, tokens: int) -> list[dict[str, Any]]:
    """Different prompts, and lengths from 0.5 to 1.5 times `tokens`."""
    return [
        {
            "id": f"row-{number}",
            "prompt": f"{VERBS[number % 5]} {TOPICS[number // 5 % 8]}, number {number}.",
            "max_tokens": tokens // 2 + number * 7919 % (tokens + 1),
            "end": False,
        }
        for number in range(count)
    ]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# -- killed ----------------------------------------------------------------------------------------


def measure_killed(folder: Path, count: int, model: str | None, workers: int) -> dict[str, Any]:
    def command(output: str, *options: str) -> list[str]:
        files = [str(folder / "in.jsonl"), str(folder / output)]
        words = [*files, *(["-m", model] if model else []), "--seed", "7", *options]
        return [sys.executable, "-m", "unspool", "batch", *words]

    def num_done() -> int:
        journal = unfinished_folder(folder / "killed.jsonl") / "answers.jsonl"
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    def wait_for(number: int) -> None:
        while num_done() < number:
            if driver.poll() is not None:
                raise SystemExit(f"the batch ended before {number} rows were done; use more --rows")
            time.sleep(0.02)

    start = time.monotonic()
    subprocess.run(command("undisturbed.jsonl"), check=True)
    seconds = time.monotonic() - start
    on_ray = command("killed.jsonl", "--address", "local", "--workers", str(workers))
    driver = subprocess.Popen(on_ray)
    wait_for(count // 2)
    os.kill(find_workers(driver.pid)[0], signal.SIGKILL)
    done_at_worker = num_done()
    wait_for(count // 2 + count // 10)
    driver.kill()
    driver.wait()
    done_at_driver = num_done()
    subprocess.run(on_ray, check=True)
    expected = [json.loads(line) for line in (folder / "undisturbed.jsonl").open()]
    answers = [json.loads(line) for line in (folder / "killed.jsonl").open()]
    by_id = {row["id"]: row for row in answers}
    return {
        "rows": count,
        "rows done when the worker was killed": done_at_worker,
        "rows done when the driver was killed": done_at_driver,
        "lost": sum(row["id"] not in by_id for row in expected),
        "duplicated": len(answers) - len(by_id),
        "texts that differ": sum(by_id.get(row["id"]) != row for row in expected),
        "seconds undisturbed, with loading": round(seconds, 1),
    }


def find_workers(root: int) -> list[int]:
    """Worker processes among the descendants of a driver."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
    lines = [line.split(maxsplit=2) for line in listing.stdout.splitlines()]
    parents, workers = {root}, list[int]()
    while parents:
        children = [(int(pid), name) for pid, parent, name in lines if int(parent) in parents]
        title = f"ray::{WorkerActor.__name__}"
        workers += [pid for pid, name in children if name.startswith(title)]
        parents = {pid for pid, _ in children}
    return workers


# -- speed -----------------------------------------------------------------------------------------


class ReusedPool(LocalPool):
    """A pool that does not close its model."""

    def close(self) -> None: ...


def measure_speed(
    folder: Path, rows: list[dict[str, Any]], model: str | None, turns: int
) -> dict[str, Any]:
    """All rows have one length here, because `lm.generate` has one for all."""
    tokens = rows[0]["max_tokens"]
    write_rows(folder, [{**row, "max_tokens": tokens} for row in rows])
    lm: Any = unspool.load(model)
    settings = BatchSettings(seed=7, chat=False)

    def run_job(turn: int) -> int:
        with Journal(folder / f"speed-{turn}.jsonl") as journal:
            plan = WorkerPlan(None, {}, settings)
            journal.open(job_identity(scan_input(folder / "in.jsonl"), plan))
            pool = ReusedPool(BatchWorker(lm, settings, "model"))
            state = run_batch(folder / "in.jsonl", journal, lambda: pool, lambda state: None)
        return int(state.tokens)

    def run_list(turn: int) -> int:
        prompts = [row["prompt"] for row in rows]
        texts = lm.generate(prompts, max_tokens=tokens, end=False, progress=False)
        return sum(len(text.tokens) for text in texts)

    speeds: dict[str, list[float]] = {"batch": [], "generate": []}
    for turn in range(turns + 1):
        for name, run in (("batch", run_job), ("generate", run_list)):
            lm.engine.call(lm.engine.tree.index.clear)
            start = time.perf_counter()
            count = run(turn)
            if turn:  # the first warms up
                speeds[name].append(count / (time.perf_counter() - start))
    lm.close()
    ratios = [a / b for a, b in zip(speeds["batch"], speeds["generate"], strict=True)]
    return {
        "tokens/s, batch": round(statistics.median(speeds["batch"]), 1),
        "tokens/s, lm.generate of a list": round(statistics.median(speeds["generate"]), 1),
        "ratio, median of turns": round(statistics.median(ratios), 3),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=("killed", "speed"))
    add_options(
        parser,
        ("--rows", 2000),
        ("--tokens", 32, "mean length of an answer"),
        ("--model", str, "model; default: the default model"),
        ("--workers", 2),
        ("--turns", 3),
    )
    args = parser.parse_args()
    rows = make_rows(args.rows, args.tokens)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, rows)
        if args.only != "speed":
            results |= measure_killed(folder, args.rows, args.model, args.workers)
        if args.only != "killed":
            few = rows[: max(64, args.rows // 8)]
            results |= measure_speed(folder, few, args.model, args.turns)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
