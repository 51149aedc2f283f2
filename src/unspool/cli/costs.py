"""`unspool costs`: what writing one token at a time costs, as a report with plots."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.cli.completing import model_names
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.costs.report import Comparison, Report
    from unspool.costs.texts import SampleTexts


@o.model_options
def costs(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="One model, or two to compare: names, paths, repo ids or runs of training. The "
            "default model if none is named.",
            autocompletion=model_names,
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A look in under a minute.")] = False,
    parts: Annotated[
        str | None, typer.Option(help="Only these, separated by commas: waiting,loops, ...")
    ] = None,
    report: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The page; JSON is put beside it.")
    ] = Path("costs.html"),
    texts: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Human text to measure on: a file, a folder, ..."),
    ] = None,
    twin: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A masked model, asked about whole texts.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same texts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON.")] = False,
    *,
    chosen: o.ModelChoice,
) -> None:
    """Measure what writing one token at a time costs: waiting, loops, contradictions, confidence.

    Leaves a page with plots, and its figures as JSON beside it.

    [b]Examples[/b]

      unspool costs --quick
      unspool costs qwen3-0.6b --out qwen.html
      unspool costs smollm2-135m qwen3-0.6b --parts loops,whole
      unspool costs ./my-model --texts notes.txt
    """
    from unspool.costs.measuring import select_parts
    from unspool.costs.texts import sample_texts

    names = _models(models, chosen)
    wanted = select_parts([part.strip() for part in parts.split(",")] if parts else None)
    sample = sample_texts(texts)
    _check_writable(report)
    found = []
    with interrupt.raised():
        helper = _twin(twin)
        for name in names:
            found.append(_measured(o.ModelChoice(name, chosen.options), wanted, quick, sample,
                                   seed, helper))  # fmt: skip
    _tell(_together(found), report, as_json)


def _models(given: list[str] | None, chosen: o.ModelChoice) -> list[str | None]:
    if given and chosen.model:
        raise SettingsError("name the models once: behind the command, or with --model")
    if given and len(given) > 2:
        raise SettingsError(f"{len(given)} models were named; one can be measured, two compared")
    return [name for name in given or [] if name] or [chosen.model]


def _twin(name: str | None) -> object | None:
    if name is None:
        return None
    from unspool.loading import load

    return load(name)


def _measured(
    model: o.ModelChoice,
    parts: list[str],
    quick: bool,
    sample: SampleTexts,
    seed: int,
    twin: object | None,
) -> Report:
    from unspool.costs.measuring import costs as measure

    with model.load() as lm:
        return measure(lm, quick=quick, parts=parts, texts=sample, seed=seed, twin=twin)


def _together(found: list[Report]) -> Report | Comparison:
    from unspool.costs.report import Comparison

    return found[0] if len(found) == 1 else Comparison(found)


def _check_writable(path: Path) -> None:
    """Minutes of measuring shall not end in a file that cannot be written."""
    if path.is_dir():
        raise UnspoolError(f"{path} is a folder; name the file: --out {path / 'costs.html'}")
    if not path.parent.is_dir():
        raise UnspoolError(f"the folder {path.parent} does not exist; make it, or name another")


def _tell(made: Report | Comparison, path: Path, as_json: bool) -> None:
    import json

    page, beside = path, path.with_suffix(".json")
    if beside == page:
        page = path.with_suffix(".html")
    content = json.dumps(made.to_dict(), indent=1, ensure_ascii=False)
    try:
        page.write_text(made.html(), encoding="utf-8")
        beside.write_text(content + "\n", encoding="utf-8")
    except OSError as error:
        raise UnspoolError(f"{path} cannot be written: {error.strerror or error}") from error
    print(content if as_json else made)
    o.say(f"{page} has the plots, {beside} the figures")
