"""Which tokens of a text are doubtful: how surprising each is, in nats, given what is around it.

A causal model is surprised by a token, and, where that was wrong, by the one that follows it. A
masked model sees both sides of a place that is hidden from it. Together: the mean of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.decoding.fill.borders import start_ids, text_ids, token_ends
from unspool.decoding.fill.masked import MaskedModel, framed, text_logprobs
from unspool.engine.steps import Score
from unspool.errors import SettingsError
from unspool.sampling.scoring import Floats
from unspool.session import Session

WAYS = ("auto", "causal", "masked", "both")
_NEXT = 3.0  # how much the next token's surprise tells (see bench/fill.py: planted errors)
_STRIDE = 8  # every so manieth token is hidden at once


@dataclass(frozen=True, slots=True)
class Doubt:
    """A token of a text, and how doubtful it is."""

    token: int
    text: str
    start: int  # in characters
    end: int
    surprise: float  # nats; 0 and below: certain


def doubts(
    lm: Session, text: str, *, by: str = "auto", twin: MaskedModel | None = None
) -> tuple[list[Doubt], Score]:
    """How doubtful each token is, and the text as the causal model scores it."""
    if by not in WAYS:
        raise SettingsError(f"doubt is {by!r}; it may be {', '.join(WAYS)}")
    if twin is None and by in ("masked", "both"):
        raise SettingsError(f"doubt={by!r} asks a masked model; name one: twin=")
    ids = text_ids(lm, text)
    score = document_score(lm, text)
    spans = _spans(lm, ids, text)
    found = causal_surprise(score, len(ids))
    if twin is not None and by != "causal":
        masked = _at(spans, *masked_surprise(twin, text))
        found = masked if by == "masked" else (found + masked) / 2
    told = [
        Doubt(token, text[start:end], start, end, float(level))
        for token, (start, end), level in zip(ids, spans, found, strict=True)
    ]
    return [doubt for doubt in told if doubt.end > doubt.start], score


def document_score(lm: Session, text: str) -> Score:
    """A text as the model judges it, read as a document of its own: its first token is judged
    too."""
    before = len(start_ids(lm))
    return Score(lm.score(text_ids(lm, text)).positions[before:])


def causal_surprise(score: Score, count: int) -> Floats:
    """Of each token: its own surprise, and how much more than expected the next one was.

    A wrong token that the model itself might have written is no surprise; but what follows is.
    """
    known = [p for p in score.positions if p.logprob is not None]
    own = np.array([-(p.logprob or 0.0) for p in known])
    excess = own - np.array([p.entropy or 0.0 for p in known])
    following = np.append(excess[1:], 0.0)[: len(own)]
    return np.concatenate([np.zeros(count - len(own)), own + _NEXT * following])


def masked_surprise(model: MaskedModel, text: str) -> tuple[list[tuple[int, int]], Floats]:
    """Of each token of the masked model's own: where it stands, and its surprise when hidden."""
    encoded: Any = model.tokenizer.encoder.plain.encode(text, add_special_tokens=False)
    ids: list[int] = encoded.ids
    row, before = framed(model.tokenizer, ids)
    found = np.zeros(len(ids))
    for first in range(min(_STRIDE, len(ids))):
        places = list(range(first, len(ids), _STRIDE))
        hidden = list(row)
        for place in places:
            hidden[place + before] = model.mask_id
        own = text_logprobs(model, hidden, [place + before for place in places])
        found[places] = [-own[n, ids[place]] for n, place in enumerate(places)]
    return list(encoded.offsets), found


def _spans(lm: Session, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """Where each token stands, in characters; one of several tokens stands at the last of them."""
    whole = [0]  # characters that end by each byte
    for at, character in enumerate(text):
        whole += [at] * (len(character.encode()) - 1) + [at + 1]
    ends = [whole[min(max(0, end), len(whole) - 1)] for end in token_ends(lm, ids, text)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _at(
    spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]], values: Floats
) -> Floats:
    """What another vocabulary's tokens say of the places of these: the largest that overlaps."""
    found, first = np.zeros(len(spans)), 0
    for n, (start, end) in enumerate(spans):
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            found[n] = max(found[n], values[at])
            at += 1
    return found
