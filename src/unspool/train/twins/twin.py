"""Train a twin of a causal model, a draft head, or a puzzle model.

    settings = TwinSettings(kind="block", data=("books/",), minutes=10)
    run = train_twin(settings, new_run(settings))         # or settings_of(run) to resume

    block      a block-diffusion twin of the frozen model: all weights, or an adapter (lora)
    fill       a bidirectional twin, for infilling and error detection
    draft      a draft head of one layer, for speculative decoding
    sudoku, countdown      a small model from scratch, causal or masked

The result is a run folder; its checkpoints are models, adapters, or draft heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

from unspool.train.learning.optimizers import make_optimizers
from unspool.train.running.events import Event
from unspool.train.running.loop import Trainer, TrainSettings
from unspool.train.running.parallel import Parallel
from unspool.train.running.runs import Run
from unspool.train.twins.draft_head import head_parts
from unspool.train.twins.masked_twin import text_parts
from unspool.train.twins.puzzle_models import puzzle_parts
from unspool.train.twins.settings import TwinParts, TwinSettings

_TRAINING_SHARE = 0.93  # of the time budget; evaluation and saving take the rest
_TRIAL_STEPS = 4  # to measure the speed


def new_run(settings: TwinSettings, folder: Path | None = None) -> Run:
    suffix = f"-{settings.sight}" if settings.is_puzzle else ""
    name = f"twin-{settings.kind.replace(':', '-')}{suffix}"
    return Run.create(
        folder or Run.free_folder(name), "twin", settings=asdict(settings), seed=settings.seed
    )


def settings_of(run: Run) -> TwinSettings:
    """The settings stored in a run."""
    stored = run.facts.get("settings", {})
    names = {field.name for field in fields(TwinSettings)}
    tuples = {name: tuple(value) for name, value in stored.items() if isinstance(value, list)}
    return TwinSettings(**{n: v for n, v in {**stored, **tuples}.items() if n in names})


def train_twin(
    settings: TwinSettings,
    run: Run,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    on_text: Callable[[int], object] = lambda done: None,
) -> Run:
    """Train to the end, from the run's last checkpoint if it has one.

    `on_text` is called with the number of texts that the model has generated for its twin.
    """
    parallel = Parallel.single_process(settings.device)
    cuda = parallel.device.type == "cuda"
    settings = replace(
        settings,
        bf16=cuda if settings.bf16 is None else settings.bf16,
        compile=cuda if settings.compile is None else settings.compile,
    )
    with _discard_on_error(run):
        parts = _parts(settings, parallel.device, on_text)
        generated = parts.facts["data"].get("sources", {}).get("written")
        if generated is not None:  # a resumed run must use the same texts
            settings = replace(settings, chat=generated["texts"], writing_minutes=None)
        settings = _with_steps(settings, parts, parallel)
        run.update(
            settings=asdict(settings), steps=settings.steps,
            trained=sum(p.numel() for p in parts.model.parameters() if p.requires_grad),
            **parts.facts,
        )  # fmt: skip
    _trainer(settings, parts, parallel, run).run(on_event)
    return run


def _parts(
    settings: TwinSettings, device: torch.device, on_text: Callable[[int], object]
) -> TwinParts:
    if settings.is_puzzle:
        return puzzle_parts(settings, device)
    if settings.kind == "draft":
        return head_parts(settings, device, on_text)
    return text_parts(settings, device, on_text)


@contextmanager
def _discard_on_error(run: Run) -> Iterator[None]:
    """Delete the folder of a run that fails before its first step."""
    try:
        yield
    except BaseException as error:
        if run.checkpoints():
            run.update(state="failed", error=str(error))
        else:
            run.discard_if_empty()
        raise


def _trainer(
    settings: TwinSettings, parts: TwinParts, parallel: Parallel, run: Run | None
) -> Trainer:
    steps = settings.steps or 1_000_000
    every = max(1, steps // 10)
    return Trainer(
        parts.model,
        parts.batches,
        parts.objective,
        lambda model: make_optimizers(model, parts.rates, parts.optimizer),
        TrainSettings(
            steps=steps, warmup=round(steps * settings.warmup), decay=settings.decay,
            accumulate=settings.accumulate, seed=settings.seed, log_every=max(1, steps // 2000),
            judge_every=settings.judge_every or every, save_every=settings.save_every or every,
            seconds=settings.budget_s, bf16=bool(settings.bf16), compile=bool(settings.compile),
        ),
        run,
        save_model=parts.save,
        evaluate=parts.evaluate,
        sampler=parts.sampler,
        parallel=parallel,
    )  # fmt: skip


def _with_steps(settings: TwinSettings, parts: TwinParts, parallel: Parallel) -> TwinSettings:
    """Set the number of steps, from `minutes` by a few trial steps that are undone."""
    if settings.steps is not None:
        return settings
    if settings.minutes is None:
        return replace(settings, steps=1000)
    trained = {n: p for n, p in parts.model.named_parameters() if p.requires_grad}
    before = {name: value.detach().clone() for name, value in trained.items()}
    trial = _trainer(settings, parts, parallel, None)
    seconds = []
    for _ in range(_TRIAL_STEPS):
        step_start = time.monotonic()
        trial.train_step()
        seconds.append(time.monotonic() - step_start)
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(before[name])
    budget_s = settings.minutes * 60 * _TRAINING_SHARE
    steps = max(1, int(budget_s / min(seconds[1:])))
    return replace(settings, steps=steps, minutes=None, budget_s=budget_s)
