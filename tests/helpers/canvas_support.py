"""For the tests of canvases: tiny random models that see ahead, and what transformers says of them.

The oracle knows nothing of caches: it reads the whole text, with a mask of four dimensions that
says who sees whom.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unspool
from helpers import tiny

MASK = 258
VOCAB = 259


def seeing(folder: Path, *, backend: str = "torch", memory: int = 8 << 20, **config: Any) -> Any:
    """The tiny model, loaded as one that sees as `config` says."""
    if not (folder / "config.json").exists():
        oracle().save_pretrained(folder)
    lm = unspool.load(folder, backend=backend, memory=memory)
    for name, value in {"mask_id": MASK, **config}.items():
        object.__setattr__(lm.config, name, value)
    return lm


@cache
def oracle() -> Any:
    return tiny.make("llama")


def with_vocabulary(folder: Path, **config: Any) -> Any:
    """The same model with a vocabulary: 256 bytes, and three control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|begin|>", "<|end|>", "<|mask|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    lm = seeing(folder, **config)
    lm.end_ids = frozenset([257])
    return lm


def ends(length: int, sight: str, block: int, canvas: int | None = None) -> Any:
    """How far each token sees. A canvas behind causal text begins at position `canvas`."""
    positions = np.arange(length)
    if sight == "whole":
        return np.full(length, length)
    if sight == "block":
        return np.minimum((positions // block + 1) * block, length)
    return np.where(positions >= (length if canvas is None else canvas), length, positions + 1)


@torch.inference_mode()
def all_logits(tokens: list[int], sees: Any) -> Any:
    """What the oracle says at every position, [tokens, vocabulary] in 64 bits."""
    length = len(tokens)
    hidden = np.arange(length)[None, :] >= np.asarray(sees)[:, None]
    mask = torch.zeros(1, 1, length, length).masked_fill(torch.from_numpy(hidden), -1e30)
    logits = oracle()(torch.tensor([tokens]), attention_mask=mask).logits[0].double()
    logits[:, MASK] = -torch.inf
    return logits
