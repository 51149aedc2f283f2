"""Masked models: predict the token at every position from both sides.

`MaskedModel` is the interface that infilling and editing need. `WholeText` implements it for a
loaded model with bidirectional attention: each row is a provisional branch, so all tokens attend to
each other and nothing is cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol, runtime_checkable

import numpy as np

from unspool.backends.step import Logits
from unspool.decoding.infill.result import Filled, Gap, GappedText, clip_steps, rank_candidates
from unspool.engine.results import Candidate, Step
from unspool.engine.tree import Branch
from unspool.errors import SettingsError, UnspoolError
from unspool.sampling.arrays import array_operations
from unspool.sampling.chain import Floats, log_softmax
from unspool.session import Session
from unspool.text.tokenizer.tokenizer import Tokenizer


@runtime_checkable
class MaskedModel(Protocol):
    """A model that predicts masked positions."""

    mask_id: int  # the mask token
    tokenizer: Tokenizer

    def logits(self, row: Sequence[int]) -> Logits:
        """Logits at each position of a row of tokens: [positions, vocabulary]."""


class WholeText:
    """A loaded model with bidirectional attention."""

    def __init__(self, lm: Session) -> None:
        mask = lm.config.mask_id
        if mask is None or lm.config.sight == "causal":
            raise SettingsError(
                "this model cannot fill masks: it has no mask token or is causal; use a masked "
                "model, such as a twin made by unspool train twin --kind fill"
            )
        self._lm, self.mask_id, self.tokenizer = lm, mask, lm.tokenizer

    def logits(self, row: Sequence[int]) -> Logits:
        lm, engine = self._lm, self._lm.engine

        def opened() -> Branch:
            number = engine.adapters.number(lm.adapter)
            branch = engine.tree.open((), cached=False, adapter=number)
            engine.tree.append(branch, row, provisional=True)
            return branch

        branch = engine.call(opened)
        try:
            logits: Any = engine.extend(branch, num_logits=len(row))
        finally:
            engine.release(branch)
        # If a hidden state predicts the next position, the first position has no prediction.
        shifted: Logits = logits[[0, *range(len(row) - 1)]] if lm.config.shifted else logits
        return shifted


def masked_model(model: Session | MaskedModel) -> MaskedModel:
    """Return a masked model; a loaded model is wrapped."""
    if isinstance(model, Session):
        return WholeText(model)
    if not hasattr(model, "mask_id") or not hasattr(model, "logits"):
        raise SettingsError(f"twin must be a loaded masked model, got {model!r}")
    return model


def add_special_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], int]:
    """Add the start and end tokens that the model expects; also returns how many come first."""
    before = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    after = [tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []
    return [*before, *ids, *after], len(before)


def text_logprobs(model: MaskedModel, row: Sequence[int], places: Sequence[int]) -> Floats:
    """Log-probabilities at some positions, without special tokens: [positions, vocabulary]."""
    logits = model.logits(row)
    logprobs = array_operations(logits).to_numpy(log_softmax(logits[list(places)]))
    return _without(logprobs, [model.mask_id, *model.tokenizer.special_ids])


def _without(logprobs: Floats, tokens: Sequence[int]) -> Floats:
    logprobs = np.array(logprobs, np.float64)
    logprobs[:, [token for token in tokens if token < logprobs.shape[1]]] = -np.inf
    peak = logprobs.max(1, keepdims=True)
    normalized: Floats = logprobs - peak - np.log(np.exp(logprobs - peak).sum(1, keepdims=True))
    return normalized


_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # tried, in tokens
_PASSES = 8  # denoising passes per gap, for any length
_STARTS = 4  # first tokens tried for a gap of several tokens
_MAX_COMBINATIONS = 64  # of the lengths of several gaps


@dataclass(frozen=True, slots=True)
class _MaskedRow:
    """Tokens with mask tokens in the gaps."""

    row: tuple[int, ...]
    gaps: tuple[range, ...]  # positions of each gap
    # Per gap: whether its first token includes the space before it; None: optional.
    spaced: tuple[bool | None, ...]

    @property
    def places(self) -> list[int]:
        return [place for gap in self.gaps for place in gap]


def fill_by_masks(
    model: MaskedModel, gapped: GappedText, *, candidates: int, top: int = 0
) -> tuple[Filled, ...]:
    """Fill a text, best first; the score is the mean log-probability per token."""
    fillings: dict[tuple[str, ...], Filled] = {}
    for lengths in _lengths(gapped.gaps):
        canvas = _masked_row(model, gapped, lengths)
        first = text_logprobs(model, canvas.row, canvas.places)
        for row in _fill_rows(model, canvas, first, candidates):
            filled = _score_filling(model, gapped, canvas, row, first, top)
            if filled is not None:
                previous = fillings.setdefault(filled.texts, filled)
                if filled.score > previous.score:
                    fillings[filled.texts] = filled
    if not fillings:
        raise UnspoolError(
            "the masked model proposed no valid text; allow other lengths: gap(1, 8)"
        )
    return rank_candidates(list(fillings.values()))[:candidates]


def _lengths(gaps: Sequence[Gap]) -> Iterator[tuple[int, ...]]:
    """Lengths to try per gap; if there are too many combinations, all gaps grow together."""
    lengths = [
        [n for n in sorted({*_LENGTHS, max(1, gap.least), gap.most}) if gap.least <= n <= gap.most]
        for gap in gaps
    ]
    if math.prod(map(len, lengths)) <= _MAX_COMBINATIONS:
        yield from product(*lengths)
    else:
        for number in range(max(map(len, lengths))):
            yield tuple(sizes[min(number, len(sizes) - 1)] for sizes in lengths)


def _masked_row(model: MaskedModel, gapped: GappedText, lengths: Sequence[int]) -> _MaskedRow:
    tokenizer = model.tokenizer
    ids, gaps, spaced = list[int](), list[range](), list[bool | None]()
    for number, text in enumerate(gapped.texts):
        last = number == len(lengths)
        # Most vocabularies put a space into the token of the next word: leave it to the gap.
        takes_space = not last and text.endswith(" ")
        ids += tokenizer.encode(text[:-1] if takes_space else text)
        if not last:
            spaced.append(takes_space if text else None)
            gaps.append(range(len(ids), len(ids) + lengths[number]))
            ids += [model.mask_id] * lengths[number]
    row, before = add_special_tokens(tokenizer, ids)
    moved = [range(gap.start + before, gap.stop + before) for gap in gaps]
    return _MaskedRow(tuple(row), tuple(moved), tuple(spaced))


def _fill_rows(
    model: MaskedModel, canvas: _MaskedRow, first: Floats, candidates: int
) -> Iterator[tuple[int, ...]]:
    """Rows without masks: try several tokens at the most confident position, then the others."""
    places = canvas.places
    if not places:
        yield canvas.row
        return
    surest = int(np.argmax(first.max(1)))
    count = candidates if len(places) == 1 else min(candidates, _STARTS)
    for token in np.argsort(-first[surest], kind="stable")[:count]:
        row = list(canvas.row)
        row[places[surest]] = int(token)
        _set_positions(model, row, [place for place in places if place != places[surest]])
        yield tuple(row)


def _set_positions(model: MaskedModel, row: list[int], places: list[int]) -> None:
    """Set these positions, most confident first, in a few passes."""
    per_pass = -(-len(places) // _PASSES)
    while places:
        logprobs = text_logprobs(model, row, places)
        surest = np.argsort(-logprobs.max(1), kind="stable")[:per_pass]
        for number in surest:
            row[places[number]] = int(logprobs[number].argmax())
        places = [place for n, place in enumerate(places) if n not in surest]


def _score_filling(
    model: MaskedModel,
    gapped: GappedText,
    canvas: _MaskedRow,
    row: Sequence[int],
    first: Floats,
    top: int,
) -> Filled | None:
    """Score a filling; None if its tokens do not decode to a text that fits."""
    texts = [
        _gap_text(model.tokenizer, row[gap.start : gap.stop], spaced)
        for gap, spaced in zip(canvas.gaps, canvas.spaced, strict=True)
    ]
    inside = tuple(text for text in texts if text is not None)
    if len(inside) < len(texts):
        return None
    steps, hidden = list[Step](), list(canvas.row)
    for number, place in enumerate(canvas.places):
        logprobs = first[0] if not number else text_logprobs(model, hidden, [place])[0]
        steps.append(_step(model.tokenizer, logprobs, row[place], place, top))
        hidden[place] = row[place]
    score = math.fsum(step.logprob for step in steps) / max(1, len(steps))
    remaining, parts = iter(steps), list[tuple[Step, ...]]()
    for gap, text in zip(canvas.gaps, inside, strict=True):
        gap_steps = [next(remaining) for _ in gap]
        size = sum(len(step.bytes) for step in gap_steps)
        ends = np.cumsum([len(step.bytes) for step in gap_steps]).tolist()
        parts.append(clip_steps(gap_steps, ends, size - len(text.encode()), size))
    return Filled(inside, gapped.filled(inside), score, tuple(steps), tuple(parts))


def _gap_text(tokenizer: Tokenizer, ids: Sequence[int], spaced: bool | None) -> str | None:
    """Text that tokens write into a gap, without a space that is there already."""
    data = b"".join(map(tokenizer.token_bytes, ids))
    if spaced and not data.startswith(b" "):
        return None
    try:
        return (data if spaced is False else data.removeprefix(b" ")).decode()
    except UnicodeDecodeError:
        return None


def _step(tokenizer: Tokenizer, logprobs: Floats, token: int, place: int, top: int) -> Step:
    best = np.argsort(-logprobs, kind="stable")[:top]
    piece = tokenizer.token_bytes(token)
    finite = logprobs[logprobs > -np.inf]
    return Step(
        token=token,
        bytes=piece,
        text=piece.decode("utf-8", "replace"),
        logprob=float(logprobs[token]),
        position=place,
        rank=int((logprobs > logprobs[token]).sum()),
        entropy=float(-(np.exp(finite) * finite).sum()),
        probability=1.0,
        candidates=tuple(
            Candidate(
                int(t), tokenizer.token_text(int(t)), float(logprobs[t]), math.exp(logprobs[t])
            )
            for t in best
        ),
    )
