"""Training and a plain loop in torch: python bench/train.py [--depth 4] [--rounds 5]

The plain loop is in the style of nanoGPT: a GPT-2 with as many parameters, AdamW, all logits in one
tensor. Ours is the trainer with its Qwen3-shaped model, with AdamW and with Muon. They take turns
within each round, on the same batch, and ratios are taken within a round.
"""

import json
import resource
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from lib.arguments import add_options, make_parser
from train_gpu import RandomBatches
from unspool.model.weights import parameter_count
from unspool.train.learning.model_size import ModelPlan, new_model
from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import make_optimizers
from unspool.train.running.loop import Trainer, TrainSettings


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocab_size: int, width: int, depth: int, heads: int, inner: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, heads, inner) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.embed(ids) + self.positions.weight[: ids.shape[1]])
        return functional.linear(self.norm(x), self.embed.weight)


def plain_step(model: nn.Module, ids: Tensor, bf16: bool) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step() -> None:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            logits = model(ids[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())

    return step


def measure(
    steps: dict[str, Callable[[], object]], rounds: int, count: int
) -> dict[str, list[float]]:
    """Seconds per step in each round; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(count if number else 1):
                step()
            if number:
                seconds[name].append((time.perf_counter() - start) / count)
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    add_options(
        parser,
        ("--depth", 4),
        ("--vocab-size", 2048),
        ("--length", 256),
        ("--batch", 8),
        ("--rounds", 5),
        ("--steps", 3, "in each round"),
        ("--device", "cuda" if torch.cuda.is_available() else "cpu"),
    )
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    plan = ModelPlan.for_depth(args.depth, args.vocab_size, args.length)
    config = plan.config
    batches = RandomBatches(args.vocab_size, args.batch, args.length, args.device)
    # As many parameters as ours: 4 w^2 of attention and 2 w x inner of feed-forward in a layer.
    inner = (parameter_count(config) - args.vocab_size * config.width) // args.depth
    inner = (inner - 4 * config.width**2) // (2 * config.width)
    plain = PlainGPT(args.vocab_size, config.width, args.depth, config.heads, inner)
    plain = plain.to(args.device)
    if on_gpu:
        plain = torch.compile(plain)  # type: ignore[assignment]
    steps = {"plain": plain_step(plain, batches.batch(0).ids, on_gpu)}
    for kind in ("adamw", "muon"):
        model = new_model(config).to(args.device)
        optimizers = make_optimizers(model, ModelPlan.for_config(config).rates, kind)  # type: ignore[arg-type]
        settings = TrainSettings(steps=10**9, bf16=on_gpu, compile=on_gpu)
        steps[kind] = Trainer(model, batches, next_token, optimizers, settings).train_step
    seconds = measure(steps, args.rounds, args.steps)
    tokens, ratios = args.batch * args.length, {}
    for name, values in seconds.items():
        pairs = zip(seconds["plain"], values, strict=True)
        ratios[name] = round(statistics.median(p / s for p, s in pairs), 2)
    speeds = {name: round(tokens / statistics.median(s)) for name, s in seconds.items()}
    results = {
        "tokens_per_second": speeds, "times_the_plain_loop": ratios,
        "memory_of_all_three": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "settings": vars(args),
    }  # fmt: skip
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
