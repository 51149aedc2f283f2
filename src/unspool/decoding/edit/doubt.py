"""Doubtful tokens: how surprising each token of a text is, in nats.

A causal model is surprised by a wrong token or by the one after it. A masked model predicts the
token from both sides. With both models it is the mean of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unspool.decoding.fill.borders import start_ids, text_ids, token_ends
from unspool.decoding.fill.masked import MaskedModel, add_special_tokens, text_logprobs
from unspool.engine.steps import Score
from unspool.errors import SettingsError
from unspool.sampling.scoring import Floats
from unspool.session import Session

WAYS = ("auto", "causal", "masked", "both")
_NEXT_WEIGHT = 3.0  # of the next token's surprise (see bench/fill.py: planted errors)
_STRIDE = 8  # every eighth token is masked in one run


@dataclass(frozen=True, slots=True)
class Doubt:
    """A token of a text and its surprise."""

    token: int
    text: str
    start: int  # in characters
    end: int
    surprise: float  # nats; 0 and below: certain


def score_doubts(
    lm: Session, text: str, *, by: str = "auto", twin: MaskedModel | None = None
) -> tuple[list[Doubt], Score]:
    """Surprise of each token, and the causal model's score of the text."""
    if by not in WAYS:
        raise SettingsError(f"doubt must be one of {', '.join(WAYS)}, got {by!r}")
    if twin is None and by in ("masked", "both"):
        raise SettingsError(f"doubt={by!r} needs a masked model; give one: twin=")
    ids = text_ids(lm, text)
    score = document_score(lm, text)
    spans = _spans(lm, ids, text)
    surprises = causal_surprise(score, len(ids))
    if twin is not None and by != "causal":
        masked = _map_spans(spans, *masked_surprise(twin, text))
        surprises = masked if by == "masked" else (surprises + masked) / 2
    tokens = [
        Doubt(token, text[start:end], start, end, float(level))
        for token, (start, end), level in zip(ids, spans, surprises, strict=True)
    ]
    return [doubt for doubt in tokens if doubt.end > doubt.start], score


def document_score(lm: Session, text: str) -> Score:
    """Score a text as a whole document: its first token is scored too."""
    before = len(start_ids(lm))
    return Score(lm.score(text_ids(lm, text)).positions[before:])


def causal_surprise(score: Score, count: int) -> Floats:
    """Surprise of each token, plus how much more than expected the next token surprises.

    A plausible wrong token is no surprise itself, but the token after it is.
    """
    scored = [p for p in score.positions if p.logprob is not None]
    surprise = np.array([-(p.logprob or 0.0) for p in scored])
    excess = surprise - np.array([p.entropy or 0.0 for p in scored])
    following = np.append(excess[1:], 0.0)[: len(surprise)]
    return np.concatenate([np.zeros(count - len(surprise)), surprise + _NEXT_WEIGHT * following])


def masked_surprise(model: MaskedModel, text: str) -> tuple[list[tuple[int, int]], Floats]:
    """Character span and surprise (when masked) of each token of the masked model."""
    encoded: Any = model.tokenizer.encoder.plain.encode(text, add_special_tokens=False)
    ids: list[int] = encoded.ids
    row, before = add_special_tokens(model.tokenizer, ids)
    surprises = np.zeros(len(ids))
    for first in range(min(_STRIDE, len(ids))):
        places = list(range(first, len(ids), _STRIDE))
        hidden = list(row)
        for place in places:
            hidden[place + before] = model.mask_id
        logprobs = text_logprobs(model, hidden, [place + before for place in places])
        surprises[places] = [-logprobs[n, ids[place]] for n, place in enumerate(places)]
    return list(encoded.offsets), surprises


def _spans(lm: Session, ids: Sequence[int], text: str) -> list[tuple[int, int]]:
    """Character span of each token; a character split over tokens belongs to the last."""
    character_ends = [0]  # number of characters that end by each byte
    for at, character in enumerate(text):
        character_ends += [at] * (len(character.encode()) - 1) + [at + 1]
    ends = [
        character_ends[min(max(0, end), len(character_ends) - 1)]
        for end in token_ends(lm, ids, text)
    ]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _map_spans(
    spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]], values: Floats
) -> Floats:
    """Map values of another tokenization to these spans: the maximum of overlapping tokens."""
    values_here, first = np.zeros(len(spans)), 0
    for n, (start, end) in enumerate(spans):
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            values_here[n] = max(values_here[n], values[at])
            at += 1
    return values_here
