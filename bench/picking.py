"""What picking a token costs: python bench/picking.py

Microseconds a step for one text with 1,000 tokens behind it, everything in Python included, with
the native kernels and with numpy alone. The best of several rounds, the two taken in turn.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from unspool import native
from unspool.sampling import Chain, RowInput, SamplingSettings, arrays

OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
USUAL: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
}
WARM_FIRST = ("repetition_penalty", "frequency_penalty", "presence_penalty", "temperature",
              "top_k", "top_p", "min_p")  # fmt: skip
CHAINS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "default": {},
    "penalties, k 40, p 0.95, min-p, temperature": USUAL,
    "the same, temperature before k": USUAL | {"stages": WARM_FIRST},
    "top-p 0.95 alone": OFF | {"top_p": 0.95},
    "min-p 0.05 alone": OFF | {"min_p": 0.05},
    "temperature 1 alone": OFF,
}
LOOKS = [(0, False), (20, False), (20, True)]


def like_a_model(width: int) -> np.ndarray[Any, Any]:
    """Logits of a row: a bell, and a few that stand out."""
    chance = np.random.default_rng(0)
    logits = chance.standard_normal((1, width)) * 2
    logits[0, chance.integers(0, width, 40)] += chance.exponential(5, 40) + 5
    return logits.astype(np.float32)


def best(chain: Chain, logits: Any, row: RowInput, top: int, explain: bool) -> float:
    """Microseconds a pick, the best of a few rounds."""
    rounds = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(20):
            chain.pick(logits, [row], top=top, explain=explain)
        rounds.append((time.thread_time() - began) / 20 * 1e6)
    return min(rounds)


def main() -> None:
    kinds: dict[str, Any] = {"numpy": arrays.NumpyOperations()}
    if native.missing_reason() is None:
        kinds = {"native": arrays.numpy_operations(), **kinds}
    for width in (49_152, 151_936):
        logits = like_a_model(width)
        row = RowInput(np.random.default_rng(1).integers(0, width, 1000), 100)
        print(f"\nµs a step, vocabulary {width:,}: {' / '.join(kinds)}")
        print(f"  {'':<45}{'plain':>14}{'top 20':>14}{'and explained':>16}")
        for name, options in CHAINS.items():
            cells = []
            for top, explain in LOOKS:
                times = []
                for ops in kinds.values():
                    arrays._numpy = ops
                    chain = Chain(SamplingSettings(seed=1, **options))
                    times.append(f"{best(chain, logits, row, top, explain):,.0f}")
                cells.append(" / ".join(times))
            print(f"  {name:<45}{cells[0]:>14}{cells[1]:>14}{cells[2]:>16}")


if __name__ == "__main__":
    main()
