"""Reading and writing for the parts: excerpts of texts as tokens, and batches that are counted."""

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
from unspool.train.judging.judge import first_token


def encoded(lm: Session, text: str) -> list[int]:
    """A text's tokens, behind the token with which texts begin where the model has one."""
    lead = first_token(lm)
    return [*([] if lead is None else [lead]), *lm.tokenizer.encode(text)]


def excerpts(lm: Session, texts: Sequence[str], count: int, tokens: int) -> list[list[int]]:
    """So many stretches of so many tokens, no two alike: one of each text, then a second, ...

    They begin where a paragraph does. Fewer are given where the texts hold no more, none is
    shorter, and there is at least one.
    """
    found: list[list[int]] = []
    waiting = [_stretches(lm, text, tokens) for text in texts]
    while waiting and len(found) < count:
        going = []
        for stretches in waiting:
            one = next(stretches, None)
            if one is not None:
                found += [one] if one not in found else []
                going.append(stretches)
        waiting = going
    if not found:
        raise SettingsError(
            f"none of the texts has {tokens} tokens, which this measurement needs; give longer ones"
        )
    return found[:count]


def _stretches(lm: Session, text: str, tokens: int) -> Iterator[list[int]]:
    """One text's, each from the first paragraph behind the one before."""
    start = 0
    while start < len(text):
        # A token is seldom longer than eight characters: more need not be encoded.
        ids = encoded(lm, text[start : start + 8 * tokens + 64])
        if len(ids) < tokens:
            ids = encoded(lm, text[start:])
        if len(ids) < tokens:
            return
        yield ids[:tokens]
        used = start + len(lm.tokenizer.decode(ids[:tokens], specials=False))
        paragraph = text.find("\n\n", used)
        start = len(text) if paragraph < 0 else paragraph + 2


@dataclass(frozen=True)
class Written:
    """Texts that were written as one batch, and what that took.

    computed   tokens that were written, those included that a guard took back.
    seconds    of the whole batch, its prompts included.
    """

    texts: tuple[Generation, ...]
    computed: int
    seconds: float

    @property
    def kept(self) -> int:
        return sum(len(text.steps) for text in self.texts)

    def mean_logprobs(self) -> list[float]:
        """Of each text that has tokens: how likely the model itself finds them, a token."""
        return [mean_logprob(text) for text in self.texts if text.steps]


def write(lm: Session, prompts: Sequence[Sequence[int]], **options: Unpack[Options]) -> Written:
    """A text behind each prompt, all in one batch, every token counted."""
    started = perf_counter()
    # Each its own sample number: with one for all, the same draws would fall in every text.
    samples: list[Options] = [{"sample": number, **options} for number in range(len(prompts))]
    texts = [lm.draft(prompt, **one) for prompt, one in zip(prompts, samples, strict=True)]
    streams: list[StepStream] = []
    computed = 0
    try:
        streams = [lm.engine.submit(text.request) for text in texts]
        for text, stream in zip(texts, streams, strict=True):
            computed += sum(1 for _ in text.extend(stream))
    finally:
        for stream in streams:
            stream.close()
    return Written(tuple(texts), computed, perf_counter() - started)


def distinct(texts: Sequence[Sequence[int]], n: int = 2) -> float:
    """Variety: of all runs of n tokens in all texts, the share that is different (distinct-n)."""
    runs = [tuple(text[at : at + n]) for text in texts for at in range(len(text) - n + 1)]
    return len(set(runs)) / len(runs) if runs else math.nan
