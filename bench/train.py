"""Training beside a plain loop in torch: python bench/train.py [--depth 4] [--rounds 5]

The plain loop is what people write after nanoGPT: a GPT-2 of as many weights, AdamW, all logits at
once. Ours is the trainer with its Qwen3-shaped model, once with AdamW and once with Muon. They take
turns within each round, on the same batches, and what is compared are ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.weights import parameter_count
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.model_size import ModelPlan, new_model
from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import make_optimizers
from unspool.train.running.loop import Trainer, TrainSettings


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, inner: int) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embed.weight)


class Repeated:
    """One batch after the other of random tokens: what they say does not change the speed."""

    def __init__(self, vocabulary: int, rows: int, length: int, device: str) -> None:
        self.ids = torch.randint(0, vocabulary, (rows, length + 1), device=device)

    def batch(self, step: int) -> TrainingBatch:
        return TrainingBatch(self.ids)


def plain_step(model: PlainGPT, batches: Repeated, bf16: bool) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    device = batches.ids.device.type

    def step() -> None:
        ids = batches.batch(0).ids
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            logits = model(ids[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in each round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    config = ModelPlan.for_depth(given.depth, given.vocab_size, given.length).config
    batches = Repeated(given.vocab_size, given.batch, given.length, given.device)
    # As many weights as ours: 4 w^2 of attention and 2 w x inner of feed-forward in a layer.
    inner = (parameter_count(config) - given.vocab_size * config.width) // given.depth
    inner = (inner - 4 * config.width**2) // (2 * config.width)
    plain = PlainGPT(given.vocab_size, config.width, given.depth, config.heads, inner)
    plain = plain.to(given.device)
    if on_gpu:
        plain = torch.compile(plain)  # type: ignore[assignment]
    steps = {"plain": plain_step(plain, batches, on_gpu)}
    for kind in ("adamw", "muon"):
        model = new_model(config).to(given.device)
        optimizers = make_optimizers(model, ModelPlan.for_config(config).rates, kind)  # type: ignore[arg-type]
        settings = TrainSettings(steps=10**9, bf16=on_gpu, compile=on_gpu)
        steps[kind] = Trainer(model, batches, next_token, optimizers, settings).train_step
    seconds = measure(steps, given.rounds, given.steps)
    print(json.dumps(report(seconds, given), indent=2))


def measure(
    steps: dict[str, Callable[[], object]], rounds: int, count: int
) -> dict[str, list[float]]:
    """Seconds a step of each, one figure a round; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            since = time.perf_counter()
            for _ in range(count if number else 1):
                step()
            if number:
                seconds[name].append((time.perf_counter() - since) / count)
    return seconds


def report(seconds: dict[str, list[float]], given: argparse.Namespace) -> dict[str, object]:
    tokens = given.batch * given.length
    ratios = {
        name: statistics.median(p / s for p, s in zip(seconds["plain"], own, strict=True))
        for name, own in seconds.items()
    }
    speeds = {name: round(tokens / statistics.median(own)) for name, own in seconds.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "tokens_per_second": speeds,
        "times_the_plain_loop": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "memory_of_all_three": peak,
        "settings": vars(given),
    }


if __name__ == "__main__":
    main()
