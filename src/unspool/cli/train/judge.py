"""`unspool train judge`: what a model is worth, in bits per byte, in tasks, and to a reader."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unspool.train.judging.judge import BitsPerByte

Models = Annotated[
    list[str], typer.Argument(help="Runs (folder or name), checkpoints, or any models.")
]


def judge(
    models: Models,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", "-d", help="Text it has not seen; what a run held out, if nothing is asked."
        ),
    ] = None,
    context: Annotated[int | None, typer.Option(help="Tokens seen at once, at most.")] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens judged in each window; half the context if not given."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Judge so many documents, or questions of a task, at most.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval, with commas between them.")
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option(help="A folder with tasks of your own (YAML files).")
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Examples before each question.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Write a sheet of samples.")
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="Of the samples; several times if you like.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="The most tokens of a sample.")
    ] = 80,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Of the samples.")
    ] = 0.8,
    film: Annotated[
        bool, typer.Option("--film", help="Of a run: every checkpoint, not the last one only.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write the sheet of samples to this file too.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object.")] = False,
) -> None:
    """Judge models: bits per byte on held-out text, tasks of lm-eval, samples side by side.

    [b]Examples[/b]

      unspool train judge speeches
      unspool train judge speeches smollm2-135m --data essay.txt
      unspool train judge speeches --film -p "The people of" --html speeches.html
      unspool train judge speeches smollm2-135m --tasks hellaswag,piqa --limit 200
    """
    from unspool.train.judging.sheet import named_models

    named = named_models(models, film=film)
    found: dict[str, dict[str, Any]] = {name: {} for name in named}
    texts = _texts(models, data, limit) if data or not (tasks or prompts or html) else []
    for name, model in named.items() if texts or tasks else ():
        from unspool.loading import load

        with load(model, device=device) as lm:
            if texts:
                from unspool.train.judging.judge import bits_per_byte

                told = bits_per_byte(lm, texts, context=context, stride=stride)
                found[name]["text"] = told.to_dict()
                if not as_json:
                    _say(name, told)
            if tasks:
                found[name]["tasks"] = _tasks(lm, tasks.split(","), limit, shots, task_folder)
    if tasks and not as_json:
        _table(found)
    if prompts or html:
        from unspool.train.judging.sheet import DEFAULT_PROMPTS, write_sheet

        sheet = write_sheet(
            named, prompts or DEFAULT_PROMPTS, seeds=seeds or [0], max_tokens=max_tokens,
            temperature=temperature, device=device,
        )  # fmt: skip
        if html is not None:
            html.write_text(sheet.as_html(), encoding="utf-8")
        for one in sheet.to_dict():
            found[one.pop("model")].setdefault("samples", []).append(one)
        if not as_json:
            import shutil

            print(sheet.as_text(shutil.get_terminal_size().columns))
    if as_json:
        import json

        print(json.dumps(found, ensure_ascii=False))


def _texts(models: list[str], data: list[str] | None, limit: int | None) -> list[str]:
    """The named data, or what the first run held out."""
    from unspool.train.judging.judged_text import held_out_texts, texts_of
    from unspool.train.running.runs import Run

    if data:
        return list(texts_of(data, limit=limit))
    return list(held_out_texts(Run.open(models[0]), limit=limit))


def _say(name: str, told: BitsPerByte) -> None:
    print(
        f"{name}: {told.bits_per_byte:.4f} bits per byte "
        f"({told.bytes:,} bytes, {told.tokens:,} tokens of {told.bytes_per_token:.2f} bytes; "
        f"loss {told.loss:.4f}, perplexity {told.perplexity:.2f})"
    )


def _tasks(
    lm: Any, tasks: list[str], limit: int | None, shots: int | None, folder: Path | None
) -> dict[str, Any]:
    try:
        from unspool.train.judging.lm_eval import run_tasks
    except ImportError:
        from unspool.errors import UnspoolError

        raise UnspoolError(
            "tasks need lm-eval, which is not installed: pip install lm-eval"
        ) from None
    return run_tasks(lm, tasks, limit=limit, shots=shots, folder=folder)


def _table(found: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    from unspool.cli.show import out

    table = Table("model", "task", "figure", "value", box=None)
    for model, told in found.items():
        for task, figures in told.get("tasks", {}).items():
            for figure, value in figures.items():
                name = figure.removesuffix(",none")
                if "_stderr" in name or name == "sample_len":
                    continue
                error = figures.get(f"{name}_stderr,none")
                spread = f" ± {error:.4f}" if isinstance(error, float) else ""
                table.add_row(model, task, name, f"{value:.4f}{spread}")
    out().print(table)
