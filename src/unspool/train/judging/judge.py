"""How well a model knows a text it has not seen: bits per byte.

Perplexity depends on how the vocabulary cuts text; the bits that a byte costs do not, so models
with different vocabularies compare. A text longer than the context is read in windows that
overlap: each token is judged once, with at least half a context before it (save at the start).

    found = bits_per_byte(lm, ["a text", "another"])
    found.bits_per_byte, found.tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unspool.decoding.progress import progress_bar
from unspool.errors import SettingsError
from unspool.session import Session
from unspool.train.judging.likelihood import Pair, likelihoods


@dataclass(frozen=True, slots=True)
class BitsPerByte:
    """What texts cost: `nats` of log-probability for so many bytes and tokens."""

    nats: float
    bytes: int
    tokens: int
    documents: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def loss(self) -> float:
        """Nats a token, as training logs it."""
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
    """What texts cost, each judged by itself behind the token with which texts begin.

    context   the most tokens that are seen at once; by default the model's.
    stride    tokens judged in each window behind the first; by default half the context.
    """
    width = min(context or lm.context, lm.context)
    stride = stride if stride is not None else max(1, width // 2)
    if not 1 <= stride <= width:
        raise SettingsError(f"the stride is {stride}; it may be 1 to {width}, the context")
    lead = first_token(lm)
    pairs: list[Pair] = []
    size = documents = 0
    for text in texts:
        if not text:
            continue
        ids = lm.tokenizer.encode(text)
        size += len(text.encode())
        if lead is None:  # there is nothing to judge the first token by
            size -= len(lm.tokenizer.decode_bytes(ids[:1]))
        pairs += windows(ids if lead is None else [lead, *ids], width, stride)
        documents += 1
    if not pairs:
        raise SettingsError("there is no text to judge: the data holds none, or single tokens only")
    with progress_bar("judging", len(pairs), show=progress) as told:
        found = likelihoods(lm, pairs, told)
    tokens = sum(len(one.logprobs) for one in found)
    return BitsPerByte(-sum(one.total for one in found), size, tokens, documents)


def first_token(lm: Session) -> int | None:
    """What stands before a text: the vocabulary's start token, or else the end of the text before,
    as texts follow each other in training."""
    tokenizer = lm.tokenizer
    if tokenizer.bos_id is not None and (tokenizer.add_bos or tokenizer.eos_id is None):
        return tokenizer.bos_id
    return tokenizer.eos_id


def windows(ids: Sequence[int], width: int, stride: int) -> list[Pair]:
    """Context and targets of each window; every token but the first is a target once.

    The first window judges all it holds, the others `stride` tokens behind what they repeat.
    """
    found: list[Pair] = []
    done = 1
    while done < len(ids):
        end = min(len(ids), done + (width if done == 1 else stride))
        start = max(0, end - 1 - width)  # the last target is not read
        found.append((ids[start:done], ids[done:end]))
        done = end
    return found
