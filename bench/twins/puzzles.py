"""How many puzzles a twin solves exactly, by the order in which it fills them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.train.twins.puzzles import puzzle_by_name
from unspool.train.twins.twin import ORDERS, solve

_AT_ONCE = 256


def solved(
    folder: Path, names: tuple[str, ...], count: int, device: torch.device
) -> dict[str, Any]:
    """Of each kind of puzzle the share that comes out right in each order, and the passes."""
    model = load_transformer(open_checkpoint(folder), device=str(device))
    orders = ("left",) if model.config.sight == "causal" else ORDERS
    told: dict[str, Any] = {}
    for name in names:
        puzzle = puzzle_by_name(name)
        prompts, _ = puzzle.generate(count, np.random.default_rng(99))
        told[name] = {}
        for order in orders:
            right, passes = 0, 0.0
            for begin in range(0, count, _AT_ONCE):
                asked = prompts[begin : begin + _AT_ONCE]
                found = solve(model, puzzle, asked, order)
                right += sum(map(puzzle.is_solved, asked, found.answers))
                passes += found.passes * len(asked)
            told[name][order] = {"solved": right / count, "passes": passes / count}
    return told
