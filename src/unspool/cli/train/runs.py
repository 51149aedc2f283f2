"""`unspool train runs`: what was trained here, and asking what is being trained."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unspool.cli.table import print_columns, print_json, print_table


def runs(
    run: Annotated[str | None, typer.Argument(help="One run: its folder or name.")] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Ask it to pause.")] = False,
    go: Annotated[bool, typer.Option("--go", help="Ask it to go on.")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Ask it to stop, with a checkpoint.")
    ] = False,
    samples: Annotated[bool, typer.Option("--samples", help="What it wrote on the way.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """The trainings in ./runs (or UNSPOOL_RUNS), or one of them.

    [b]Examples[/b]

      unspool train runs
      unspool train runs sotu-d4
      unspool train runs sotu-d4 --pause
    """
    from unspool.errors import SettingsError
    from unspool.model.run_folder import runs_folder
    from unspool.train.running.runs import Run

    asked = [want for want, given in (("pause", pause), ("go", go), ("stop", stop)) if given]
    if run is None:
        if asked or samples:
            raise SettingsError("name the run: unspool train runs NAME --pause")
        _list(Run.all(), str(runs_folder()), as_json)
        return
    chosen = Run.open(run)
    for want in asked:
        chosen.ask(want)
        print(f"{chosen.name}: asked to {want}")
    if not asked:
        _show(chosen, samples, as_json)


def _list(found: list[Any], root: str, as_json: bool) -> None:
    if as_json:
        print_json([{"folder": str(run.folder), "state": run.state, **_last(run)} for run in found])
    elif not found:
        print(f"no trainings in {root} yet; unspool train begins one")
    else:
        print_table("name state step loss bits/byte folder", [_row(run) for run in found])


def _row(run: Any) -> list[str]:
    last = _last(run)
    step = f"{last.get('step', 0):,}/{run.steps:,}"
    numbers = [f"{last[key]:.3f}" if key in last else "" for key in ("loss", "bits_per_byte")]
    return [run.name, run.state, step, *numbers, str(run.folder)]


def _last(run: Any) -> dict[str, Any]:
    """The newest of each figure."""
    found: dict[str, Any] = {}
    for line in run.log():
        found |= line
    return found


def _show(run: Any, samples: bool, as_json: bool) -> None:
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
        print(f"go on with: unspool train --resume {run.folder}")
    elif run.model is not None:
        print(f"write with it: unspool run --model {run.folder}")
