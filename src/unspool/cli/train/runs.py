"""Commands on finished and running trainings: `unspool train runs`, `judge`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from unspool.cli import options as o
from unspool.cli.output import print_columns, print_json, print_table, stdout_console
from unspool.errors import SettingsError, UnspoolError

if TYPE_CHECKING:
    from unspool.train.evaluation.bits_per_byte import BitsPerByte


def runs(
    run: Annotated[str | None, typer.Argument(help="One run: its folder or name.")] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Pause it after its step.")] = False,
    go: Annotated[bool, typer.Option("--go", help="Continue a paused run.")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop it after its step, with a checkpoint.")
    ] = False,
    samples: Annotated[bool, typer.Option("--samples", help="Show its sample texts.")] = False,
    as_json: o.Json = False,
) -> None:
    """List the training runs in ./runs (or UNSPOOL_RUNS), or show one of them.

    [b]Examples[/b]

      unspool train runs
      unspool train runs sotu-d4
      unspool train runs sotu-d4 --pause
    """
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
    from unspool.cli.train.display import plot_curve

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
    print("\n".join(plot_curve(losses)))
    for sample in run.samples() if samples else []:
        print(f"\n-- step {sample['step']}\n{sample['prompt']}{sample['text']}")
    if run.state in ("stopped", "failed", "broken off") and run.resumable() is not None:
        print(f"resume with: unspool train --resume {run.folder}")
    elif run.model is not None:
        print(f"generate with: unspool run --model {run.folder}")


def open_on_page(folder: Path, runs: Path | None) -> tuple[Path, str, str | None]:
    """Resolve `unspool page --run`: the folder of all runs, the URL query, and `NAME=MODEL`."""
    from unspool.train.running.runs import Run

    run = Run.open(folder if runs is None or folder.exists() else runs / folder)
    model = None if run.model is None else f"{run.name}={run.model}"
    return run.folder.absolute().parent, f"/?run={quote(run.name)}", model


# -- judge -----------------------------------------------------------------------------------------


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
    adapter: o.Adapter = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "auto",
    as_json: o.Json = False,
) -> None:
    """Evaluate models: bits per byte on held-out text, lm-eval tasks, samples side by side.

    [b]Examples[/b]

      unspool train judge speeches
      unspool train judge speeches smollm2-135m --data essay.txt
      unspool train judge speeches --film -p "The people of" --html speeches.html
      unspool train judge speeches smollm2-135m --tasks hellaswag,piqa --limit 200
      unspool train judge smollm2-135m --adapter runs/poet --tasks hellaswag
    """
    from unspool.train.evaluation.sample_sheet import named_models

    if adapter is not None and (prompts or html):
        raise SettingsError("--adapter cannot be combined with --prompt or --html")
    named = named_models(models, film=film)
    results: dict[str, dict[str, Any]] = {name: {} for name in named}
    texts = _texts(models, data, limit) if data or not (tasks or prompts or html) else []
    for name, model in named.items() if texts or tasks else ():
        from unspool.loading import load

        with load(model, device=device) as base:
            lm = o.with_adapter(base, adapter)
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
        raise UnspoolError(
            "tasks need lm-eval, which is not installed: pip install lm-eval"
        ) from None
    return run_tasks(lm, tasks, limit=limit, shots=shots, folder=folder)


def _print_task_table(results: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

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
    stdout_console().print(table)


# -- export ----------------------------------------------------------------------------------------


def export(
    model: Annotated[
        str, typer.Argument(help="A run (its folder or name), a checkpoint, or any model.")
    ],
    target: Annotated[
        Path | None,
        typer.Argument(help="A .gguf file, or a folder for transformers."),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            "-t",
            help="In a GGUF file: F32, F16, Q8_0 (default), Q4_1, Q4_0. In a folder: float32 "
            "(default), bfloat16, float16; mlx8 and mlx4 (quantized, for MLX).",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Model name in a GGUF file. Default: the file name.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing target.")] = False,
) -> None:
    """Export a model for other programs: transformers, MLX, llama.cpp.

    [b]Examples[/b]

      unspool train export speeches speeches.gguf
      unspool train export speeches speeches-4bit.gguf --type Q4_1
      unspool train export runs/speeches/checkpoints/000100 speeches-hf --type bfloat16
      unspool train export speeches speeches-mlx --type mlx4
    """
    from unspool.train.export import export_folder, export_gguf

    target = target or Path(f"{Path(model).name}.gguf")
    if target.suffix == ".gguf":
        export_gguf(model, target, type=(kind or "Q8_0").upper(), name=name, force=force)
        size = target.stat().st_size
        usage = f"llama-cli -m {target}   ·   unspool run -m {target} 'Once upon a time'"
    else:
        export_folder(model, target, dtype=(kind or "float32").lower(), force=force)
        size = sum(file.stat().st_size for file in target.iterdir())
        usage = f"AutoModelForCausalLM.from_pretrained('{target}')"
        if kind and kind.lower().startswith("mlx"):
            usage = (
                f"mlx_lm.generate --model {target}   ·   unspool run -m {target} 'Once upon a time'"
            )
    print(f"{target}: {size / 1e6:,.1f} MB\n{usage}")
