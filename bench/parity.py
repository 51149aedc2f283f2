"""How near every family comes to transformers: python bench/parity.py [FAMILY ...]

Tiny models with random weights, those of the tests. For each: the largest difference of any logit
behind prompts of up to 48 tokens, in plain torch and on the native kernels (weights and keys in 32
bits), read at once and token by token; and how far the logits themselves spread. A line a family,
as a table for the documents. Needs the packages of the tests.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch
import transformers

from helpers import tiny, tiny_recurrent
from helpers.single_sequence import SingleSequence
from unspool.backends.cpu.model import load_cpu
from unspool.backends.step import LoadedModel
from unspool.backends.torch.backend import TorchModel
from unspool.model.files.checkpoint import load_transformer, open_checkpoint

TOKENS = 48
FAMILIES = {**tiny.FAMILIES, **tiny.TODAY, **tiny_recurrent.FAMILIES}


def farthest(model: LoadedModel, tokens: list[int], wanted: Any) -> list[float]:
    """The largest difference behind prompts of three lengths, and behind every single token."""
    text = SingleSequence(model, len(tokens))
    prompts, single = [], []
    for length in (len(tokens) // 3, len(tokens) - 1, len(tokens)):
        text.rewind(0)
        prompts.append(np.abs(text.append(tokens[:length]) - wanted[length - 1]).max())
    text.rewind(0)
    for token, expected in zip(tokens, wanted, strict=True):
        single.append(np.abs(text.append([token]) - expected).max())
    return [float(max(prompts)), float(max(single))]


def differences(name: str) -> tuple[float, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        theirs = tiny.save(name, Path(folder))
        checkpoint = open_checkpoint(folder)
        plain = TorchModel(load_transformer(checkpoint))
        models = plain, load_cpu(checkpoint, store="float32", kv_bits=32)
        tokens = np.random.default_rng(1).integers(3, 250, TOKENS).tolist()
        with torch.no_grad():
            wanted = theirs(torch.tensor([tokens])).logits[0].float().numpy()
        found = [each for model in models for each in farthest(model, tokens, wanted)]
    return float(wanted.std()), found


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(
        "| family | logits spread by | torch, at once | one by one | native, at once | one by one |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    for name in sys.argv[1:] or FAMILIES:
        spread, found = differences(name)
        told = " | ".join(f"{each:.0e}" for each in found)
        print(f"| {name} | {spread:.1f} | {told} |", flush=True)


if __name__ == "__main__":
    main()
