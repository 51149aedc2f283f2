"""`unspool train judge`: evaluate models: bits per byte, lm-eval tasks, samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from unspool.train.evaluation.bits_per_byte import BitsPerByte

Models = Annotated[
    list[str], typer.Argument(help="Runs (folder or name), checkpoints, or any models.")
]


def judge(
    models: Models,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", "-d", help="Text to evaluate on. Default: the held-out text of the run."
        ),
    ] = None,
    context: Annotated[int | None, typer.Option(help="Window size in tokens.")] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens scored per window. Default: half the context."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Maximum number of documents, or questions of a task.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, comma-separated.")] = None,
    task_folder: Annotated[
        Path | None, typer.Option(help="Folder with your own lm-eval tasks (YAML files).")
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Few-shot examples per question.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Prompt of samples; repeatable.")
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="Seed of samples; repeatable.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Maximum tokens of a sample.")
    ] = 80,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Temperature of samples.")
    ] = 0.8,
    film: Annotated[
        bool, typer.Option("--film", help="Evaluate every checkpoint of a run.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Also write the samples to this HTML file.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate models: bits per byte on held-out text, lm-eval tasks, samples side by side.

    [b]Examples[/b]

      unspool train judge speeches
      unspool train judge speeches smollm2-135m --data essay.txt
      unspool train judge speeches --film -p "The people of" --html speeches.html
      unspool train judge speeches smollm2-135m --tasks hellaswag,piqa --limit 200
    """
    from unspool.train.evaluation.sample_sheet import named_models

    named = named_models(models, film=film)
    results: dict[str, dict[str, Any]] = {name: {} for name in named}
    texts = _texts(models, data, limit) if data or not (tasks or prompts or html) else []
    for name, model in named.items() if texts or tasks else ():
        from unspool.loading import load

        with load(model, device=device) as lm:
            if texts:
                from unspool.train.evaluation.bits_per_byte import bits_per_byte

                result = bits_per_byte(lm, texts, context=context, stride=stride)
                results[name]["text"] = result.to_dict()
                if not as_json:
                    _print_bits_per_byte(name, result)
            if tasks:
                results[name]["tasks"] = _tasks(lm, tasks.split(","), limit, shots, task_folder)
    if tasks and not as_json:
        _print_task_table(results)
    if prompts or html:
        from unspool.train.evaluation.sample_sheet import DEFAULT_PROMPTS, write_sheet

        sheet = write_sheet(
            named, prompts or DEFAULT_PROMPTS, seeds=seeds or [0], max_tokens=max_tokens,
            temperature=temperature, device=device,
        )  # fmt: skip
        if html is not None:
            html.write_text(sheet.as_html(), encoding="utf-8")
        for sample in sheet.to_dict():
            results[sample.pop("model")].setdefault("samples", []).append(sample)
        if not as_json:
            import shutil

            print(sheet.as_text(shutil.get_terminal_size().columns))
    if as_json:
        import json

        print(json.dumps(results, ensure_ascii=False))


def _texts(models: list[str], data: list[str] | None, limit: int | None) -> list[str]:
    """The given data, or the held-out text of the first run."""
    from unspool.train.evaluation.bits_per_byte import held_out_texts, source_texts
    from unspool.train.running.runs import Run

    if data:
        return list(source_texts(data, limit=limit))
    return list(held_out_texts(Run.open(models[0]), limit=limit))


def _print_bits_per_byte(name: str, result: BitsPerByte) -> None:
    print(
        f"{name}: {result.bits_per_byte:.4f} bits per byte "
        f"({result.bytes:,} bytes, {result.tokens:,} tokens of {result.bytes_per_token:.2f} bytes; "
        f"loss {result.loss:.4f}, perplexity {result.perplexity:.2f})"
    )


def _tasks(
    lm: Any, tasks: list[str], limit: int | None, shots: int | None, folder: Path | None
) -> dict[str, Any]:
    try:
        from unspool.train.evaluation.lm_eval import run_tasks
    except ImportError:
        from unspool.errors import UnspoolError

        raise UnspoolError(
            "tasks need lm-eval, which is not installed: pip install lm-eval"
        ) from None
    return run_tasks(lm, tasks, limit=limit, shots=shots, folder=folder)


def _print_task_table(results: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    from unspool.cli.show import out

    table = Table("model", "task", "figure", "value", box=None)
    for model, result in results.items():
        for task, figures in result.get("tasks", {}).items():
            for figure, value in figures.items():
                name = figure.removesuffix(",none")
                if "_stderr" in name or name == "sample_len":
                    continue
                error = figures.get(f"{name}_stderr,none")
                spread = f" ± {error:.4f}" if isinstance(error, float) else ""
                table.add_row(model, task, name, f"{value:.4f}{spread}")
    out().print(table)
