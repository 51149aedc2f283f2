"""`unspool costs`: measure the costs of autoregressive generation; a report with plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unspool.cli import interrupt
from unspool.cli import options as o
from unspool.cli.output import say
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.costs.report import Comparison, Report


@o.model_options
def costs(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="One model, or two to compare: names, paths, repo ids or training runs. Default: "
            "the default model.",
            autocompletion=o.complete_model,
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A short measurement, under a minute.")
    ] = False,
    parts: Annotated[
        str | None, typer.Option(help="Only these parts, comma-separated: waiting,loops, ...")
    ] = None,
    report: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", help="HTML report; JSON is written next to it."
        ),
    ] = Path("costs.html"),
    texts: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="Human text to measure on: a file, a folder, ..."),
    ] = None,
    twin: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A masked model, measured on complete texts."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the texts.")] = 0,
    as_json: o.Json = False,
    *,
    model_choice: o.ModelChoice,
) -> None:
    """Measure the costs of writing one token at a time: waiting, loops, contradictions, confidence.

    Writes an HTML report with plots, and its figures as JSON.

    [b]Examples[/b]

      unspool costs --quick
      unspool costs qwen3-0.6b --out qwen.html
      unspool costs smollm2-135m qwen3-0.6b --parts loops,whole
      unspool costs ./my-model --texts notes.txt
    """
    from unspool.costs.measuring import measure_costs as measure
    from unspool.costs.measuring import select_parts
    from unspool.costs.report import Comparison
    from unspool.costs.texts import sample_texts

    names = _model_names(models, model_choice)
    selected = select_parts([part.strip() for part in parts.split(",")] if parts else None)
    sample = sample_texts(texts)
    o.check_output_file(report, "--out")
    reports = []
    with interrupt.raise_on_signal():
        helper = o.load_helper(twin)
        for name in names:
            with o.ModelChoice(name, model_choice.options).load() as lm:
                reports.append(
                    measure(lm, quick=quick, parts=selected, texts=sample, seed=seed, twin=helper)
                )
    _write(reports[0] if len(reports) == 1 else Comparison(reports), report, as_json)


def _model_names(models: list[str] | None, choice: o.ModelChoice) -> list[str | None]:
    if models and choice.model:
        raise SettingsError("name the models as arguments or with --model, not both")
    if models and len(models) > 2:
        raise SettingsError(f"name one model, or two to compare; got {len(models)}")
    return [name for name in models or [] if name] or [choice.model]


def _write(result: Report | Comparison, path: Path, as_json: bool) -> None:
    page, figures = path, path.with_suffix(".json")
    if figures == page:
        page = path.with_suffix(".html")
    content = json.dumps(result.to_dict(), indent=1, ensure_ascii=False)
    try:
        page.write_text(result.html(), encoding="utf-8")
        figures.write_text(content + "\n", encoding="utf-8")
    except OSError as error:
        raise UnspoolError(f"{path} cannot be written: {error.strerror or error}") from error
    print(content if as_json else result)
    say(f"plots: {page}, figures: {figures}")
