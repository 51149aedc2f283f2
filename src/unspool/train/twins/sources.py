"""What a twin of a text model learns from: texts that the model wrote itself, and others.

A tenth of the texts of its own, but no more than 160, is held out, and what the other sources hold
out; the twin is judged by those, in the same shares.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unspool.errors import DataError
from unspool.loading import load, open_tokenizer
from unspool.model.checkpoint import Checkpoint, load_transformer, open_checkpoint
from unspool.model.hub import find_model
from unspool.model.transformer import Transformer
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.shards import Packed, prepare
from unspool.train.learning.objectives import Objective
from unspool.train.running.held_out import on_device
from unspool.train.twins.mixture import Mixture
from unspool.train.twins.settings import TwinSettings
from unspool.train.twins.written import WritingSettings, written_texts

_JUDGED = 4  # batches
_BEGINNING = 16  # tokens of a text that a model without a chat template goes on with

Sources = dict[str, tuple[Packed, float]]


@dataclass(frozen=True)
class Causal:
    """The model that gets a twin."""

    path: Path
    base: str  # what an adapter calls it
    checkpoint: Checkpoint
    tokenizer: Tokenizer

    @classmethod
    def found(cls, name: str | None) -> Causal:
        path = find_model(name, progress=False)
        checkpoint = open_checkpoint(path)
        tokenizer = open_tokenizer(checkpoint)
        if tokenizer is None:
            raise DataError(f"{path}: has no vocabulary, so it cannot read text")
        if checkpoint.config.sight != "causal":
            raise DataError(f"{path}: does not write from left to right, so it cannot get a twin")
        checkpoint.config.check_head()
        base = name if name and not Path(name).exists() else str(path.resolve())
        return cls(path, base, checkpoint, tokenizer)

    def frozen(self, device: torch.device) -> Transformer:
        """The model itself; frozen weights need no more than 16 bits where those are quick."""
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        return load_transformer(self.checkpoint, dtype=dtype, device=str(device))


def learned_from(
    causal: Causal, settings: TwinSettings, device: torch.device, tell: Callable[[int], object]
) -> tuple[Sources, Sources, dict[str, Any]]:
    """The sources to train on, those to judge by, and what to tell of them."""
    train: Sources = {}
    held_out: Sources = {}
    told: dict[str, Any] = {}
    alike = (1 - settings.chat_share * bool(settings.chat)) / max(1, len(settings.data))
    for name, share in zip(
        settings.data, settings.shares or [alike] * len(settings.data), strict=True
    ):
        prepared = prepare(name, causal.tokenizer, seed=settings.seed)
        train[name] = prepared.train, share
        held_out[name] = prepared.held_out, share
        told[name] = {"tokens": len(prepared.train.ids), "share": share}
    if settings.chat and settings.chat_share:
        texts = _written(causal, settings, device, _beginnings(train), tell)
        own, apart = _split(texts)
        train["written"] = own, settings.chat_share
        held_out["written"] = apart, settings.chat_share
        told["written"] = {
            "texts": texts.documents, "tokens": len(own.ids), "share": settings.chat_share
        }  # fmt: skip
    return train, held_out, {"source": list(told), "kind": "twin", "sources": told}


def _written(
    causal: Causal, settings: TwinSettings, device: torch.device, beginnings: list[list[int]],
    tell: Callable[[int], object],
) -> Packed:  # fmt: skip
    wanted = WritingSettings(
        texts=settings.chat, max_tokens=settings.chat_tokens, seed=settings.seed,
        questions=_questions(settings.questions),
    )  # fmt: skip
    seconds = None if settings.writing_minutes is None else settings.writing_minutes * 60
    texts = written_texts(
        causal.path, causal.checkpoint.config, wanted,
        lambda: load(causal.path, device=str(device), progress=False),
        beginnings=beginnings, seconds=seconds, tell=tell,
    )  # fmt: skip
    if device.type == "cuda":  # what the engine had is needed for training
        gc.collect()
        torch.cuda.empty_cache()
    return texts


def _questions(file: str | None) -> tuple[str, ...]:
    if file is None:
        return ()
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error})") from None
    return tuple(line.strip() for line in lines if line.strip())


def _beginnings(sources: Sources) -> list[list[int]]:
    return [
        packed.ids[begin : begin + _BEGINNING].tolist()
        for packed, _ in sources.values()
        for begin, end in zip(packed.borders[:-1], packed.borders[1:], strict=True)
        if end - begin > _BEGINNING
    ][:4096]


def _split(texts: Packed) -> tuple[Packed, Packed]:
    """All but the first texts (a tenth, but not many), and those: with more texts later they are
    the same."""
    assert texts.counted is not None
    apart = max(1, min(160, texts.documents // 10))
    border = int(texts.borders[apart])
    first = Packed(texts.ids[:border], texts.borders[: apart + 1], texts.counted[:border])
    rest = Packed(texts.ids[border:], texts.borders[apart:] - border, texts.counted[border:])
    return rest, first


def judged_by(
    held_out: Sources, settings: TwinSettings, rows: int, length: int, objective: Objective
) -> Any:
    """The twin's loss on what was held out; None if that is less than a row."""
    filled = {
        name: (packed, share)
        for name, (packed, share) in held_out.items()
        if packed.counted is not None or len(packed.ids) > length
    }
    if not filled:
        return None
    batches = Mixture(filled, rows, length, settings.seed)

    def judge(model: Any) -> tuple[float, float | None]:
        device = next(model.parameters()).device
        total = count = 0.0
        for number in range(_JUDGED):
            rng = torch.Generator().manual_seed(number)
            loss = objective(model, on_device(batches.batch(number), device), rng)
            total += float(loss.total) * float(loss.tokens)
            count += float(loss.tokens)
        return total / max(1.0, count), None

    return judge


def most_of(texts: Packed) -> np.ndarray[Any, Any]:
    """The tokens that count, or all of them."""
    ids: np.ndarray[Any, Any] = texts.ids if texts.counted is None else texts.ids[texts.counted]
    return ids
