"""Published weights, run end to end beside transformers, which reads the same GGUF file.

The default model always; further files by UNSPOOL_PUBLISHED_MODELS, paths separated by colons:

    UNSPOOL_PUBLISHED_MODELS=qwen2.5-coder-0.5b-instruct-q4_k_m.gguf python -m pytest -m slow \
        tests/model/test_published_weights.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unspool

CLOSE = 1e-3  # of the largest logit and the greedy token's, in 32 bits
CLOSE_QUANTIZED = 0.05  # of log-probabilities on average: activations are rounded to 8 bits
TEXT = (
    "The old lighthouse stands on a rock. In 1871 it had a keeper, who wrote down every ship that "
    "passed. He counted 14 ships on Monday and 9 on Tuesday; on Wednesday there was fog.\n\n"
    "def ships(days):\n    return sum(day['ships'] for day in days)\n"
)


_FURTHER = os.environ.get("UNSPOOL_PUBLISHED_MODELS", "")


@pytest.fixture(params=["", *filter(None, _FURTHER.split(":"))])
def file(request: pytest.FixtureRequest, default_model: Path) -> Path:
    return Path(request.param) if request.param else default_model


@pytest.mark.slow
@pytest.mark.real
@torch.no_grad()
def test_logprobs_are_those_of_transformers(file: Path):
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    with unspool.load(file, device="cpu", backend="native", memory=64 << 20) as lm:
        ids = lm.tokenizer.encode(TEXT)
        native = np.array(lm.score(ids).logprobs[1:])
    logits = reference(torch.tensor([ids])).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    assert np.abs(native - expected).mean() < CLOSE_QUANTIZED
    with unspool.load(file, device="cpu", backend="torch", memory=64 << 20) as plain:
        tokens = plain.generate(ids, max_tokens=32, temperature=0, end=False).tokens
    logits = reference(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    greedy = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(1).values - greedy).max() < CLOSE
