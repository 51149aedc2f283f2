"""Bits per byte of a model on held-out text.

Perplexity depends on the tokenizer; bits per byte do not, so models with different vocabularies can
be compared. A text longer than the context is read in overlapping windows: each token is scored
once, with at least half a context before it (except at the start).

    result = bits_per_byte(lm, ["a text", "another"])
    result.bits_per_byte, result.tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unspool.decoding.progress import progress_bar
from unspool.errors import SettingsError
from unspool.session import Session
from unspool.train.judging.likelihood import Pair, score_continuations


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """Negative log-likelihood of texts, in nats, and their size."""

    nats: float
    bytes: int
    tokens: int
    documents: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def loss(self) -> float:
        """Nats per token, as in the training log."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens

    def to_dict(self) -> dict[str, float]:
        return {
            "bits_per_byte": self.bits_per_byte, "loss": self.loss, "perplexity": self.perplexity,
            "bytes": self.bytes, "tokens": self.tokens, "documents": self.documents,
        }  # fmt: skip


def bits_per_byte(
    lm: Session,
    texts: Iterable[str],
    *,
    context: int | None = None,
    stride: int | None = None,
    progress: bool = True,
) -> BitsPerByte:
    """Score texts, each on its own after the token that starts a text.

    Args:
        context: Window size in tokens; by default the model's context.
        stride: Tokens scored in each window after the first; by default half the context.
    """
    width = min(context or lm.context, lm.context)
    stride = stride if stride is not None else max(1, width // 2)
    if not 1 <= stride <= width:
        raise SettingsError(f"stride must be from 1 to {width} (the context), got {stride}")
    lead = leading_token(lm)
    pairs: list[Pair] = []
    size = documents = 0
    for text in texts:
        if not text:
            continue
        ids = lm.tokenizer.encode(text)
        size += len(text.encode())
        if lead is None:  # the first token has no context and is not scored
            size -= len(lm.tokenizer.decode_bytes(ids[:1]))
        pairs += windows(ids if lead is None else [lead, *ids], width, stride)
        documents += 1
    if not pairs:
        raise SettingsError("there is no text to evaluate: the data is empty")
    with progress_bar("evaluating", len(pairs), show=progress) as on_progress:
        results = score_continuations(lm, pairs, on_progress)
    tokens = sum(len(result.logprobs) for result in results)
    return BitsPerByte(-sum(result.total for result in results), size, tokens, documents)


def leading_token(lm: Session) -> int | None:
    """The token before a text: BOS, or else EOS, because texts follow each other in training."""
    tokenizer = lm.tokenizer
    if tokenizer.bos_id is not None and (tokenizer.add_bos or tokenizer.eos_id is None):
        return tokenizer.bos_id
    return tokenizer.eos_id


def windows(ids: Sequence[int], width: int, stride: int) -> list[Pair]:
    """(context, targets) of each window; every token but the first is a target once.

    The first window scores all its tokens, the others `stride` tokens after the overlap.
    """
    pairs: list[Pair] = []
    done = 1
    while done < len(ids):
        end = min(len(ids), done + (width if done == 1 else stride))
        start = max(0, end - 1 - width)  # the last target is not an input
        pairs.append((ids[start:done], ids[done:end]))
        done = end
    return pairs
