"""`unspool train dpo`: direct preference optimization on pairs of answers."""

from __future__ import annotations

from typing import Annotated

import typer

from unspool.cli import options as o
from unspool.cli.train import tuning as t


def dpo(
    context: typer.Context,
    model: o.Model = None,
    data: t.Data = None,
    beta: Annotated[
        float, typer.Option(help="Strength of the constraint to the base model.")
    ] = 0.1,
    smoothing: Annotated[
        float, typer.Option(help="Assumed share of wrongly labelled pairs.")
    ] = 0.0,
    lora: t.Lora = 16,
    alpha: t.Alpha = None,
    dropout: t.Dropout = 0.0,
    targets: t.Targets = "q,k,v,o,gate,up,down",
    layers: t.Layers = None,
    adapter: t.From = None,
    steps: t.Steps = None,
    epochs: t.Epochs = 1.0,
    batch: t.Batch = 4,
    length: t.Length = 512,
    accumulate: t.Accumulate = 1,
    rate: t.Rate = None,
    seed: t.Seed = 0,
    save_every: t.SaveEvery = 100,
    device: t.Device = "auto",
    shard: t.Shard = False,
    report: t.Report = None,
    name: t.Name = None,
    resume: t.Resume = None,
    quiet: o.Quiet = False,
) -> None:
    """Direct preference optimization, on lines of {"prompt": ..., "chosen": ..., "rejected": ...}.

    [b]Examples[/b]

      unspool train dpo --data pairs.jsonl
      unspool train dpo --model qwen3-0.6b --data pairs.jsonl --beta 0.3 --lora 32
    """
    settings = {
        "kind": "dpo", "model": model, "data": tuple(data or ()), "beta": beta,
        "smoothing": smoothing, "lora": lora, "alpha": alpha, "dropout": dropout,
        "targets": tuple(targets.split(",")), "layers": layers,
        "adapter": str(adapter) if adapter else None, "steps": steps, "epochs": epochs,
        "batch": batch, "length": length, "accumulate": accumulate, "rate": rate, "seed": seed,
        "save_every": save_every, "device": device,
    }  # fmt: skip
    t.run_tuning(context, settings, name, resume, quiet, report, shard)
