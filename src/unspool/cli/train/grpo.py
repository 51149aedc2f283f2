"""`unspool train grpo`: answers written by the engine, judged by a function, and learned from."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from unspool.cli import options as o
from unspool.cli.train import tuning as t


def grpo(
    context: typer.Context,
    model: o.Model = None,
    data: t.Data = None,
    task: t.Task = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Called with prompt, answer and row; gives a number."
        ),
    ] = None,
    examples: t.Examples = 2000,
    groups: Annotated[int, typer.Option(min=1, help="Questions in a step.")] = 4,
    answers: Annotated[int, typer.Option(min=2, help="Answers to each.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="How freely answers are drawn.")] = 1.0,
    updates: Annotated[
        int, typer.Option(min=1, help="Steps that learn from the same answers.")
    ] = 1,
    kl: Annotated[float, typer.Option(help="How much leaving the old model costs.")] = 0.0,
    lora: t.Lora = 16,
    alpha: t.Alpha = None,
    targets: t.Targets = "q,k,v,o,gate,up,down",
    layers: t.Layers = None,
    adapter: t.From = None,
    steps: t.Steps = None,
    epochs: t.Epochs = 1.0,
    rate: t.Rate = None,
    seed: t.Seed = 0,
    save_every: t.SaveEvery = 20,
    device: t.Device = "auto",
    report: t.Report = None,
    name: t.Name = None,
    resume: t.Resume = None,
    quiet: o.Quiet = False,
) -> None:
    """Group relative policy optimization: what was judged better than its group becomes likelier.

    The questions are a task's, or the prompts of lines of {"prompt": ...}; a function of your own
    may judge: def judge(prompt, answer, row): return 1.0 if ... else 0.0

    [b]Examples[/b]

      unspool train grpo --task leg_counting --adapter runs/tune-leg_counting/checkpoints/000300
      unspool train grpo --data prompts.jsonl --judge my_judge:short_and_kind
    """
    sys.path.insert(0, "")  # a judge may lie in the folder where we are
    settings = {
        "kind": "grpo", "model": model, "data": tuple(data or ()), "task": task, "judge": judge,
        "examples": examples, "groups": groups, "answers": answers, "max_tokens": max_tokens,
        "temperature": temperature, "updates": updates, "kl": kl, "lora": lora, "alpha": alpha,
        "targets": tuple(targets.split(",")), "layers": layers,
        "adapter": str(adapter) if adapter else None, "steps": steps, "epochs": epochs,
        "rate": rate, "seed": seed, "save_every": save_every, "device": device,
    }  # fmt: skip
    t.carry_out(context, settings, name, resume, quiet, report)
