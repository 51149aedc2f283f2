"""Solve puzzles with a model, without engine and KV cache, in various orders of unmasking.

result = solutions(model, puzzle, prompts, order="confident")
result.answers, result.passes

left       from left to right (the only order of a causal model)
confident  the position with the highest probability first
margin     the position with the largest gap between its two best tokens first
random     random positions
all        all positions in one pass
0.9        all positions with at least this probability, and the best one
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unspool.errors import SettingsError
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import save_weights
from unspool.model.layers.transformer import Transformer
from unspool.model.weights import parameter_count
from unspool.train.evaluation.held_out import on_device
from unspool.train.learning.forward import AttentionMask, full_mask, hidden_states
from unspool.train.learning.model_size import new_model, rates_for
from unspool.train.learning.objectives import Masked, Objective, next_token
from unspool.train.twins.puzzles import (
    END,
    HELD_OUT,
    MASK,
    Puzzle,
    PuzzleBatches,
    decode_rows,
    encode_texts,
    puzzle_by_name,
    save_tokenizer,
    token_ids,
)
from unspool.train.twins.settings import TwinParts, TwinSettings

ORDERS = ("left", "confident", "margin", "random", "all", "0.9", "0.99")


@dataclass(frozen=True, slots=True)
class Solutions:
    answers: list[str]
    passes: float  # mean number of forward passes per puzzle


@torch.no_grad()
def solve(
    model: Transformer, puzzle: Puzzle, prompts: list[str], order: str | None = None, seed: int = 0
) -> Solutions:
    """Greedy answers to prompts, in an order of ORDERS (or a probability threshold)."""
    causal = model.config.sight == "causal"
    order = order or ("left" if causal else "confident")
    if causal and order != "left":
        raise SettingsError("a causal model generates from left to right only")
    device = model.embed.weight.device
    prompt_ids = torch.from_numpy(encode_texts(puzzle, prompts)).to(device)
    if causal:
        answers, passes = _generate(model, prompt_ids, puzzle.answer), float(puzzle.answer)
    else:
        answers, passes = _unmask(model, prompt_ids, puzzle.answer, order, seed)
    return Solutions(decode_rows(puzzle, answers.cpu().numpy()), passes)


def _generate(model: Transformer, prompt: Tensor, count: int) -> Tensor:
    cache = model.new_cache(prompt.shape[1] + count, len(prompt))
    token, answer = prompt, []
    for _ in range(count):
        token = model(token, cache, last_only=True)[:, -1].argmax(-1, keepdim=True)
        answer.append(token)
    return torch.cat(answer, 1)


def _unmask(
    model: Transformer, prompt: Tensor, count: int, order: str, seed: int
) -> tuple[Tensor, float]:
    mask = model.config.mask_id
    assert mask is not None
    rng = torch.Generator().manual_seed(seed)
    canvas = torch.full((len(prompt), count), mask, device=prompt.device)
    attention = AttentionMask.build(model.config, torch.cat((prompt, canvas), 1), full_mask)
    passes = torch.zeros(len(prompt))
    while bool((masked := canvas == mask).any()):
        passes += masked.any(1).cpu()
        x = hidden_states(model, torch.cat((prompt, canvas), 1), attention)[:, prompt.shape[1] :]
        logits = model.logits(x).float()
        logits[..., mask] = -torch.inf
        probabilities = logits.softmax(-1)
        commit = masked & _choose_positions(probabilities, masked, order, rng)
        canvas = torch.where(commit, probabilities.argmax(-1), canvas)
    return canvas, float(passes.mean())


def _choose_positions(
    probabilities: Tensor, masked: Tensor, order: str, rng: torch.Generator
) -> Tensor:
    """The positions to unmask in this pass; at least one per row."""
    if order == "all":
        return masked
    best = probabilities.topk(2, -1).values
    if order == "random":
        priority = torch.rand(masked.shape, generator=rng).to(masked.device)
    elif order == "left":
        priority = -torch.arange(masked.shape[1], device=masked.device).expand_as(masked).float()
    else:
        priority = best[..., 0] - best[..., 1] if order == "margin" else best[..., 0]
    priority = priority.masked_fill(~masked, -torch.inf)
    first = torch.zeros_like(masked).scatter_(1, priority.argmax(1, keepdim=True), True)
    return first | (best[..., 0] >= _threshold(order))


def _threshold(order: str) -> float:
    try:
        return float(order)
    except ValueError:
        if order in ORDERS:
            return torch.inf
        raise SettingsError(
            f"unknown order {order!r}; choose from {', '.join(ORDERS[:5])}, or give a probability "
            "threshold"
        ) from None


FAMILY = "unspool-puzzle"  # not a family of transformers
_PUZZLE_EVAL_BATCHES = 4


def puzzle_config(puzzle: Puzzle, sight: str, depth: int, width: int, heads: int) -> ModelConfig:
    """Config of either model; they differ only in their attention mask."""
    if width % heads:
        raise SettingsError(f"width {width} must be a multiple of heads {heads}")
    ids = token_ids(puzzle)
    return ModelConfig(
        family=FAMILY, vocab_size=len(ids), width=width, layers=depth, heads=heads, kv_heads=heads,
        head_width=width // heads, ff_width=-(-8 * width // 3 // 32) * 32,
        context=puzzle.prompt_length + puzzle.answer + 1, positions="learned", qk_norm="head",
        tied=True,
        end_ids=(ids[END],), sight="causal" if sight == "causal" else "whole",
        mask_id=None if sight == "causal" else ids[MASK], canvas_length=puzzle.answer,
    )  # fmt: skip


def puzzle_objective(puzzle: Puzzle, sight: str) -> Objective:
    if sight == "causal":
        return next_token
    return Masked(token_ids(puzzle)[MASK], weighting="plain")


def puzzle_parts(settings: TwinSettings, device: torch.device) -> TwinParts:
    puzzle = puzzle_by_name(settings.kind)
    config = puzzle_config(puzzle, settings.sight, settings.depth, settings.width, settings.heads)
    objective = puzzle_objective(puzzle, settings.sight)
    default_rows = 1024 if device.type == "cuda" else 64
    batches = PuzzleBatches(puzzle, settings.batch or default_rows, settings.seed)
    rates = rates_for(config)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save_tokenizer(puzzle, Path(folder))

    def save(weights: Mapping[str, Tensor], folder: Path) -> None:
        save_weights(config, weights, folder)
        tokenizer.save(folder)

    def evaluate(model: Transformer) -> tuple[float, float | None]:
        total = count = 0.0
        for number in range(_PUZZLE_EVAL_BATCHES):
            batch = on_device(batches.batch(HELD_OUT + number), device)
            loss = objective(model, batch, torch.Generator().manual_seed(number))
            total += float(loss.mean) * float(loss.tokens)
            count += float(loss.tokens)
        return total / max(1.0, count), None

    def sample(model: Transformer) -> list[tuple[str, int, str]]:
        prompts, _ = puzzle.generate(1, PuzzleBatches(puzzle, 1, settings.seed).rng(HELD_OUT))
        return [(prompts[0], 0, solve(model, puzzle, prompts).answers[0])]

    return TwinParts(
        new_model(config, settings.seed).to(device), batches, objective, save, evaluate, sample,
        rates if settings.rate is None else rates.times(settings.rate / rates.matrices),
        "adamw" if settings.optimizer == "adamw" else "muon",
        {"parameters": parameter_count(config), "config": config.to_dict(),
         "data": {"source": [puzzle.name], "kind": "puzzle"}},
    )  # fmt: skip
