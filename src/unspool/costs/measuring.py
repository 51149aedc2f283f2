"""`unspool.measure_costs(lm)`: measure all parts of a report, one after the other.

    report = unspool.measure_costs(lm, quick=True)
    print(report)                                      # as text
    Path("costs.html").write_text(report.html())       # with plots
    report.to_dict()                                   # for JSON

A part is a file in `parts/` with `measure(lm, plan) -> Part`. PARTS lists them in the order in
which they are measured and shown. They are imported when measured.
"""

from __future__ import annotations

import difflib
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from unspool.costs.part import VOCABULARY, CostPart, MeasurementPlan
from unspool.costs.report import Report
from unspool.costs.texts import SampleTexts, sample_texts
from unspool.errors import SettingsError, UnspoolError
from unspool.progress import progress_bar

if TYPE_CHECKING:
    from unspool.lm import LanguageModel


def model_name(lm: LanguageModel) -> str:
    """Return a model's display name: its file, folder or run, else its family."""
    if lm.path is None:
        return lm.config.family
    path = Path(lm.path).resolve()
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}/{path.name}"
    return path.stem if path.suffix == ".gguf" else path.name


def machine_facts(lm: LanguageModel) -> dict[str, str]:
    """Return facts about the machine and how the model runs on it, by name."""
    from unspool.model.weights import parameter_count

    return {
        "parameters": f"{parameter_count(lm.config):,}",
        "weights": lm.model.precision,
        "context": f"{lm.context:,} tokens",
        VOCABULARY: f"{lm.config.vocab_size:,} tokens",
        "device": _device(lm.model.device),
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "threads": str(getattr(lm.model, "threads", "")) or "torch default",
    }


def processor_name() -> str:
    """Return the processor's name from the system, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _device(name: str) -> str:
    """Return a device with its product name if it is a GPU."""
    if not name.startswith("cuda"):
        return name
    import torch

    return f"{name}, {torch.cuda.get_device_name(name)}"


# Part names with their relative duration, for the progress bar.
PARTS: dict[str, int] = {
    "waiting": 4,
    "snowball": 3,
    "exposure": 3,
    "loops": 5,
    "whole": 3,
    "fading": 6,
    "confidence": 2,
    "remedies": 4,
}
# Called with a part's name, its progress (0 to 1), and at the end the part. An exception from it
# ends the measurement.
Watch = Callable[[str, float, CostPart | None], object]
_PACKAGE = f"{__package__}.parts"
_STEPS = 100  # of the progress bar per unit of duration


def measure_costs(
    lm: LanguageModel,
    *,
    quick: bool = False,
    parts: Sequence[str] | None = None,
    texts: SampleTexts | Sequence[str] | None = None,
    seed: int = 0,
    twin: object | None = None,
    progress: bool = True,
    watch: Watch | None = None,
) -> Report:
    """Measure the costs of autoregressive decoding with this model.

    Args:
        lm: The model.
        quick: Take less than a minute, with wide intervals.
        parts: Measure only these, of `PARTS`.
        texts: Human-written texts to measure on; by default State of the Union addresses.
        seed: Of all random draws.
        twin: A masked model (`unspool.load`) that also scores complete texts.
        progress: Show a progress bar.
        watch: Called with each part's progress, and with the part when it is complete.
    """
    names = select_parts(parts)
    lm.config.require_causal()
    sample = texts if isinstance(texts, SampleTexts) else sample_texts(texts)
    plan = MeasurementPlan(quick, seed, sample.texts, twin=twin)
    started = perf_counter()
    results: list[CostPart] = []
    total = sum(PARTS[name] for name in names)
    with progress_bar("measuring", _STEPS * total, show=progress) as update_bar:
        done = 0
        for name in names:
            report_progress = _progress_callback(update_bar, done, name, watch)
            report_progress(0.0)
            results.append(measure_part(lm, name, replace(plan, on_progress=report_progress)))
            done += PARTS[name]
            update_bar(_STEPS * done)
            if watch is not None:
                watch(name, 1.0, results[-1])
    if not any(part.figures for part in results):
        raise UnspoolError(f"no part could be measured; {results[0].name}: {results[0].notes[0]}")
    return Report(
        model=model_name(lm),
        machine={**machine_facts(lm), "texts": sample.source},
        parts=tuple(results),
        seconds=perf_counter() - started,
        quick=quick,
        seed=seed,
    )


def select_parts(requested: Sequence[str] | None) -> list[str]:
    """Return the requested parts in the order of PARTS; all if None."""
    if requested is None:
        return list(PARTS)
    for name in requested:
        if name not in PARTS:
            near = difflib.get_close_matches(name, PARTS, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise SettingsError(f"unknown part {name!r}; {hint}choose from {', '.join(PARTS)}")
    if not requested:
        raise SettingsError(f"parts is empty; choose from {', '.join(PARTS)}")
    return [name for name in PARTS if name in requested]


def measure_part(lm: LanguageModel, name: str, plan: MeasurementPlan) -> CostPart:
    """Measure one part and its duration.

    If the part cannot be measured with this model, return a part with the reason, so that the
    results of the other parts are not lost.
    """
    started = perf_counter()
    try:
        part: CostPart = import_module(f"{_PACKAGE}.{name}").measure(lm, plan)
    except UnspoolError as error:
        part = CostPart(name, name.capitalize(), "", notes=[f"Could not be measured: {error}."])
    return replace(part, seconds=perf_counter() - started)


def _progress_callback(
    update_bar: Callable[[int], object], done: int, name: str, watch: Watch | None
) -> Callable[[float], object]:
    """Return a function that passes a part's progress to the bar and to `watch`."""

    def report_progress(share: float) -> None:
        share = min(1.0, share)
        update_bar(_STEPS * done + round(_STEPS * PARTS[name] * share))
        if watch is not None:
            watch(name, share, None)

    return report_progress
