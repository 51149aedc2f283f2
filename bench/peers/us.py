"""Unspool, by its Python face; see protocol.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol import Options, serve

import unspool


class Unspool:
    def __init__(self, options: Options) -> None:
        settings: dict[str, Any] = {"device": "cpu", "progress": False}
        try:
            self.lm = unspool.load(options.model, threads=options.threads, **settings)
        except unspool.SettingsError:  # the native kernels are not here; torch has its own setting
            import torch

            torch.set_num_threads(options.threads)
            self.lm = unspool.load(options.model, **settings)
        self.weights = precision = self.lm.model.precision
        if precision in ("float32", "bfloat16", "float16"):  # the file's blocks were unpacked
            self.weight_bytes = _numbers(self.lm.config) * (4 if precision == "float32" else 2)
        else:
            self.weight_bytes = Path(options.model).stat().st_size
        self.name = f"unspool {unspool.__version__}"

    def write(
        self, prompts: list[list[int]], new: int, mark: Callable[[], None]
    ) -> list[list[int]]:
        asked: dict[str, Any] = {"temperature": 0, "end": False, "top": 0, "explain": False}
        texts = [self.lm.begin(ids, max_tokens=new, **asked) for ids in prompts]
        written = []
        for generation, steps in texts:
            for _ in generation.extend(steps):
                mark()
            written.append(list(generation.tokens))
        return written

    def logits(self, ids: list[int]) -> Any:
        with self.lm.open_branch(ids) as branch:
            return self.lm.engine.extend(branch, num_logits=len(ids))

    def first(self, text: str) -> str:
        return self.lm.generate(text, max_tokens=1, temperature=0).text


def _numbers(config: Any) -> int:
    """How many numbers the matrices of a llama-like model hold, a tied table counted once."""
    heads = (config.heads * 2 + config.kv_heads * 2) * config.head_width
    layer = config.width * (heads + 3 * config.ff_width)
    return int(config.layers * layer + config.vocab_size * config.width)


if __name__ == "__main__":
    serve(Unspool)
