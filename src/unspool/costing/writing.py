"""Excerpts of texts as tokens, and measured batch generation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Unpack

from unspool.decoding.written import mean_logprob
from unspool.engine.generation import Generation
from unspool.engine.options import Options
from unspool.engine.stream import StepStream
from unspool.errors import SettingsError
from unspool.session import Session
from unspool.train.judging.judge import leading_token


def encode_with_start(lm: Session, text: str) -> list[int]:
    """Return a text's tokens, after the model's start token if it has one."""
    lead = leading_token(lm)
    return [*([] if lead is None else [lead]), *lm.tokenizer.encode(text)]


def excerpts(lm: Session, texts: Sequence[str], count: int, tokens: int) -> list[list[int]]:
    """Return up to `count` different excerpts of `tokens` tokens, at least one.

    One of each text, then a second one of each, and so on. They begin at paragraphs.
    """
    results: list[list[int]] = []
    waiting = [_excerpts_of(lm, text, tokens) for text in texts]
    while waiting and len(results) < count:
        remaining = []
        for stretches in waiting:
            excerpt = next(stretches, None)
            if excerpt is not None:
                results += [excerpt] if excerpt not in results else []
                remaining.append(stretches)
        waiting = remaining
    if not results:
        raise SettingsError(
            f"no text has {tokens} tokens, which this measurement needs; give longer texts"
        )
    return results[:count]


def _excerpts_of(lm: Session, text: str, tokens: int) -> Iterator[list[int]]:
    """Yield excerpts of one text, each from the first paragraph after the previous one."""
    start = 0
    while start < len(text):
        # Tokens are rarely longer than eight characters, so this prefix is usually enough.
        ids = encode_with_start(lm, text[start : start + 8 * tokens + 64])
        if len(ids) < tokens:
            ids = encode_with_start(lm, text[start:])
        if len(ids) < tokens:
            return
        yield ids[:tokens]
        used = start + len(lm.tokenizer.decode(ids[:tokens], specials=False))
        paragraph = text.find("\n\n", used)
        start = len(text) if paragraph < 0 else paragraph + 2


@dataclass(frozen=True)
class GeneratedBatch:
    """Texts generated as one batch.

    Attributes:
        texts: The texts.
        computed: Generated tokens, including those that a guard removed.
        seconds: Of the batch, including prefill.
    """

    texts: tuple[Generation, ...]
    computed: int
    seconds: float

    @property
    def num_kept(self) -> int:
        return sum(len(text.steps) for text in self.texts)

    def mean_logprobs(self) -> list[float]:
        """Return the mean logprob per token of each text that has tokens."""
        return [mean_logprob(text) for text in self.texts if text.steps]


def generate_batch(
    lm: Session, prompts: Sequence[Sequence[int]], **options: Unpack[Options]
) -> GeneratedBatch:
    """Generate a text after each prompt, all in one batch."""
    started = perf_counter()
    # Different sample numbers: otherwise all texts would use the same random draws.
    samples: list[Options] = [{"sample": number, **options} for number in range(len(prompts))]
    texts = [
        lm.prepare_generation(prompt, **sample_options)
        for prompt, sample_options in zip(prompts, samples, strict=True)
    ]
    streams: list[StepStream] = []
    computed = 0
    try:
        streams = [lm.engine.submit(text.request) for text in texts]
        for text, stream in zip(texts, streams, strict=True):
            computed += sum(1 for _ in text.extend(stream))
    finally:
        for stream in streams:
            stream.close()
    return GeneratedBatch(tuple(texts), computed, perf_counter() - started)


def distinct_n(texts: Sequence[Sequence[int]], n: int = 2) -> float:
    """Return distinct-n: the share of different n-grams of tokens in all texts."""
    runs = [tuple(text[at : at + n]) for text in texts for at in range(len(text) - n + 1)]
    return len(set(runs)) / len(runs) if runs else math.nan
