"""`unspool train tune`: fine-tune a model on texts, conversations or a task."""

from __future__ import annotations

import typer

from unspool.cli import options as o
from unspool.cli.train import tuning as t


def tune(
    context: typer.Context,
    model: o.Model = None,
    data: t.Data = None,
    task: t.Task = None,
    examples: t.Examples = 2000,
    lora: t.Lora = 16,
    alpha: t.Alpha = None,
    dropout: t.Dropout = 0.0,
    targets: t.Targets = "q,k,v,o,gate,up,down",
    layers: t.Layers = None,
    adapter: t.From = None,
    steps: t.Steps = None,
    epochs: t.Epochs = 3.0,
    batch: t.Batch = 8,
    length: t.Length = 512,
    accumulate: t.Accumulate = 1,
    rate: t.Rate = None,
    seed: t.Seed = 0,
    save_every: t.SaveEvery = None,
    patience: t.Patience = 3,
    device: t.Device = "auto",
    shard: t.Shard = False,
    report: t.Report = None,
    name: t.Name = None,
    resume: t.Resume = None,
    quiet: o.Quiet = False,
) -> None:
    """Fine-tune a model on your data: a LoRA adapter, or all weights (--lora 0).

    Conversations ({"messages": ...}) and {"prompt": ..., "completion": ...} rows are trained on
    their answers only, texts on all tokens. Training stops when the loss on held-out data no longer
    improves; the best checkpoint is the result. Load it with peft, or with --adapter.

    [b]Examples[/b]

      unspool train tune --data chats.jsonl
      unspool train tune --model qwen3-0.6b --data letters/ --lora 32 --epochs 5
      unspool train tune --task family_relationships --lora 16 --layers 20
      unspool train tune --data chats.jsonl --lora 0 --rate 2e-5
      unspool train tune --resume runs/tune-chats
      torchrun --nproc-per-node 4 -m unspool train tune --data chats.jsonl --batch 32
    """
    settings = {
        "kind": "tune", "model": model, "data": tuple(data or ()), "task": task,
        "examples": examples, "lora": lora, "alpha": alpha, "dropout": dropout,
        "targets": tuple(targets.split(",")), "layers": layers,
        "adapter": str(adapter) if adapter else None, "steps": steps, "epochs": epochs,
        "batch": batch, "length": length, "accumulate": accumulate, "rate": rate, "seed": seed,
        "save_every": save_every, "patience": patience, "device": device,
    }  # fmt: skip
    t.run_tuning(context, settings, name, resume, quiet, report, shard)
