"""How much of a GPU's best goes into training, and what the rest is lost to.

Random tokens, so no data is needed: the arithmetic is the same. The share counts 6N and attention
as PaLM's report and nanochat do (every token sees the whole length); beside it stands the share
that counts only what tokens really see.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unspool.model.config import ModelConfig
from unspool.model.weights import parameter_count
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.model_size import (
    device_peak,
    mfu,
    new_config,
    new_model,
    rates_for,
    training_flops,
)
from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import make_optimizers
from unspool.train.running.loop import Trainer, TrainSettings

# The kernels of each kind, by parts of their names; the first that fits.
_KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn_generated"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "::mm", "addmm", "cublas"),
    "copies": ("memcpy", "memset", "direct_copy", "copy_kernel"),
    "fused": ("triton",),
}


@dataclass(frozen=True)
class Job:
    """One model to be measured."""

    name: str
    depth: int
    vocab_size: int = 50304
    length: int = 2048
    batch: int = 32
    accumulate: int = 8  # batches in a step: 524,288 tokens, as nanochat's d12 takes them
    optimizer: str = "muon"
    compile: bool = True
    recompute: bool = False

    @property
    def config(self) -> ModelConfig:
        return new_config(self.depth, self.vocab_size, self.length)


class RandomBatches:
    """The same random tokens at every step, brought to the device as those of a text are."""

    def __init__(self, job: Job) -> None:
        self.batch_size, self.length = job.batch, job.length
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(0, job.vocab_size, (job.batch, job.length + 1), generator=rng)
        self._batch = TrainingBatch(ids)

    def batch(self, step: int) -> TrainingBatch:
        return self._batch


def measure(
    job: Job, device: torch.device, steps: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tokens a second, shares of the peak, memory, and where the time goes."""
    config, cuda = job.config, device.type == "cuda"
    model = new_model(config).to(device)
    trainer = Trainer(
        model,
        RandomBatches(job),
        next_token,
        make_optimizers(model, rates_for(config), job.optimizer),
        TrainSettings(
            steps=1_000_000,
            bf16=cuda,
            compile=job.compile and cuda,
            recompute=job.recompute,
            accumulate=job.accumulate,
        ),
    )
    since = time.perf_counter()
    for _ in range(2):
        trainer.train_step()
    _wait(device)
    say(f"  {job.name}: first two steps (compiling) {time.perf_counter() - since:.1f} s")
    since = time.perf_counter()
    for _ in range(steps):
        trainer.train_step()
    _wait(device)
    seconds = (time.perf_counter() - since) / steps
    speed = job.batch * job.length * job.accumulate / seconds
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    peak = device_peak(device)
    found: dict[str, Any] = {
        "parameters": parameter_count(config),
        "length": job.length,
        "batch": job.batch,
        "accumulate": job.accumulate,
        "optimizer": job.optimizer,
        "device": name,
        "seconds_a_step": seconds,
        "tokens_per_second": speed,
        "flops_per_second": training_flops(config, job.length) * speed,
        "memory": torch.cuda.max_memory_allocated(device) if cuda else None,
    }
    if peak:
        found["mfu"] = mfu(config, job.length, speed, peak)
        causal = training_flops(config, job.length, causal=True)
        found["mfu_causal"] = causal * speed / peak
    found["update_share"] = _update_share(trainer, device, seconds)
    if cuda:
        found["time"] = _profile(trainer, device, say)
    return found


def _update_share(trainer: Trainer, device: torch.device, whole: float) -> float:
    """The optimizers alone, as a share of a step."""
    for weight in trainer.model.parameters():
        weight.grad = torch.zeros_like(weight)
    _wait(device)
    since = time.perf_counter()
    for _ in range(3):
        for optimizer in trainer.optimizers:
            optimizer.step()
    _wait(device)
    spent = (time.perf_counter() - since) / 3
    for weight in trainer.model.parameters():
        weight.grad = None
    return spent / whole


def _profile(
    trainer: Trainer, device: torch.device, say: Callable[[str], None], steps: int = 1
) -> dict[str, float]:
    """The share of the time that each kind of kernel takes; `idle` is when none runs. Tells the
    largest of those that are neither products nor attention."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    since = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            trainer.train_step()
        _wait(device)
        whole = (time.perf_counter() - since) * 1e6
    spent: dict[str, float] = dict.fromkeys((*_KINDS, "other"), 0.0)
    others: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "#" not in event.name:
            name, took = event.name.lower(), event.time_range.elapsed_us()
            kinds = (k for k, words in _KINDS.items() if any(word in name for word in words))
            kind = next(kinds, "other")
            spent[kind] += took
            if kind in ("other", "fused"):
                others[event.name[:90]] += took / whole
    for name, share in others.most_common(12):
        say(f"    {share:.1%} {name}")
    shares = {kind: value / whole for kind, value in spent.items()}
    return {**shares, "idle": max(0.0, 1 - sum(shares.values()))}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
