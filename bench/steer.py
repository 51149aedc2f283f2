"""What interventions cost: milliseconds of a decode step with and without them, at several rows.

    python bench/steer.py model.gguf --rows 1 16 64
    python bench/steer.py 8b --device cuda          a shape of bench/lib/shapes.py, random weights

On a GPU whole texts are written, as a step is launched before the previous one has ended; tokens/s
become milliseconds of a step.

Plain and steered steps alternate on the same model, so that other load on the machine meets both.
With `--cpu-time` one thread is used and the processor's time is measured, which other load changes
less.
Steered rows add one vector to the residual stream after every layer; with `--mixed`, each row has
other interventions, at several sites.
With `--unused`, all steps are plain, and the second model has an execution plan without the
operations that change and read values: the difference is what they cost when nothing uses them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np

import unspool
from unspool.backends.cpu.plan import PlanParts


def interventions_of(lm: Any, row: int, *, mixed: bool) -> tuple[Any, ...]:
    """One vector on all layers; or, for each row, others at several sites."""
    rng = np.random.default_rng(row if mixed else 0)
    vector = rng.standard_normal(lm.config.width) * 0.01
    everywhere = unspool.Intervention("resid_post", unspool.Add(vector))
    if not mixed:
        return (everywhere,)
    return (
        everywhere,
        unspool.Intervention("mlp_out", unspool.ProjectOut(vector)),
        unspool.Intervention("head_out", unspool.Scale(0.5), layers=1, heads=0),
    )


def step_ms(lm: Any, branches: list[Any], clock: Callable[[], float]) -> float:
    """Milliseconds of a step that computes one more token of each branch."""
    start = clock()
    lm.engine.extend_all([(branch, [100]) for branch in branches])
    return (clock() - start) * 1000


def measure(
    lm: Any, rows: int, turns: int, clock: Callable[[], float], *, steered: bool, mixed: bool
) -> tuple[float, float]:
    """Median milliseconds of a plain and of a steered step of as many rows."""
    prompt = list(range(50, 82))
    groups: list[list[Any]] = [[], []]
    for row in range(rows):
        groups[0].append(lm.engine.open([row + 1, *prompt]))
        if steered:
            from unspool.backends.interventions import resolve

            chosen = resolve(interventions_of(lm, row, mixed=mixed), len(prompt))
            groups[1].append(lm.engine.open([row + 1, *prompt], interventions=chosen))
    times: list[list[float]] = [[], []]
    for turn in range(turns + 3):
        for number in (0, 1) if steered else (0,):
            ms = step_ms(lm, groups[number], clock)
            if turn >= 3:
                times[number].append(ms)
    for branch in [*groups[0], *groups[1]]:
        branch.release()
    return statistics.median(times[0]), statistics.median(times[1] or [0.0])


def load_shape(name: str, device: str) -> Any:
    """A model of a published shape with random weights, in 16 bits on a GPU."""
    import torch

    from lib.shapes import SHAPES, RandomCheckpoint
    from unspool.backends.cuda.load import load_weights
    from unspool.backends.cuda.model import CudaModel
    from unspool.model.files.config_json import config_from_hf

    checkpoint = RandomCheckpoint(config_from_hf(dict(SHAPES[name])))
    weights = load_weights(checkpoint, dtype=torch.bfloat16, device=torch.device(device))
    return unspool.LanguageModel(CudaModel(weights, lambda: "random"), None, context=512)


def measure_texts(
    lm: Any, rows: int, turns: int, clock: Callable[[], float], *, steered: bool, mixed: bool
) -> tuple[float, float]:
    """Median milliseconds of a step while as many texts are written, plain and steered."""
    prompt, steps = list(range(50, 82)), 256
    times: list[list[float]] = [[], []]

    def write(number: int) -> float:
        streams = [
            lm.stream(
                [row + 1, *prompt],
                max_tokens=steps,
                end=False,
                temperature=0,
                interventions=interventions_of(lm, row, mixed=mixed) if number else (),
            )
            for row in range(rows)
        ]
        for stream in streams:
            next(stream)  # prompts are read
        start = clock()
        for stream in streams:
            for _ in stream:
                pass
        return (clock() - start) * 1000 / (steps - 1)

    for turn in range(turns + 1):
        for number in (0, 1) if steered else (0,):
            ms = write(number)
            if turn:
                times[number].append(ms)
    return statistics.median(times[0]), statistics.median(times[1] or [0.0])


def load_without_sites(path: str, threads: int | None) -> Any:
    """Load a model whose plan has no operations that change or read values."""

    def only_number(build: Any, site: str, layer: int = 0, **_: Any) -> None:
        build.plan.sites.setdefault((site, layer), len(build.plan.sites))

    with patch.object(PlanParts, "site", only_number):
        lm = unspool.load(path, threads=threads)
    operations = lm.model.plan.operations
    assert all(operation.kind not in ("site", "stash") for operation in operations)
    return lm


def measure_unused(
    lms: list[Any], rows: int, turns: int, clock: Callable[[], float]
) -> tuple[list[float], float]:
    """Median milliseconds of a step of each model, and the median ratio of neighbouring steps."""
    prompt = list(range(50, 82))
    groups = [[lm.engine.open([row + 1, *prompt]) for row in range(rows)] for lm in lms]
    times: list[list[float]] = [[], []]
    for turn in range(turns + 3):
        for number in (0, 1) if turn % 2 else (1, 0):
            ms = step_ms(lms[number], groups[number], clock)
            if turn >= 3:
                times[number].append(ms)
    for branch in [*groups[0], *groups[1]]:
        branch.release()
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return [statistics.median(series) for series in times], ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--turns", type=int, help="repetitions (CPU 40, GPU 5)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--plain", action="store_true", help="only plain steps")
    parser.add_argument("--mixed", action="store_true", help="other interventions in each row")
    parser.add_argument("--unused", action="store_true", help="plans with and without sites")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread; not seconds")
    options = parser.parse_args()
    threads = 1 if options.cpu_time else options.threads
    on_gpu = options.device != "cpu"
    turns = options.turns or (5 if on_gpu else 40)
    lm: Any = (
        load_shape(options.model, options.device)
        if on_gpu
        else unspool.load(options.model, threads=threads)
    )
    clock = time.process_time if options.cpu_time else time.perf_counter
    if options.unused:
        lms = [lm, load_without_sites(options.model, threads)]
        for rows in options.rows:
            (present, absent), ratio = measure_unused(lms, rows, turns, clock)
            print(f"{rows:>3} rows: {present:8.3f} ms, without {absent:8.3f} ms ({ratio - 1:+.2%})")
        return
    for rows in options.rows:
        plain, steered = (measure_texts if on_gpu else measure)(
            lm, rows, turns, clock, steered=not options.plain, mixed=options.mixed
        )
        text = f"{rows:>3} rows: plain {plain:8.3f} ms"
        if not options.plain:
            text += f", steered {steered:8.3f} ms ({steered / plain - 1:+.1%})"
        print(text, flush=True)


if __name__ == "__main__":
    main()
