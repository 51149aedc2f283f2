"""Random adapters, of all matrices that may have one or of some; and what is computed with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from helpers.cuda_support import language_model
from unspool.model.adapters import Adapter, LowRank, adaptable_shapes
from unspool.model.config import ModelConfig


def random_adapter(
    config: ModelConfig, rank: int, *, seed: int, only: tuple[str, ...] = ("",)
) -> Adapter:
    """Strong enough to be seen in the logits; `only`: matrices with one of these in their names."""
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)

    parts = {
        name: LowRank(floats(rank, columns), floats(rows, rank), 0.5)
        for name, (rows, columns) in adaptable_shapes(config).items()
        if any(word in name for word in only)
    }
    return Adapter(parts)


SHAPES: dict[str, dict[str, Any]] = {
    "gated": {},
    "not gated, with biases, a window": {
        "gated": False, "activation": "gelu_tanh", "qkv_bias": True, "out_bias": True,
        "ff_bias": True, "windows": (7,),
    },
    "tied, all heads alike": {"tied": True, "kv_heads": 4, "qk_norm": "head"},
    "with experts": {"experts": 4, "experts_per_token": 2, "expert_width": 24},
}  # fmt: skip
PROMPT = list(range(3, 21))


def with_adapters(model: Any) -> Any:
    """Three of them: of all matrices, of a few, and of a rank beyond the usual room."""
    lm = language_model(model)
    for name, adapter in (
        ("all", random_adapter(lm.config, 4, seed=1)),
        ("few", random_adapter(lm.config, 7, seed=2, only=("attention.v", "feed.up"))),
        ("wide", random_adapter(lm.config, 19, seed=3, only=("attention", "head"))),
    ):
        lm.engine.adapters.load(name, adapter)
    return lm


def all_logits(lm: Any, prompt: list[int] = PROMPT) -> Any:
    """Of prompts and of next tokens, beside each other and alone, with and without adapters."""
    names = [None, "all", "few", "all", "wide"]
    branches = [lm.engine.open(prompt, name) for name in names]
    result = lm.engine.extend_all([(branch, []) for branch in branches], num_logits=3)
    result += lm.engine.extend_all([(branch, [7]) for branch in branches])
    result += lm.engine.extend_all([(branch, [8, 9]) for branch in branches[:3]], num_logits=2)
    result.append(lm.engine.extend(branches[1], [5]))
    return np.concatenate([np.asarray(part) for part in result])
