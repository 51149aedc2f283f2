"""`unspool train runs`: list and show training runs, pause and stop them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unspool.cli.table import print_columns, print_json, print_table


def runs(
    run: Annotated[str | None, typer.Argument(help="One run: its folder or name.")] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Pause it after its step.")] = False,
    go: Annotated[bool, typer.Option("--go", help="Continue a paused run.")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop it after its step, with a checkpoint.")
    ] = False,
    samples: Annotated[bool, typer.Option("--samples", help="Show its sample texts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the training runs in ./runs (or UNSPOOL_RUNS), or show one of them.

    [b]Examples[/b]

      unspool train runs
      unspool train runs sotu-d4
      unspool train runs sotu-d4 --pause
    """
    from unspool.errors import SettingsError
    from unspool.model.hub.find import runs_folder
    from unspool.train.running.runs import Run

    flags = {"pause": pause, "go": go, "stop": stop}
    commands = [command for command, is_set in flags.items() if is_set]
    if run is None:
        if commands or samples:
            raise SettingsError("name the run: unspool train runs NAME --pause")
        _list_runs(Run.all(), str(runs_folder()), as_json)
        return
    opened = Run.open(run)
    for command in commands:
        opened.send_command(command)
        print(f"{opened.name}: asked to {command}")
    if not commands:
        _show_run(opened, samples, as_json)


def _list_runs(runs: list[Any], root: str, as_json: bool) -> None:
    if as_json:
        print_json([{"folder": str(run.folder), "state": run.state, **_last(run)} for run in runs])
    elif not runs:
        print(f"no training runs in {root}; start one with: unspool train")
    else:
        print_table("name state step loss bits/byte folder", [_row(run) for run in runs])


def _row(run: Any) -> list[str]:
    last = _last(run)
    step = f"{last.get('step', 0):,}/{run.steps:,}"
    numbers = [f"{last[key]:.3f}" if key in last else "" for key in ("loss", "bits_per_byte")]
    return [run.name, run.state, step, *numbers, str(run.folder)]


def _last(run: Any) -> dict[str, Any]:
    """The newest value of each logged figure."""
    figures: dict[str, Any] = {}
    for line in run.log():
        figures |= line
    return figures


def _show_run(run: Any, samples: bool, as_json: bool) -> None:
    from unspool.cli.train.plot import curve

    if as_json:
        print_json({**run.facts, "state": run.state, "log": run.log(), "samples": run.samples()})
        return
    facts, last = run.facts, _last(run)
    rows = [["run", str(run.folder)], ["state", run.state]]
    if facts.get("error"):
        rows.append(["error", facts["error"]])
    rows.append(["step", f"{last.get('step', 0):,} of {run.steps:,}"])
    rows += [
        [name.replace("_", " "), f"{last[name]:,.4g}"]
        for name in ("tokens", "loss", "held_out_loss", "bits_per_byte", "seconds")
        if name in last
    ]
    steps = ", ".join(str(saved.step) for saved in run.checkpoints())
    rows.append(["checkpoints", steps or "none yet"])
    if run.best_step is not None:
        rows.append(["best checkpoint", f"step {run.best_step:,} (lowest held-out loss)"])
    print_columns(rows)
    losses = [line["loss"] for line in run.log() if "loss" in line]
    print("\n".join(curve(losses)))
    for sample in run.samples() if samples else []:
        print(f"\n-- step {sample['step']}\n{sample['prompt']}{sample['text']}")
    if run.state in ("stopped", "failed", "broken off") and run.resumable() is not None:
        print(f"resume with: unspool train --resume {run.folder}")
    elif run.model is not None:
        print(f"generate with: unspool run --model {run.folder}")
