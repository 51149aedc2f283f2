"""Token boundaries at the edges of a gap.

"The " and "cat" are three tokens alone and two together ("The", " cat"). So candidates are texts,
the whole text is tokenized, and then the tokens that overlap the gap are found. Continuations at
such an edge use *token healing*: the last token before the gap is dropped, and every token that
starts with its bytes may replace it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from unspool.sampling.scoring import Floats
from unspool.session import Session
from unspool.text.tokenizer.tokenizer import Tokenizer

Ids = list[int]
_STARTS = ("<|endoftext|>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>")


def text_ids(lm: Session, text: str) -> Ids:
    """Tokenize a text after the token that starts a document, so that its first token is predicted
    too."""
    return [*start_ids(lm), *lm.tokenizer.encode(text)]


def start_ids(lm: Session) -> Ids:
    """The token that starts a document, if the vocabulary has one."""
    tokenizer = lm.tokenizer
    candidates = [tokenizer.special_tokens.get(text) for text in _STARTS]
    if tokenizer.add_bos:
        candidates = []
    for token in (*candidates, tokenizer.bos_id, tokenizer.eos_id):
        if token is not None:
            return [token]
    return []


def token_ends(lm: Session, ids: Sequence[int], text: str) -> list[int]:
    """Byte offset in the text at which each token ends."""
    pieces = [lm.engine.token_bytes(token) for token in ids]
    added = sum(map(len, pieces)) - len(text.encode())
    ends, at = list[int](), 0
    for piece in pieces:
        if added == 1 and at == 0 and piece.startswith(b" "):  # added by the tokenizer
            at, added = -1, 0
        at += len(piece)
        ends.append(at)
    return ends


def tokens_within(ends: Sequence[int], start: int, end: int) -> range:
    """Range of tokens that overlap the bytes from `start` to `end`."""
    first = next((n for n, at in enumerate(ends) if at > start), len(ends))
    if end <= start:
        return range(first, first)
    return range(first, next((n + 1 for n, at in enumerate(ends) if at >= end), len(ends)))


@lru_cache(maxsize=4)
def _token_table(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes of every token; empty for control tokens."""
    control = tokenizer.special_ids
    return [b"" if n in control else tokenizer.token_bytes(n) for n in range(tokenizer.vocab_size)]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A possible next token of a text, or a longer replacement of its last token."""

    token: int
    adds: bytes  # added to the text
    logprob: float  # given the tokens before the last one
    instead: bool  # replaces the last token, which it starts with


def continuations(
    lm: Session, last: int, before: Floats | None, after: Floats, count: int
) -> list[Continuation]:
    """The likeliest continuations, with token healing. `before` and `after` are the
    log-probabilities of the token after all tokens but the last (None: there are none), and after
    the last."""
    table = _token_table(lm.tokenizer)
    text = table[last] if last < len(table) else b""
    result = list[Continuation]()
    last_logprob = 0.0  # of the last token, if it could be replaced
    if text and before is not None:
        last_logprob = float(before[last])
        longer = [
            n for n, piece in enumerate(table) if len(piece) > len(text) and piece.startswith(text)
        ]
        for place in _top_indices(before[longer], count):
            token = longer[place]
            adds = table[token][len(text) :]
            result.append(Continuation(token, adds, float(before[token]), instead=True))
    result += [
        Continuation(token, table[token], last_logprob + float(after[token]), instead=False)
        for token in _top_indices(after[: len(table)], count)
        if table[token]
    ]
    return sorted(result, key=lambda entry: -entry.logprob)[:count]


def _top_indices(row: Floats, count: int) -> list[int]:
    best = np.argsort(-row, kind="stable")[:count]
    return [int(place) for place in best]


def first_token(lm: Session, text: str) -> int | None:
    """First token of a text that continues another text."""
    ids: list[int] = []
    if lm.tokenizer.missing_character(",") is None:
        ids = lm.tokenizer.encode("," + text)
    if len(ids) > 1 and lm.tokenizer.decode_bytes(ids[:1]).strip() == b",":
        return ids[1]
    alone = lm.tokenizer.encode(text)
    return alone[0] if alone else None


def truncate_text(lm: Session, text: str, count: int | None) -> str:
    """The first `count` tokens of a text, whole characters only; None: all of it."""
    if count is None or len(text) <= count:
        return text
    ids = lm.tokenizer.encode(text)
    num_bytes = len(lm.tokenizer.decode_bytes(ids[:count]))
    return text.encode()[:num_bytes].decode("utf-8", "ignore")
