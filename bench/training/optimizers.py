"""Muon against AdamW: how many steps each needs to the same loss, on the same text and model.

AdamW gets the best of several learning rates and all the steps. Muon is then trained for shares
of those steps, each time with a schedule of its own that ends there: the smallest share at which
its loss on held-out text is no higher is the answer. A look at one longer run's curve would be
unfair to AdamW, whose last steps, with the rate going down, win most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unspool.train.data.batches import PackedBatches
from unspool.train.data.prepared import prepare
from unspool.train.data.tokenizer import TokenizerSettings, make_tokenizer
from unspool.train.learning.model_size import new_config, new_model, rates_for
from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import make_optimizers
from unspool.train.running.events import Evaluated
from unspool.train.running.loop import HeldOutEvaluation, Trainer, TrainSettings


@dataclass(frozen=True)
class Race:
    """One model, one text, so many steps."""

    data: Path
    depth: int = 8
    vocab_size: int = 8192
    length: int = 512
    batch: int = 64
    steps: int = 2000
    adamw_rates: tuple[float, ...] = (0.25, 0.5, 1.0)
    muon_rates: tuple[float, ...] = (1.0,)
    shares: tuple[float, ...] = (0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


def race(job: Race, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    made = make_tokenizer([str(job.data)], TokenizerSettings(job.vocab_size))
    prepared = prepare([str(job.data)], made.tokenizer)
    say(f"  {prepared.card.tokens:,} tokens of {job.data.name}, {made.tokenizer.vocab_size} kinds")
    config = new_config(job.depth, made.tokenizer.vocab_size, job.length)
    judge = HeldOutEvaluation(prepared.held_out, made.tokenizer, next_token, job.length, rows=256)

    def train(kind: str, rate: float, steps: int) -> tuple[float, float]:
        model = new_model(config).to(device)
        cuda = device.type == "cuda"
        trainer = Trainer(
            model,
            PackedBatches(prepared.train, job.batch, job.length),
            next_token,
            make_optimizers(model, rates_for(config).times(rate), kind),
            TrainSettings(
                steps=steps, warmup=max(1, steps // 50), decay=0.5, bf16=cuda, compile=cuda,
                log_every=steps,
            ),
            evaluate=judge,
        )  # fmt: skip
        judged: list[Evaluated] = []
        trainer.run(lambda event: judged.append(event) if isinstance(event, Evaluated) else None)
        loss, bits = judged[-1].held_out_loss, judged[-1].bits_per_byte
        say(f"  {kind} x{rate:g}, {steps} steps: loss {loss:.4f}, {bits or 0:.4f} bits per byte")
        return loss, bits or 0.0

    by_rate = {rate: train("adamw", rate, job.steps) for rate in job.adamw_rates}
    rate, (wanted, bits) = min(by_rate.items(), key=lambda item: item[1])
    found: dict[str, Any] = {
        "steps": job.steps, "adamw": {"rate": rate, "loss": wanted, "bits_per_byte": bits},
        "adamw_rates": {str(r): loss for r, (loss, _) in by_rate.items()}, "muon": {},
    }  # fmt: skip
    found["share"] = _first_share(job, train, wanted, found["muon"])
    return found


def _first_share(
    job: Race,
    train: Callable[[str, float, int], tuple[float, float]],
    wanted: float,
    told: dict[str, float],
) -> float | None:
    """The smallest share of the steps in which Muon gets as far; None if it never does."""
    for share in sorted(job.shares):
        best = min(train("muon", rate, round(job.steps * share))[0] for rate in _rates(job))
        told[f"{share:g}"] = best
        if best <= wanted:
            return share
    return None


def _rates(job: Race) -> Sequence[float]:
    return job.muon_rates
