"""`unspool train grpo`: reinforcement learning with a reward function."""

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
            metavar="MODULE:FUNCTION",
            help="Reward function: (prompt, answer, data row) -> number.",
        ),
    ] = None,
    examples: t.Examples = 2000,
    groups: Annotated[int, typer.Option(min=1, help="Questions per step.")] = 4,
    answers: Annotated[int, typer.Option(min=2, help="Answers per question.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of answers.")] = 1.0,
    updates: Annotated[int, typer.Option(min=1, help="Steps per rollout.")] = 1,
    kl: Annotated[float, typer.Option(help="Weight of the KL penalty to the base model.")] = 0.0,
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
    """Group relative policy optimization (GRPO): reinforce answers with above-average reward.

    The questions are those of a task, or the prompts of {"prompt": ...} rows with your own reward
    function: def judge(prompt, answer, row): return 1.0 if ... else 0.0

    [b]Examples[/b]

      unspool train grpo --task leg_counting --adapter runs/tune-leg_counting/checkpoints/000300
      unspool train grpo --data prompts.jsonl --judge my_judge:short_and_kind
    """
    sys.path.insert(0, "")  # the reward function may be in the current folder
    settings = {
        "kind": "grpo", "model": model, "data": tuple(data or ()), "task": task, "judge": judge,
        "examples": examples, "groups": groups, "answers": answers, "max_tokens": max_tokens,
        "temperature": temperature, "updates": updates, "kl": kl, "lora": lora, "alpha": alpha,
        "targets": tuple(targets.split(",")), "layers": layers,
        "adapter": str(adapter) if adapter else None, "steps": steps, "epochs": epochs,
        "rate": rate, "seed": seed, "save_every": save_every, "device": device,
    }  # fmt: skip
    t.run_tuning(context, settings, name, resume, quiet, report)
