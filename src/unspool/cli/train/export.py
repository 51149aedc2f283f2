"""`unspool train export`: export a model for transformers, MLX or llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
