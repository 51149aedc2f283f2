"""`unspool train merge`: merge an adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unspool.cli import options as o
from unspool.errors import SettingsError


def merge(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.")],
    folder: Annotated[Path, typer.Argument(help="Output folder of the merged model.")],
    model: o.Model = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    offline: o.Offline = False,
) -> None:
    """Merge an adapter into its base model and save the result as a model folder.

    The base model is the one the adapter was trained on, unless --model names another. Quantized
    weights are saved as floats.

    [b]Examples[/b]

      unspool train merge runs/tune-chats/checkpoints/000300 merged/
      unspool train merge poet/ merged/ --model qwen3-0.6b --dtype bfloat16
    """
    from unspool.backends.placement import check_torch

    check_torch()
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder}: is not empty; name a new folder")
    from unspool.backends.placement import DTYPES
    from unspool.train.export import merge_adapter

    if dtype not in DTYPES:
        raise SettingsError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    merge_adapter(adapter, folder, model, dtype=dtype, offline=offline)
    o.say(f'merged: {folder}; generate with:  unspool "..." --model {folder}')
