"""For the tests of the strategies: the tiny model as transformers has it, its pages, its bytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from helpers import tiny

PROMPT = [7, 41, 99, 3, 150, 12, 200, 64, 31, 5, 18, 77, 240, 9, 11, 120, 33, 8, 54]


@cache
def oracle() -> Any:
    """The model behind `tiny_lm`, in transformers."""
    return tiny.make("llama")


@torch.inference_mode()
def logits_after(tokens: list[int]) -> torch.Tensor:
    """What the oracle says of the next token, everything computed afresh."""
    return oracle()(torch.tensor([tokens])).logits[0, -1]


def pages_left(lm: Any) -> int:
    """Number of pages still held after the prefix cache is cleared."""
    engine = lm.engine
    engine.call(engine.tree.index.clear)
    return engine.call(lambda: engine.tree.pool.used)


def as_byte(token: int) -> bytes:
    """A vocabulary for a model that has none: most pieces are half characters."""
    return bytes([token]) if token < 256 else b""
