"""What the commands that tune a model share: their options, the bar, and the last words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import options as o
from unspool.cli.train import source as s
from unspool.errors import UnspoolError

if TYPE_CHECKING:
    from unspool.train.running.events import Event
    from unspool.train.running.runs import Run

_LORA, _STEPS = "LoRA", "How long, and how"

Data = Annotated[
    list[str] | None,
    typer.Option("--data", "-d", help="Files, a folder, a pattern or a hub data set."),
]
Task = Annotated[
    str | None, typer.Option(help="A task of reasoning-gym, instead of data: leg_counting, ...")
]
Examples = Annotated[int, typer.Option(min=1, help="Questions of the task.")]
Lora = Annotated[
    int,
    typer.Option("--lora", min=0, help="The rank; 0 trains all weights.", rich_help_panel=_LORA),
]
Alpha = Annotated[
    float | None,
    typer.Option(help="Scale times rank. Default: twice the rank.", rich_help_panel=_LORA),
]
Dropout = Annotated[float, typer.Option(help="Share left out.", rich_help_panel=_LORA)]
Targets = Annotated[
    str,
    typer.Option(help="Matrices, of q,k,v,o,gate,up,down.", rich_help_panel=_LORA),
]
Layers = Annotated[
    int | None,
    typer.Option(min=1, help="Only in so many last layers.", rich_help_panel=_LORA),
]
From = Annotated[
    Path | None,
    typer.Option("--adapter", help="An adapter to go on from.", rich_help_panel=_LORA),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Default: from --epochs.", rich_help_panel=_STEPS)
]
Epochs = Annotated[
    float, typer.Option(min=0, help="How often all data is seen.", rich_help_panel=_STEPS)
]
Batch = Annotated[int, typer.Option(min=1, help="Rows at once.", rich_help_panel=_STEPS)]
Length = Annotated[
    int, typer.Option(min=2, help="Tokens of a row, at most.", rich_help_panel=_STEPS)
]
Accumulate = Annotated[int, typer.Option(min=1, help="Batches in a step.", rich_help_panel=_STEPS)]
Rate = Annotated[
    float | None, typer.Option("--rate", help="Learning rate.", rich_help_panel=_STEPS)
]
Seed = Annotated[int, typer.Option(help="Of all that is random.", rich_help_panel=_STEPS)]
SaveEvery = Annotated[
    int | None,
    typer.Option(min=1, help="Steps between evaluations and checkpoints.", rich_help_panel=_STEPS),
]
Patience = Annotated[
    int,
    typer.Option(
        min=0, help="Stop after this many evaluations without a new best; 0: never.",
        rich_help_panel=_STEPS,
    ),
]  # fmt: skip
Device = Annotated[str, typer.Option(help="cpu, cuda, ...", rich_help_panel=_STEPS)]
Shard = Annotated[
    bool,
    typer.Option(
        "--shard", help="With torchrun: each process has a part of the model.",
        rich_help_panel=_STEPS,
    ),
]  # fmt: skip
Report = Annotated[list[str] | None, typer.Option(help="Also to tensorboard, wandb or trackio.")]
Name = Annotated[str | None, typer.Option(help="Of the run's folder.")]
Resume = Annotated[
    str | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")
]


def carry_out(
    context: typer.Context, settings: dict[str, Any], name: str | None, resume: str | None,
    quiet: bool, reports: list[str] | None, shard: bool = False,
) -> None:  # fmt: skip
    """Make the run, or take it up again, and train it."""
    from unspool.backends.torch.available import check_torch

    s.check_resume(context, resume)
    check_torch()
    from unspool.train.running.elastic import seen_by_all
    from unspool.train.running.parallel import Parallel
    from unspool.train.running.reports import Listener, all_of, reporters
    from unspool.train.tuning.tune import settings_of, tune

    with Parallel.started(settings["device"], shard=shard) as parallel:
        folder, told = None, list[Listener]()
        with parallel.agreed():
            if parallel.first:
                begun = _begun(settings, name, resume)
                try:
                    folder, told = begun.folder, reporters(reports or (), begun)
                except UnspoolError:
                    begun.discard_if_empty()
                    raise
        run = seen_by_all(folder, parallel)
        wanted = settings_of(run)
        with Telling(run, quiet or not parallel.first) as telling:
            tune(wanted, run, all_of(telling, *told), parallel=parallel)
        if parallel.first:
            _close(run, bool(wanted.lora), wanted.model)
            s.exit_if_signalled(run)


def _begun(settings: dict[str, Any], name: str | None, resume: str | None) -> Run:
    """A run to be trained: the one to go on with, or a new one."""
    from unspool.model.run_folder import runs_folder
    from unspool.train.running.elastic import begun_before
    from unspool.train.running.runs import Run
    from unspool.train.tuning.tune import TuneSettings, new_run

    if resume is not None:
        run = Run.open(resume)
        run.take_over()
        return run
    wanted = TuneSettings(**settings)
    if (begun := begun_before(wanted)) is not None:
        begun.take_over()
        return begun
    return new_run(wanted, runs_folder() / name if name else None)


def _close(run: Run, adapter: bool, model: str | None) -> None:
    """What came out, and what to do with it."""
    if run.state == "stopped":
        o.say(f"stopped; go on with: unspool train {run.facts['kind']} --resume {run.folder}")
        return
    best_step, last_step = run.best_step, run.checkpoints()[-1].step
    if best_step is None or best_step == last_step:
        o.say(f"done: {run.final}")
    else:
        early = (
            "" if last_step >= run.steps else f"stopped early at step {last_step} of {run.steps}; "
        )
        o.say(f"done: {early}the best on held-out data is step {best_step}: {run.final}")
    named = f" --model {model}" if model else ""
    if adapter:
        o.say(f'write with it:  unspool "..."{named} --adapter {run.folder}')
        o.say(f"make it a model of its own:  unspool train merge {run.folder} FOLDER")
    else:
        o.say(f'write with it:  unspool "..." --model {run.folder}')


class Telling:
    """A bar where somebody looks, a line now and then where nobody does."""

    def __init__(self, run: Run, quiet: bool) -> None:
        self._run, self._quiet = run, quiet
        self._bar: Any = None
        self._task: Any = None
        self._next = self._steps = 0

    def __enter__(self) -> Telling:
        if not self._quiet and sys.stderr.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            from unspool.cli.show import err

            columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=err(), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("loading the model", total=None)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        from unspool.train.running.events import Judged, Logged, Replanned

        if self._quiet:
            return
        if not self._steps or isinstance(event, Replanned):
            self._steps = self._run.steps
            if epochs := self._run.facts.get("epochs"):
                o.say(f"{self._steps:,} steps, {s.describe_epochs(epochs)}")
        steps = self._steps
        if isinstance(event, Judged):
            o.say(f"step {event.step}: held-out loss {event.held_out_loss:.3f}")
        if not isinstance(event, Logged):
            return
        more = "".join(f" · {name} {value:.3g}" for name, value in event.extra.items())
        said = (
            f"{event.step}/{steps} · loss {event.loss:.3f}{more} · "
            f"{event.tokens_per_second:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, total=steps, completed=event.step, description=said)
        elif event.step >= self._next:
            self._next = event.step + max(1, steps // 20)
            o.say(said)
