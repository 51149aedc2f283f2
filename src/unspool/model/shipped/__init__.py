"""The models shipped with Unspool: a pair for Sudoku, 3.7 million weights each, in 4 bits.

    sudoku            fills the board in any order (`lm.diffuse`)
    sudoku-causal     writes it from left to right (`lm.generate`)

Each is a folder here, as `unspool train export` writes it; its name is the model's.
"""

from __future__ import annotations

from pathlib import Path


def shipped_models() -> dict[str, Path]:
    """The folder of each shipped model, by name."""
    configs = sorted(Path(__file__).parent.glob("*/config.json"))
    return {config.parent.name: config.parent for config in configs}
