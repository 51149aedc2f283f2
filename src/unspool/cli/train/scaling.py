"""`unspool train scaling`: fit a scaling law to many small runs, and check it with a larger one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from unspool.cli import options as o
from unspool.cli.output import print_json
from unspool.cli.train import options as s
from unspool.errors import SettingsError

if TYPE_CHECKING:
    from unspool.train.scaling.study import Study

Number = TypeVar("Number", int, float)


def scaling(
    data: s.Sources = None,
    name: Annotated[str, typer.Option(help="Name of the study folder in ./runs.")] = "scaling",
    depths: Annotated[str, typer.Option(help="Model depths, comma-separated.")] = "1,2,3,4",
    budgets: Annotated[
        str, typer.Option(help="FLOP budgets of the runs, comma-separated.")
    ] = "1e11,2e11,4e11,8e11",
    check: Annotated[
        float | None, typer.Option(help="FLOP of a larger run to check the law with.")
    ] = 2e12,
    fewest: Annotated[float, typer.Option(help="Minimum tokens per parameter of a run.")] = 0.5,
    epochs: Annotated[float, typer.Option(help="Maximum passes over the text of a run.")] = 4.0,
    aspect: Annotated[int, typer.Option(help="Width / depth of the models.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 128,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size.")] = 512,
    held_out: s.HeldOut = "0.02",
    field: s.Field = None,
    limit: s.Limit = None,
    seed: s.Seed = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    at_once: Annotated[
        int, typer.Option(min=1, help="Runs in parallel; small models leave a GPU idle.")
    ] = 1,
    redraws: Annotated[int, typer.Option(help="Bootstrap samples for the intervals.")] = 200,
    picture: Annotated[
        Path | None, typer.Option(help="SVG file. Default: scaling.svg in the study folder.")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Train a grid of small models and fit the scaling law: loss = E + A/N^a + B/D^b.

    Rerun the same command to resume an interrupted study. The defaults are a demonstration, small
    enough for two CPU cores.

    [b]Examples[/b]

      unspool train scaling
      unspool train scaling enwik8.txt --budgets 3e15,1e16,3e16 --depths 3,4,5,6,7,8,9
        --check 1e17 --aspect 64 --length 1024 --vocab-size 300 --at-once 3
    """
    from dataclasses import replace

    from unspool.model.hub.find import runs_folder
    from unspool.progress import progress_bar
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.pretrain import NewSettings
    from unspool.train.scaling.grid import GridTrainer, prepared_tokens, shared_vocabulary
    from unspool.train.scaling.plot import draw
    from unspool.train.scaling.study import MIN_RUNS, PlannedRun, Study, plan

    study = Study(runs_folder() / name)
    depth_list, budget_list = _parse_numbers(depths, int), _parse_numbers(budgets, float)
    sources = tuple(data or [DEFAULT_SOURCE])
    split = s.share_or_source(held_out)
    with s.reading_bar() as progress:
        reading: dict[str, Any] = {
            "field": field, "limit": limit, "held_out": split, "seed": seed, "progress": progress
        }  # fmt: skip
        vocabulary, count = shared_vocabulary(
            sources, study.folder / "tokenizer", vocab_size, **reading
        )
        longest = epochs * prepared_tokens(sources, vocabulary, **reading)
    settings = NewSettings(
        data=sources, field=field, limit=limit, held_out=split, tokenizer=str(vocabulary),
        seed=seed, device=device, keep=0,
    )  # fmt: skip
    runs = GridTrainer(settings, count, length, aspect)
    grid = plan(
        runs.config_of,
        depths=depth_list,
        budgets=budget_list,
        length=length,
        fewest=fewest,
        longest=longest,
    )
    if len(grid) < MIN_RUNS:
        raise SettingsError(
            f"only {len(grid)} runs of this grid have a sensible number of tokens, and a law needs "
            f"{MIN_RUNS}; give more budgets or depths"
        )
    total_flops = sum(run.flops for run in grid) + (check or 0)

    with progress_bar("training", 1000, show=not as_json) as show_progress:

        def on_progress(current: PlannedRun, share: float) -> None:
            done = sum(run.flops for run in study.runs) + current.flops * share
            show_progress(round(done / total_flops * 1000))

        def on_result(run: PlannedRun, loss: float) -> None:
            if not as_json:
                print(
                    f"{run.name:<12} {run.parameters:>12,} parameters {run.tokens:>14,} tokens "
                    f"({run.tokens / run.parameters:.1f} each)   loss {loss:.4f}",
                    flush=True,
                )
            on_progress(run, 0.0)

        train = replace(runs, on_progress=on_progress)
        study.measure(grid, train if at_once == 1 else runs, on_result, at_once)
        study.fit(redraws=redraws)
        if check is not None:
            deeper = [*depth_list, *(max(depth_list) + extra for extra in (1, 2, 3, 4))]
            study.check(train.config_of, deeper, check, length, train, longest)
    svg = picture or study.folder / "scaling.svg"
    svg.write_text(draw(study), encoding="utf-8")
    if as_json:
        content = study.to_dict()
        content["law"].pop("redraws")
        content["left_out"] = {run.name: error for run, error in study.left_out().items()}
        print_json(content)
    else:
        _print_study(study)
        print(f"plot: {svg}")


def _parse_numbers(text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        raise SettingsError(f"{text!r} is not a comma-separated list of numbers") from None
    if min(numbers) <= 0:
        raise SettingsError(f"all numbers of {text!r} must be > 0")
    return numbers


def _print_study(study: Study) -> None:
    law, check = study.law, study.checked
    assert law is not None
    print(
        f"\nloss = {law.e:.3f} + {law.a:.4g} / N^{law.alpha:.3f} + {law.b:.4g} / D^{law.beta:.3f}"
        f"   ({len(study.runs)} runs, off by {law.error:.2%} on average)"
    )
    names = {"e": "E", "a": "A", "alpha": "a", "b": "B", "beta": "b"}
    ends = (f"{names[n]} {low:.3g} to {high:.3g}" for n, (low, high) in law.intervals().items())
    print(f"90 % intervals: {', '.join(ends)}")
    left_out = study.left_out()
    if left_out:
        largest, worst = max(run.flops for run in left_out), max(map(abs, left_out.values()))
        print(
            f"a fit without them predicts the {len(left_out)} runs of {largest:.0e} FLOP "
            f"within {worst:.2%}"
        )
    if check is not None:
        low, high = check.interval or (check.predicted, check.predicted)
        print(
            f"not part of the fit: {check.run.name}, {check.run.flops:.0e} FLOP: predicted "
            f"{check.predicted:.4f} ({low:.4f} to {high:.4f}), measured {check.measured:.4f}: "
            f"{check.error:+.2%}"
        )
