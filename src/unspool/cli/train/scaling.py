"""`unspool train scaling`: many small runs, the law they follow, and a larger run as its test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from unspool.cli.train import source as s

if TYPE_CHECKING:
    from unspool.train.scaling.study import Study

Number = TypeVar("Number", int, float)


def scaling(
    data: s.Sources = None,
    name: Annotated[str, typer.Option(help="Of the study: a folder among the runs.")] = "scaling",
    depths: Annotated[str, typer.Option(help="Sizes, as depths with commas.")] = "1,2,3,4",
    budgets: Annotated[
        str, typer.Option(help="FLOP of each run, with commas.")
    ] = "1e11,2e11,4e11,8e11",
    check: Annotated[
        float | None, typer.Option(help="FLOP of a run that the law must predict.")
    ] = 2e12,
    fewest: Annotated[
        float, typer.Option(help="Leave out runs with fewer tokens for each parameter.")
    ] = 0.5,
    epochs: Annotated[
        float, typer.Option(help="Leave out runs that would see the text more often.")
    ] = 4.0,
    aspect: Annotated[int, typer.Option(help="Width of a model, as a multiple of its depth.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens in a row.")] = 128,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 512,
    held_out: s.HeldOut = "0.02",
    field: s.Field = None,
    limit: s.Limit = None,
    seed: s.Seed = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    at_once: Annotated[
        int, typer.Option(min=1, help="Runs trained side by side, as small ones leave a GPU idle.")
    ] = 1,
    redraws: Annotated[int, typer.Option(help="Fits to runs drawn anew, for intervals.")] = 200,
    picture: Annotated[
        Path | None, typer.Option(help="Where to draw it (SVG); else scaling.svg in the study.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Train a grid of small models and fit the law: loss = E + A/N^a + B/D^b.

    Each run is kept; the same command goes on where it was broken off. The defaults are a
    demonstration, small enough for two CPU cores.

    [b]Examples[/b]

      unspool train scaling
      unspool train scaling enwik8.txt --budgets 3e15,1e16,3e16 --depths 3,4,5,6,7,8,9
        --check 1e17 --aspect 64 --length 1024 --vocab-size 300 --at-once 3
    """
    from dataclasses import replace

    from unspool.cli.table import print_json
    from unspool.decoding.progress import progress_bar
    from unspool.errors import SettingsError
    from unspool.model.run_folder import runs_folder
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.scaling.grid import Runs, prepared_tokens, shared_vocabulary
    from unspool.train.scaling.law import FEWEST
    from unspool.train.scaling.plot import draw
    from unspool.train.scaling.study import Planned, Study, plan
    from unspool.train.settings import NewSettings

    study = Study(runs_folder() / name)
    sizes, spent = _numbers(depths, int), _numbers(budgets, float)
    sources = tuple(data or [DEFAULT_SOURCE])
    apart = s.share_or_source(held_out)
    with s.reading_bar() as progress:
        reading: dict[str, Any] = {
            "field": field, "limit": limit, "held_out": apart, "seed": seed, "progress": progress
        }  # fmt: skip
        vocabulary, count = shared_vocabulary(
            sources, study.folder / "tokenizer", vocab_size, **reading
        )
        longest = epochs * prepared_tokens(sources, vocabulary, **reading)
    settings = NewSettings(
        data=sources, field=field, limit=limit, held_out=apart, tokenizer=str(vocabulary),
        seed=seed, device=device, keep=0,
    )  # fmt: skip
    plain = Runs(settings, count, length, aspect)
    grid = plan(
        plain.config_of,
        depths=sizes,
        budgets=spent,
        length=length,
        fewest=fewest,
        longest=longest,
    )
    if len(grid) < FEWEST:
        raise SettingsError(
            f"only {len(grid)} runs of this grid have a sensible number of tokens, and a law needs "
            f"{FEWEST}; give more budgets or depths"
        )
    whole = sum(run.flops for run in grid) + (check or 0)

    def told(run: Planned, loss: float) -> None:
        if not as_json:
            per = run.tokens / run.parameters
            print(
                f"{run.name:<12} {run.parameters:>12,} parameters {run.tokens:>14,} tokens "
                f"({per:.1f} each)   loss {loss:.4f}",
                flush=True,
            )

    with progress_bar("training", 1000, show=not as_json) as tell:

        def share_done(now: Planned, share: float) -> None:
            before = sum(run.flops for run in study.runs)
            tell(round((before + now.flops * share) / whole * 1000))

        def finished(run: Planned, loss: float) -> None:
            told(run, loss)
            tell(round(sum(run.flops for run in study.runs) / whole * 1000))

        train = replace(plain, told=share_done)
        study.measure(grid, train if at_once == 1 else plain, finished, at_once)
        study.fit(redraws=redraws)
        if check is not None:
            deeper = [*sizes, *(max(sizes) + more for more in (1, 2, 3, 4))]
            study.check(train.config_of, deeper, check, length, train, longest)
    drawn = picture or study.folder / "scaling.svg"
    drawn.write_text(draw(study), encoding="utf-8")
    if as_json:
        found = study.to_dict()
        found["law"].pop("redraws")
        found["left_out"] = {run.name: error for run, error in study.left_out().items()}
        print_json(found)
    else:
        _say(study)
        print(f"drawn: {drawn}")


def _numbers(given: str, kind: Callable[[str], Number]) -> list[Number]:
    from unspool.errors import SettingsError

    try:
        found = [kind(part) for part in given.split(",")]
    except ValueError:
        raise SettingsError(f"{given!r} is no list of numbers with commas between them") from None
    if min(found) <= 0:
        raise SettingsError(f"{given!r} has a number that is not above 0")
    return found


def _say(study: Study) -> None:
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
            f"fitted without them, the law predicts the {len(left_out)} runs of {largest:.0e} FLOP "
            f"within {worst:.2%}"
        )
    if check is not None:
        low, high = check.interval or (check.predicted, check.predicted)
        print(
            f"not seen by the fit: {check.run.name}, {check.run.flops:.0e} FLOP: predicted "
            f"{check.predicted:.4f} ({low:.4f} to {high:.4f}), measured {check.measured:.4f}: "
            f"{check.error:+.2%}"
        )
