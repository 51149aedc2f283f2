"""enwik8, as the field judges it: the bits that a byte of its last 5 MB costs.

The first 100 MB of an English Wikipedia dump, cut as everyone cuts it: 90 MB to learn from, 5 to
choose by, 5 to be judged on. A model of at most 50 million weights reads bytes, with no vocabulary
of its own, for so many minutes; the steps follow from the speed of the first ones. It is judged in
windows that overlap by half, so that every byte but the first ones has half a window before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unspool.model.config import ModelConfig
from unspool.model.layers.transformer import Transformer
from unspool.model.weights import parameter_count
from unspool.train.data.batches import PackedBatches, TrainingBatch
from unspool.train.data.prepared import PackedDocuments
from unspool.train.learning.model_size import new_config, new_model, rates_for
from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import make_optimizers
from unspool.train.running.events import Event, StepLogged
from unspool.train.running.loop import Trainer, TrainSettings

_TIMED = 30  # steps by which the speed is known, behind those in which things are compiled
_WAY = 12  # looks at the text that is held out, on the way


@dataclass(frozen=True)
class Enwik8:
    """The model and how it is trained."""

    data: Path
    minutes: float = 15.0
    depth: int = 14
    width: int = 512
    head_width: int = 128
    length: int = 2048  # bytes that are seen at once
    batch: int = 64  # rows of that
    rate: float = 1.0
    weight_decay: float = 0.1
    seed: int = 0

    @property
    def config(self) -> ModelConfig:
        heads = self.width // self.head_width
        return new_config(
            self.depth, 256, self.length, width=self.width, head_width=self.head_width,
            heads=heads, kv_heads=heads,
        )  # fmt: skip


def parts(data: Path) -> tuple[PackedDocuments, PackedDocuments, PackedDocuments]:
    """What is learned from, what is looked at on the way, and what is judged in the end."""
    raw = np.fromfile(data, np.uint8)
    tenth = len(raw) // 20
    ends = (0, len(raw) - 2 * tenth, len(raw) - tenth, len(raw))
    pieces = [raw[begin:end] for begin, end in pairwise(ends)]
    first, second, third = (
        PackedDocuments(piece, np.array([0, len(piece)], np.int64), None) for piece in pieces
    )
    return first, second, third


def run(job: Enwik8, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """Train for the minutes given, and judge."""
    train, held_out, test = parts(job.data)
    say(
        f"  {parameter_count(job.config) / 1e6:.1f}M weights, {len(train.ids):,} bytes to learn "
        f"from, steps of {job.batch * job.length:,} bytes"
    )
    steps = _steps(job, train, device)
    say(f"  {steps:,} steps, {steps * job.batch * job.length / len(train.ids):.1f} epochs")
    trainer = _trainer(job, train, device, steps)
    curve: list[tuple[int, float, float]] = []
    began = time.perf_counter()

    def told(event: Event) -> None:
        every = _WAY * trainer.settings.log_every
        if not isinstance(event, StepLogged) or (event.step * _WAY) % steps >= every:
            return
        bits = judged(trainer.model, held_out, job.length, most=500_000)
        trainer.model.train()
        curve.append((event.step, event.loss / math.log(2), bits))
        spent = time.perf_counter() - began
        say(
            f"  step {event.step:,}: {event.loss / math.log(2):.4f} bits in training, "
            f"{bits:.4f} held out, {event.tokens / spent:,.0f} bytes/s, {spent:.0f} s"
        )

    trainer.run(told)
    seconds = time.perf_counter() - began
    found = {
        "parameters": parameter_count(job.config),
        "steps": steps,
        "epochs": steps * job.batch * job.length / len(train.ids),
        "seconds": seconds,
        "curve": curve,
        "held_out": judged(trainer.model, held_out, job.length),
        "test": judged(trainer.model, test, job.length),
    }
    say(
        f"  {found['test']:.4f} bits per byte on the test part ({found['held_out']:.4f} held out), "
        f"after {seconds / 60:.1f} minutes"
    )
    return found


def _trainer(job: Enwik8, train: PackedDocuments, device: torch.device, steps: int) -> Trainer:
    cuda = device.type == "cuda"
    model = new_model(job.config, job.seed).to(device)
    rates = replace(rates_for(job.config).times(job.rate), weight_decay=job.weight_decay)
    return Trainer(
        model,
        PackedBatches(train, job.batch, job.length, job.seed),
        next_token,
        make_optimizers(model, rates),
        TrainSettings(
            steps=steps, warmup=max(1, steps // 50), decay=0.6, bf16=cuda, compile=cuda,
            log_every=10,
        ),
    )  # fmt: skip


def _steps(job: Enwik8, train: PackedDocuments, device: torch.device) -> int:
    """As many as fit into the time, by the speed of a few that are thrown away."""
    trainer = _trainer(job, train, device, 1000)
    for number in range(_TIMED + 5):
        if number == 5:
            since = time.perf_counter()
        trainer.train_step()
        trainer.step += 1
    took = (time.perf_counter() - since) / _TIMED
    return max(_WAY, int(job.minutes * 60 / took))


@torch.no_grad()
def judged(
    model: Transformer, packed: PackedDocuments, length: int, most: int | None = None
) -> float:
    """Bits per byte of a text, or of its beginning: each byte once, behind half a window."""
    model.eval()
    device = model.embed.weight.device
    cuda = device.type == "cuda"
    total = torch.zeros((), dtype=torch.float64, device=device)
    bytes_judged = 0
    # As it is: compiled layers would be compiled once more for the few windows there are.
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autocast(device.type, torch.bfloat16, enabled=cuda),
    ):
        for ids, counted in _windows(packed.ids[:most], length):
            batch = TrainingBatch(ids.to(device), counted.to(device))
            count = int(counted.sum())
            total += next_token(model, batch, torch.Generator()).mean.double() * count
            bytes_judged += count
    return float(total) / math.log(2) / bytes_judged


def _windows(ids: Any, length: int, rows: int = 32) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Windows that overlap by half, the last more; what an earlier one judged counts no more."""
    last = max(0, len(ids) - length - 1)
    begins = [*range(0, last, max(1, length // 2)), last]
    judged_to = 0
    for first in range(0, len(begins), rows):
        here = np.array(begins[first : first + rows])
        places = here[:, None] + np.arange(min(length, len(ids) - 1) + 1)
        counted = np.zeros((len(here), places.shape[1] - 1), bool)
        for row, targets in enumerate(places[:, 1:]):
            counted[row] = targets > judged_to
            judged_to = int(targets[-1])
        window = np.asarray(ids)[places].astype(np.int64)
        yield torch.from_numpy(window), torch.from_numpy(counted)
