"""Where a gap meets the text beside it: tokens know nothing of such borders.

"The " and "cat" are three tokens alone and two together ("The", " cat"). So candidates are texts, a
whole text is cut into tokens as the model's vocabulary cuts it, and only then is it asked which
tokens the gap has a part in. What a model would write at such a place is found by *healing*: the
last token before the gap is given up, and every token that begins with its bytes may stand there.
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
    """The tokens of a text, behind the one that begins a document: a model guesses no first token,
    and guesses badly what follows a lonely one."""
    return [*start_ids(lm), *lm.tokenizer.encode(text)]


def start_ids(lm: Session) -> Ids:
    """What stands before the first token of a text."""
    tokenizer = lm.tokenizer
    known = [tokenizer.special_tokens.get(text) for text in _STARTS]
    if tokenizer.add_bos:
        known = []
    for token in (*known, tokenizer.bos_id, tokenizer.eos_id):
        if token is not None:
            return [token]
    return []


def token_ends(lm: Session, ids: Sequence[int], text: str) -> list[int]:
    """Where each token ends, in bytes of the text that they are cut from."""
    pieces = [lm.engine.token_bytes(token) for token in ids]
    added = sum(map(len, pieces)) - len(text.encode())
    ends, at = list[int](), 0
    for piece in pieces:
        if added == 1 and at == 0 and piece.startswith(b" "):  # which encoding put there
            at, added = -1, 0
        at += len(piece)
        ends.append(at)
    return ends


def tokens_within(ends: Sequence[int], start: int, end: int) -> range:
    """The tokens that have a part in the bytes from `start` to `end`."""
    first = next((n for n, at in enumerate(ends) if at > start), len(ends))
    if end <= start:
        return range(first, first)
    return range(first, next((n + 1 for n, at in enumerate(ends) if at >= end), len(ends)))


@lru_cache(maxsize=4)
def _table(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every token; a control token has none that a text could hold."""
    control = tokenizer.special_ids
    return [b"" if n in control else tokenizer.token_bytes(n) for n in range(tokenizer.vocab_size)]


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a text might go on behind its last token, or with another in the place of that one."""

    token: int
    adds: bytes  # to the text
    logprob: float  # given the tokens before the last one
    instead: bool  # of the last token: this one begins with the bytes of that one


def beginnings(
    lm: Session, last: int, before: Floats | None, behind: Floats, count: int
) -> list[Beginning]:
    """The likeliest ways to go on, healed. `before` and `behind` are the log-probabilities of what
    follows the tokens before the last one (None: there are none), and of what follows it."""
    table = _table(lm.tokenizer)
    text = table[last] if last < len(table) else b""
    found = list[Beginning]()
    given = 0.0  # of the last token itself, where another might stand in its place
    if text and before is not None:
        given = float(before[last])
        longer = [
            n for n, piece in enumerate(table) if len(piece) > len(text) and piece.startswith(text)
        ]
        for place in _largest(before[longer], count):
            token = longer[place]
            adds = table[token][len(text) :]
            found.append(Beginning(token, adds, float(before[token]), instead=True))
    found += [
        Beginning(token, table[token], given + float(behind[token]), instead=False)
        for token in _largest(behind[: len(table)], count)
        if table[token]
    ]
    return sorted(found, key=lambda each: -each.logprob)[:count]


def _largest(row: Floats, count: int) -> list[int]:
    best = np.argsort(-row, kind="stable")[:count]
    return [int(place) for place in best]


def first_token(lm: Session, text: str) -> int | None:
    """The token that a text begins with where it continues another."""
    ids: list[int] = []
    if lm.tokenizer.missing_character(",") is None:
        ids = lm.tokenizer.encode("," + text)
    if len(ids) > 1 and lm.tokenizer.decode_bytes(ids[:1]).strip() == b",":
        return ids[1]
    alone = lm.tokenizer.encode(text)
    return alone[0] if alone else None


def beginning_of(lm: Session, text: str, count: int | None) -> str:
    """As much of a text as so many tokens hold, whole characters only; None: all of it."""
    if count is None or len(text) <= count:
        return text
    ids = lm.tokenizer.encode(text)
    kept = len(lm.tokenizer.decode_bytes(ids[:count]))
    return text.encode()[:kept].decode("utf-8", "ignore")
