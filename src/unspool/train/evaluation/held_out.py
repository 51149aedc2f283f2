"""Evaluate on held-out text during training: loss and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unspool.backends.torch.backend import TorchModel
from unspool.errors import DataError
from unspool.lm import LanguageModel
from unspool.model.layers.transformer import Transformer
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.batches import PackedBatches, TrainingBatch
from unspool.train.data.prepared import PackedDocuments
from unspool.train.learning.objectives import Objective


class HeldOutEvaluation:
    """Evaluates an objective on the first rows of the held-out text, always the same ones."""

    def __init__(
        self,
        packed: PackedDocuments,
        tokenizer: Tokenizer,
        objective: Objective,
        length: int,
        rows: int,
    ) -> None:
        self.objective = objective
        self.batches: list[TrainingBatch] = []
        try:
            source = PackedBatches(packed, 4, length)
        except DataError:  # the held-out text is shorter than one row
            return
        self.batches = [source.batch(n) for n in range(-(-min(rows, source.rows) // 4))]
        lengths = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
        specials = list(tokenizer.special_ids)
        sizes = np.array(lengths)
        sizes[specials] = 0  # special tokens are not text
        self.bytes = sum(_bytes(batch, sizes) for batch in self.batches)

    def __call__(self, model: Transformer) -> tuple[float, float | None]:
        """Loss in nats per token, and bits per byte."""
        nats = tokens = 0.0
        device = model.embed.weight.device
        for number, batch in enumerate(self.batches):
            rng = torch.Generator().manual_seed(number)
            loss = self.objective(model, on_device(batch, device), rng)
            nats += float(loss.mean) * float(loss.tokens)
            tokens += float(loss.tokens)
        return nats / max(1.0, tokens), nats / math.log(2) / max(1, self.bytes)


def _bytes(batch: TrainingBatch, sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    token_bytes = sizes[batch.targets.numpy()]
    mask = batch.loss_mask
    return int((token_bytes if mask is None else token_bytes * mask.numpy()).sum())


def on_device(batch: TrainingBatch, device: torch.device) -> TrainingBatch:
    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return TrainingBatch(batch.ids.to(device), move(batch.loss_mask), move(batch.document_ids))


_KV_CACHE_BYTES = 256 << 20  # enough for a few hundred tokens


class SampleGenerator:
    """Generates from the same prompts and seeds at every step, so that only the model differs."""

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[str], length: int = 80) -> None:
        self.tokenizer, self.prompts, self.length = tokenizer, prompts, length

    def __call__(self, model: Transformer) -> list[tuple[str, int, str]]:
        """(prompt, seed, text) of each sample."""
        lm = LanguageModel(TorchModel(model), self.tokenizer, memory=_KV_CACHE_BYTES)
        try:
            return [
                (prompt, seed, self._generate(lm, prompt, seed))
                for seed, prompt in enumerate(self.prompts)
            ]
        finally:
            lm.close()

    def _generate(self, lm: LanguageModel, prompt: str, seed: int) -> str:
        room = lm.context - len(self.tokenizer.encode_prompt(prompt)) - 1
        max_tokens = max(1, min(self.length, room))
        result = lm.generate(prompt, max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=seed)
        return result.text


def first_words(packed: PackedDocuments, tokenizer: Tokenizer, tokens: int = 8) -> str:
    """The first words of a held-out document, as a prompt in the style of the text."""
    for begin, end in zip(packed.offsets[:-1].tolist(), packed.offsets[1:].tolist(), strict=True):
        ids = packed.ids[begin : min(end, begin + tokens)].tolist()
        line = (tokenizer.decode(ids, specials=False).strip().splitlines() or [""])[0]
        words, _, _ = line.rpartition(" ")  # the last word may be incomplete
        if words and "�" not in words:
            return words
    return "The"
