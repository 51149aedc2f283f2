"""Options, progress display and run handling of the fine-tuning commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unspool.cli import options as o
from unspool.cli.train import source as s

if TYPE_CHECKING:
    from unspool.train.running.events import Event
    from unspool.train.running.runs import Run

_LORA, _STEPS = "LoRA", "Training"

Data = Annotated[
    list[str] | None,
    typer.Option("--data", "-d", help="Files, folders, patterns or hub data sets; repeatable."),
]
Task = Annotated[
    str | None, typer.Option(help="A task of reasoning-gym, instead of data: leg_counting, ...")
]
Examples = Annotated[int, typer.Option(min=1, help="Number of questions of the task.")]
Lora = Annotated[
    int,
    typer.Option("--lora", min=0, help="LoRA rank; 0 trains all weights.", rich_help_panel=_LORA),
]
Alpha = Annotated[
    float | None,
    typer.Option(help="LoRA alpha: scale x rank. Default: twice the rank.", rich_help_panel=_LORA),
]
Dropout = Annotated[float, typer.Option(help="LoRA dropout.", rich_help_panel=_LORA)]
Targets = Annotated[
    str,
    typer.Option(help="Target matrices, of q,k,v,o,gate,up,down.", rich_help_panel=_LORA),
]
Layers = Annotated[
    int | None,
    typer.Option(min=1, help="Only in the last n layers.", rich_help_panel=_LORA),
]
From = Annotated[
    Path | None,
    typer.Option("--adapter", help="Start from this adapter.", rich_help_panel=_LORA),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Number of steps. Default: from --epochs.", rich_help_panel=_STEPS),
]
Epochs = Annotated[float, typer.Option(min=0, help="Passes over the data.", rich_help_panel=_STEPS)]
Batch = Annotated[int, typer.Option(min=1, help="Rows per batch.", rich_help_panel=_STEPS)]
Length = Annotated[
    int, typer.Option(min=2, help="Maximum tokens of a row.", rich_help_panel=_STEPS)
]
Accumulate = Annotated[int, typer.Option(min=1, help="Batches per step.", rich_help_panel=_STEPS)]
Rate = Annotated[
    float | None, typer.Option("--rate", help="Learning rate.", rich_help_panel=_STEPS)
]
Seed = Annotated[int, typer.Option(help="Random seed.", rich_help_panel=_STEPS)]
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
        "--shard", help="With torchrun: shard the model over the processes (FSDP).",
        rich_help_panel=_STEPS,
    ),
]  # fmt: skip
Report = Annotated[
    list[str] | None, typer.Option(help="Also log to tensorboard, wandb or trackio.")
]
Name = Annotated[str | None, typer.Option(help="Name of the run folder.")]
Resume = Annotated[str | None, typer.Option(metavar="RUN", help="Resume an interrupted run.")]


def run_tuning(
    context: typer.Context, settings: dict[str, Any], name: str | None, resume: str | None,
    quiet: bool, reports: list[str] | None, shard: bool = False,
) -> None:  # fmt: skip
    """Create or resume a run, and train it."""
    from unspool.backends.placement import check_torch

    s.check_resume(context, resume)
    check_torch()
    from unspool.train.running.events import Listener, combine_listeners
    from unspool.train.running.parallel import Parallel, open_run_everywhere
    from unspool.train.tuning.tune import settings_of, tune

    with Parallel.from_environment(settings["device"], shard=shard) as parallel:
        folder, trackers = None, list[Listener]()
        with parallel.all_succeed():
            if parallel.is_first:
                run = _open_run(settings, name, resume)
                folder, trackers = run.folder, s.open_trackers(reports or (), run)
        run = open_run_everywhere(folder, parallel)
        stored = settings_of(run)
        with TuningDisplay(run, quiet or not parallel.is_first) as display:
            tune(stored, run, combine_listeners(display, *trackers), parallel=parallel)
        if parallel.is_first:
            _print_result(run, bool(stored.lora), stored.model)
            s.exit_if_signalled(run)


def _open_run(settings: dict[str, Any], name: str | None, resume: str | None) -> Run:
    """The run to resume, or a new one."""
    from unspool.model.hub.find import runs_folder
    from unspool.train.running.parallel import find_restarted_run
    from unspool.train.running.runs import Run
    from unspool.train.tuning.tune import TuneSettings, new_run

    if resume is not None:
        run = Run.open(resume)
        run.resume_here()
        return run
    tune_settings = TuneSettings(**settings)
    if (restarted := find_restarted_run(tune_settings)) is not None:
        restarted.resume_here()
        return restarted
    return new_run(tune_settings, runs_folder() / name if name else None)


def _print_result(run: Run, adapter: bool, model: str | None) -> None:
    """Print the result and what to do with it."""
    if run.state == "stopped":
        o.say(f"stopped; resume with: unspool train {run.facts['kind']} --resume {run.folder}")
        return
    best_step, last_step = run.best_step, run.checkpoints()[-1].step
    if best_step is None or best_step == last_step:
        o.say(f"done: {run.final}")
    else:
        early = (
            "" if last_step >= run.steps else f"stopped early at step {last_step} of {run.steps}; "
        )
        o.say(f"done: {early}the best on held-out data is step {best_step}: {run.final}")
    option = f" --model {model}" if model else ""
    if adapter:
        o.say(f'generate:  unspool "..."{option} --adapter {run.folder}')
        o.say(f"merge into the base model:  unspool train merge {run.folder} FOLDER")
    else:
        o.say(f'generate:  unspool "..." --model {run.folder}')


class TuningDisplay:
    """Event listener and context manager: a bar on a terminal, else a line now and then."""

    def __init__(self, run: Run, quiet: bool) -> None:
        self._run, self._quiet = run, quiet
        self._bar: Any = None
        self._task: Any = None
        self._next = self._steps = 0

    def __enter__(self) -> TuningDisplay:
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
        from unspool.train.running.events import Evaluated, StepLogged, StepsReplanned

        if self._quiet:
            return
        if not self._steps or isinstance(event, StepsReplanned):
            self._steps = self._run.steps
            if epochs := self._run.facts.get("epochs"):
                o.say(f"{self._steps:,} steps, {s.describe_epochs(epochs)}")
        steps = self._steps
        if isinstance(event, Evaluated):
            o.say(f"step {event.step}: held-out loss {event.held_out_loss:.3f}")
        if not isinstance(event, StepLogged):
            return
        extra = "".join(f" · {name} {value:.3g}" for name, value in event.extra.items())
        line = (
            f"{event.step}/{steps} · loss {event.loss:.3f}{extra} · "
            f"{event.tokens_per_second:,.0f} tokens/s"
        )
        if self._bar is not None:
            self._bar.update(self._task, total=steps, completed=event.step, description=line)
        elif event.step >= self._next:
            self._next = event.step + max(1, steps // 20)
            o.say(line)
