"""Twins of a causal model, trained: settings, runs, and the parts of each kind.

    settings = TwinSettings(kind="block", data=("books/",), minutes=10)
    run = train_twin(settings, new_run(settings))         # or settings_of(run) to go on

    block      a block-diffusion twin beside the frozen model: all weights, or an adapter (lora)
    fill       a twin that sees the whole text, for gaps and doubt
    draft      a head of one layer that drafts the model's next tokens
    sudoku, countdown      a small model from scratch, causal or masked

What comes out is a run like any other; its checkpoints are models, adapters, or heads.
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
from unspool.train.twins.kinds.head import head_parts
from unspool.train.twins.kinds.puzzle import puzzle_parts
from unspool.train.twins.kinds.text import text_parts
from unspool.train.twins.settings import Parts, TwinSettings

_SHARE = 0.93  # of the time that was given: the rest is for judging and saving
_TRIED = 4  # steps by which the speed is told


def new_run(settings: TwinSettings, folder: Path | None = None) -> Run:
    of = f"-{settings.sight}" if settings.is_puzzle else ""
    name = f"twin-{settings.kind.replace(':', '-')}{of}"
    return Run.create(
        folder or Run.free_folder(name), "twin", settings=asdict(settings), seed=settings.seed
    )


def settings_of(run: Run) -> TwinSettings:
    """What a run was started with."""
    kept = run.facts.get("settings", {})
    names = {each.name for each in fields(TwinSettings)}
    tuples = {name: tuple(value) for name, value in kept.items() if isinstance(value, list)}
    return TwinSettings(**{n: v for n, v in {**kept, **tuples}.items() if n in names})


def train_twin(
    settings: TwinSettings,
    run: Run,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    tell: Callable[[int], object] = lambda done: None,
) -> Run:
    """Train to the end; a run with a checkpoint goes on from it. `tell` hears how many texts the
    model has written for its twin."""
    parallel = Parallel.alone(settings.device)
    cuda = parallel.device.type == "cuda"
    settings = replace(
        settings,
        bf16=cuda if settings.bf16 is None else settings.bf16,
        compile=cuda if settings.compile is None else settings.compile,
    )
    with _left_clean(run):
        parts = _parts(settings, parallel.device, tell)
        own = parts.facts["data"].get("sources", {}).get("written")
        if own is not None:  # going on must find the same texts
            settings = replace(settings, chat=own["texts"], writing_minutes=None)
        settings = _timed(settings, parts, parallel)
        run.update(
            settings=asdict(settings), steps=settings.steps,
            trained=sum(p.numel() for p in parts.model.parameters() if p.requires_grad),
            **parts.facts,
        )  # fmt: skip
    _trainer(settings, parts, parallel, run).run(on_event)
    return run


def _parts(settings: TwinSettings, device: torch.device, tell: Callable[[int], object]) -> Parts:
    if settings.is_puzzle:
        return puzzle_parts(settings, device)
    if settings.kind == "draft":
        return head_parts(settings, device, tell)
    return text_parts(settings, device, tell)


@contextmanager
def _left_clean(run: Run) -> Iterator[None]:
    """Nothing is left of a run that never began."""
    try:
        yield
    except BaseException as error:
        if run.checkpoints():
            run.update(state="failed", error=str(error))
        else:
            run.discard_if_empty()
        raise


def _trainer(settings: TwinSettings, parts: Parts, parallel: Parallel, run: Run | None) -> Trainer:
    steps = settings.steps or 1_000_000
    often = max(1, steps // 10)
    return Trainer(
        parts.model,
        parts.batches,
        parts.objective,
        lambda model: make_optimizers(model, parts.rates, parts.optimizer),
        TrainSettings(
            steps=steps, warmup=round(steps * settings.warmup), decay=settings.decay,
            accumulate=settings.accumulate, seed=settings.seed, log_every=max(1, steps // 2000),
            judge_every=settings.judge_every or often, save_every=settings.save_every or often,
            seconds=settings.budget_s, bf16=bool(settings.bf16), compile=bool(settings.compile),
        ),
        run,
        save_model=parts.save,
        judge=parts.judge,
        sampler=parts.sampler,
        parallel=parallel,
    )  # fmt: skip


def _timed(settings: TwinSettings, parts: Parts, parallel: Parallel) -> TwinSettings:
    """The steps that fit the minutes, by a few that are taken back."""
    if settings.steps is not None:
        return settings
    if settings.minutes is None:
        return replace(settings, steps=1000)
    trained = {n: p for n, p in parts.model.named_parameters() if p.requires_grad}
    before = {name: value.detach().clone() for name, value in trained.items()}
    trial = _trainer(settings, parts, parallel, None)
    seconds = []
    for _ in range(_TRIED):
        since = time.monotonic()
        trial.one_step()
        seconds.append(time.monotonic() - since)
    with torch.no_grad():
        for name, value in trained.items():
            value.copy_(before[name])
    left = settings.minutes * 60 * _SHARE
    steps = max(1, int(left / min(seconds[1:])))
    return replace(settings, steps=steps, minutes=None, budget_s=left)
