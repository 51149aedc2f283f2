"""Our server with a model that does nothing: python bench/serving/null_server.py PORT [STEP_MS]

What remains is what serving costs. A step takes so many milliseconds as on a device: it is launched
before the one before it was read.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from unspool.backends.step import StepBatch, StepLimits, StepResult
from unspool.lm import LanguageModel
from unspool.model.config import ModelConfig
from unspool.server.app import create_app
from unspool.server.http import server
from unspool.server.http.settings import ServerSettings
from unspool.server.http.sockets import bind_socket
from unspool.server.runtime.registry import ModelEntry, ModelRegistry
from unspool.text.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.made_model import write_tokenizer

VOCABULARY = 49_152
CONTEXT = 4096


class NullDevice:
    """A backend that needs a while and gives tokens that nobody computed."""

    page_size, page_bytes, overlaps, echoes = 16, 1, True, False
    state_bytes = state_count = 0
    page_count, context, vocab_size = 200_000, CONTEXT, VOCABULARY
    limits = StepLimits(max_rows=256, prefill_tokens=8192, prefill_beside_decode=2048)

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.free_at = 0.0  # when the steps that were launched are done
        self.logits = np.zeros((256, VOCABULARY), np.float32)
        self.logprobs = np.full(256, -1.5)
        self.launched = 0

    def set_adapter(self, number: int, adapter: Any) -> None:
        raise NotImplementedError

    def launch(self, batch: StepBatch) -> Any:
        self.launched += 1
        self.free_at = max(self.free_at, time.perf_counter()) + self.step_s
        count = len(batch.sample_indices)
        tokens = (np.arange(count) * 7919 + self.launched * 31) % (VOCABULARY - 1000) + 500
        return _Later(
            StepResult(tokens, self.logprobs[:count], self.logits[: len(batch.logits_indices)]),
            self.free_at,
        )


class _Later:
    def __init__(self, outcome: StepResult, at: float) -> None:
        self.outcome, self.at = outcome, at

    def ready(self) -> bool:
        return time.perf_counter() >= self.at

    def result(self) -> StepResult:
        left = self.at - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return self.outcome


class NullLoaded:
    """What a session needs of a model."""

    config = ModelConfig(
        family="null", vocab_size=VOCABULARY, width=64, layers=1, heads=1, kv_heads=1,
        head_width=64, ff_width=64, context=CONTEXT, positions="none",
    )  # fmt: skip
    precision, device = "nothing", "none"

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def backend(self, *, memory: int | None, context: int) -> NullDevice:
        return NullDevice(self.step_s)

    def fingerprint(self) -> str:
        return "null"


def main() -> None:
    port, step_ms = int(sys.argv[1]), float((*sys.argv, "0")[2])
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), VOCABULARY)
        tokenizer = Tokenizer.from_file(folder)
    settings = ServerSettings(port=port, max_running=1024, max_queued=1024)
    loaded: Any = NullLoaded(step_ms / 1000)
    entry = ModelEntry("null", lambda: LanguageModel(loaded, tokenizer), 1)
    app, _ = create_app(settings, ModelRegistry([entry], model_memory=1 << 30))
    bound = bind_socket(settings)
    server.run(app, settings, bound, on_stopping=lambda: None, on_started=lambda address: True)


if __name__ == "__main__":
    main()
