"""Texts to measure on: human-written samples, their likelihood, and generated batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from unspool.backends.step import Logits
from unspool.decoding.branches import mean_logprob
from unspool.engine.generation import Generation
from unspool.engine.request import Options
from unspool.engine.results import StepStream
from unspool.errors import SettingsError, UnspoolError, UnspoolWarning
from unspool.sampling import score
from unspool.session import Session
from unspool.train.evaluation.bits_per_byte import leading_token

# -- Human-written texts to measure on: the user's, or State of the Union addresses
#
# The addresses are the default training data (downloaded once); if they are not available, a few
# pages in this package are used.

_SAMPLE_FILE = Path(__file__).parent / "sample.txt"
_SEPARATOR = "\n\n* * *\n\n"  # between texts in the file
_FIRST = 100  # index of the first address to use: from about 1890 on, in modern language
_COUNT = 48
_MIN_CHARS = 2000  # of a text: parts take long excerpts from single texts


@dataclass(frozen=True)
class SampleTexts:
    """Texts with a description of their source."""

    texts: tuple[str, ...]
    source: str


def sample_texts(source: Sequence[str] | str | Path | None = None) -> SampleTexts:
    """Return the given texts, those of a source (file, folder, as for training), or the default."""
    if source is None:
        return _addresses()
    if isinstance(source, str | Path):
        from unspool.train.evaluation.bits_per_byte import source_texts

        return _checked(list(source_texts([str(source)], limit=_COUNT)), str(source))
    return _checked(list(source), f"{len(source)} texts of the caller")


def _checked(texts: list[str], source: str) -> SampleTexts:
    long = tuple(text for text in texts if len(text) >= _MIN_CHARS)
    if not long:
        raise SettingsError(
            f"{source}: no text has {_MIN_CHARS:,} characters or more; give longer texts"
        )
    return SampleTexts(long, source)


def _addresses() -> SampleTexts:
    from unspool.train.data.sources import DEFAULT_SOURCE
    from unspool.train.evaluation.bits_per_byte import source_texts

    try:
        every = list(source_texts([DEFAULT_SOURCE]))[_FIRST:]
    except (UnspoolError, OSError) as error:
        warnings.warn(
            f"measuring on a short sample text instead of the default texts: {error}",
            UnspoolWarning,
            stacklevel=2,
        )
        return packaged_sample()
    step = max(1, len(every) // _COUNT)
    return _checked(every[::step][:_COUNT], "State of the Union addresses, 1890 to today")


def packaged_sample() -> SampleTexts:
    """Return the pages in this package."""
    texts = _SAMPLE_FILE.read_text(encoding="utf-8").split(_SEPARATOR)
    return _checked(texts, "a few pages of State of the Union addresses")


_BATCH = 8  # texts per batch


def last_logits(
    lm: Session,
    texts: Sequence[Sequence[int]],
    last: int,
    tell: Callable[[float], object] = lambda share: None,
) -> Iterator[Logits]:
    """Yield, for each text, the logits that predict its last `last` tokens."""
    for start in range(0, len(texts), _BATCH):
        group = texts[start : start + _BATCH]
        with ExitStack() as stack:
            branches = [stack.enter_context(lm.open_branch(text[:-1])) for text in group]
            logits = lm.engine.extend_all([(branch, ()) for branch in branches], num_logits=last)
        yield from logits
        tell(min(1.0, (start + len(group)) / len(texts)))


def token_nlls(
    lm: Session,
    texts: Sequence[Sequence[int]],
    last: int,
    tell: Callable[[float], object] = lambda share: None,
) -> NDArray[np.float64]:
    """Return the negative log-likelihood in nats of the last tokens: [texts, last]."""
    rows = zip(texts, last_logits(lm, texts, last, tell), strict=True)
    return np.array([nll(logits, text[-last:]) for text, logits in rows])


def nll(logits: Logits, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return the negative log-likelihood of each token, in nats."""
    return np.array([-float(value) for value in score(logits, tokens).logprobs])


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
