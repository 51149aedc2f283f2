"""Training of a small model on a puzzle: causal, or masked (fills in any order).

Both have the same shape, data and number of steps. Position embeddings are learned, because a cell
is defined by its absolute position.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from unspool.errors import SettingsError
from unspool.model.checkpoint import save_weights
from unspool.model.config import ModelConfig
from unspool.model.transformer import Transformer
from unspool.model.weights import parameter_count
from unspool.train.learning.objectives import Masked, Objective, next_token
from unspool.train.learning.shape import new_model, rates_for
from unspool.train.running.held_out import on_device
from unspool.train.twins.puzzles.puzzle import (
    END,
    HELD_OUT,
    MASK,
    Puzzle,
    PuzzleBatches,
    puzzle_by_name,
    save_tokenizer,
    token_ids,
)
from unspool.train.twins.settings import TwinParts, TwinSettings
from unspool.train.twins.solving import solve

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
