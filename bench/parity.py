"""How close every family is to transformers: python bench/parity.py [FAMILY ...]

Tiny models with random weights, those of the tests. For each: the largest difference of any logit
after prompts of up to 48 tokens, in plain torch and with the native kernels (weights and keys in 32
bits), in one pass and token by token; and the standard deviation of the logits. Prints a table for
the documentation. Needs the packages of the tests.
"""

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
from lib.arguments import make_parser, one_of
from unspool.backends.cpu.model import load_cpu
from unspool.backends.step import LoadedModel
from unspool.backends.torch.backend import TorchModel
from unspool.model.files.checkpoint import load_transformer, open_checkpoint

TOKENS = 48
FAMILIES = {**tiny.FAMILIES, **tiny.TODAY, **tiny_recurrent.FAMILIES}


def max_differences(model: LoadedModel, tokens: list[int], expected: Any) -> list[float]:
    """Largest difference after prompts of three lengths, and after every single token."""
    text = SingleSequence(model, len(tokens))
    prompts, single = [], []
    for length in (len(tokens) // 3, len(tokens) - 1, len(tokens)):
        text.rewind(0)
        prompts.append(np.abs(text.append(tokens[:length]) - expected[length - 1]).max())
    text.rewind(0)
    for token, row in zip(tokens, expected, strict=True):
        single.append(np.abs(text.append([token]) - row).max())
    return [float(max(prompts)), float(max(single))]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("families", nargs="*", type=one_of(FAMILIES), metavar="FAMILY")
    names = parser.parse_args().families
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("| family | std of logits | torch, one pass | by token | native, one pass | by token |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            peer = tiny.save(name, Path(folder))
            checkpoint = open_checkpoint(folder)
            plain = TorchModel(load_transformer(checkpoint))
            models = plain, load_cpu(checkpoint, store="float32", kv_bits=32)
            tokens = np.random.default_rng(1).integers(3, 250, TOKENS).tolist()
            with torch.no_grad():
                expected = peer(torch.tensor([tokens])).logits[0].float().numpy()
            values = [v for model in models for v in max_differences(model, tokens, expected)]
        cells = " | ".join(f"{value:.0e}" for value in values)
        print(f"| {name} | {expected.std():.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
