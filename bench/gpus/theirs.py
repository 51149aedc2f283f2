"""transformers at the same work: a static cache, compiled; and continuous batching."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from gpus.ours import Place
from gpus.parts import Part, shape_of, tiny


class Theirs:
    """The same shape with random weights, as transformers makes it."""

    def __init__(self, part: Part, place: Place) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self.torch, self.transformers, self.place = torch, transformers, place
        shape = dict(shape_of(part, place.small))
        config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
        torch.manual_seed(0)
        dtype = getattr(torch, place.dtype)
        with torch.device(place.device):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        torch.set_float32_matmul_precision("high")
        self.chance = np.random.default_rng(7)
        self.vocabulary = config.vocab_size

    def measure(self, part: Part, way: str) -> dict[str, Any]:
        part = tiny(part) if self.place.small else part
        began = time.perf_counter()
        work = self._static if way == "static" else self._continuous
        work(part)
        warm = time.perf_counter() - began
        taken = min(work(part) for _ in range(self.place.rounds))
        tokens = part.rows * part.new
        if part.work == "one":  # behind the first
            taken -= min(self._static(part, 1) for _ in range(2))
            tokens -= part.rows
        return {"seconds": taken, "tokens": tokens, "tokens_s": tokens / taken, "warm_s": warm}

    def _static(self, part: Part, new: int | None = None) -> float:
        """One batch: its cache of one length, its decoding compiled (where there is a GPU)."""
        torch = self.torch
        ids = torch.tensor(self._prompts(part), device=self.place.device)
        began = time.perf_counter()
        with torch.inference_mode():
            found = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new or part.new,
                do_sample=False, eos_token_id=-1, pad_token_id=0, cache_implementation="static",
            )  # fmt: skip
        rows = found[:, ids.shape[1] :].tolist()  # waits
        assert all(len(row) == (new or part.new) for row in rows)
        return time.perf_counter() - began

    def _continuous(self, part: Part) -> float:
        prompts = self._prompts(part)
        settings = self.transformers.GenerationConfig(
            max_new_tokens=part.new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        began = time.perf_counter()
        found = self.model.generate_batch(
            inputs=prompts, generation_config=settings, progress_bar=False,
            persistent_manager=True,  # so that its graphs are captured once, in the warm-up
        )  # fmt: skip
        taken = time.perf_counter() - began
        count = sum(len(one.generated_tokens) for one in found.values())
        assert count == part.rows * part.new, f"{count} tokens were written"
        return taken

    def _prompts(self, part: Part) -> list[list[int]]:
        size = (part.rows, part.prompt)
        found: list[list[int]] = self.chance.integers(3, self.vocabulary, size).tolist()
        return found
