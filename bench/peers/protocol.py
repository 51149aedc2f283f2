"""What every engine's worker speaks: one JSON object a line, in on stdin, out on stdout.

At the start the worker loads the model and says
    {"ready": true, "load_s": 0.4, "engine": "llama-cpp-python 0.3.36", "weights": null,
     "weight_bytes": 96600000}
where "weights" says what they are kept in, if only the engine knows,
and then answers jobs, one at a time:
    {"work": "write", "prompts": [[1, 2], [3, 4]], "new": 128}
        -> {"seconds": 1.9, "first_s": 0.1, "ids": [[...], [...]]}
    {"work": "logits", "ids": [1, 2, 3], "file": "logits.npy"}  -> {"rows": 3}
    {"work": "memory"}                                          -> {"peak_mb": 288.0}
A job that fails is answered with {"error": "why"}. With --cold TEXT the worker writes the first
token behind the text and ends: that is what a cold start is timed with.

An engine is a class with `name`, `weights`, `weight_bytes` and the methods of `Engine` below.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Options:
    """How an engine is to be set up."""

    model: str
    threads: int
    dtype: str


class Engine(Protocol):
    name: str
    weights: str | None  # what they are kept in, if only the engine knows
    weight_bytes: int  # what one step reads of them

    def write(
        self, prompts: list[list[int]], new: int, mark: Callable[[], None]
    ) -> list[list[int]]:
        """Exactly `new` greedy tokens behind each prompt; `mark` is called with the first."""

    def logits(self, ids: list[int]) -> Any:
        """A row of logits for each token of a text, as numpy."""

    def first(self, text: str) -> str:
        """The first token behind a text."""


def serve(make: Callable[[Options], Engine]) -> None:
    """Load, then answer jobs until stdin ends."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description="An engine that answers jobs on stdin.")
    parser.add_argument("--model", required=True, help="file or folder of the weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", help="where the engine has a choice")
    parser.add_argument("--cold", metavar="TEXT", help="write one token behind TEXT and end")
    given = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(given.threads))
    # What libraries print goes to stderr: stdout belongs to the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = make(Options(given.model, given.threads, given.dtype))
    if given.cold is not None:
        answers.write(engine.first(given.cold) + "\n")
        answers.flush()
        return
    ready: dict[str, Any] = {
        "ready": True,
        "load_s": time.perf_counter() - began,
        "engine": engine.name,
    }
    ready |= {"weights": engine.weights, "weight_bytes": engine.weight_bytes}
    _say(answers, ready)
    for line in sys.stdin:
        try:
            _say(answers, answer(engine, json.loads(line)))
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


def answer(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Do one job."""
    if job["work"] == "memory":
        return {"peak_mb": peak_mb()}
    if job["work"] == "logits":
        import numpy as np

        rows = engine.logits(job["ids"])
        np.save(job["file"], np.asarray(rows, np.float32))
        return {"rows": len(rows)}
    first: list[float] = []

    def mark() -> None:
        if not first:
            first.append(time.perf_counter())

    began = time.perf_counter()
    ids = engine.write(job["prompts"], job["new"], mark)
    ended = time.perf_counter()
    if [len(row) for row in ids] != [job["new"]] * len(job["prompts"]):
        raise RuntimeError(f"wrote {[len(row) for row in ids]} tokens instead of {job['new']} each")
    first_s = (first[0] if first else ended) - began
    return {"seconds": ended - began, "first_s": first_s, "ids": ids}


def peak_mb() -> float:
    """The most memory this process ever held, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status does not tell VmHWM")


def size_of(path: Path, *patterns: str) -> int:
    """Bytes of the files that match."""
    return sum(file.stat().st_size for pattern in patterns for file in path.glob(pattern))


def _say(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
