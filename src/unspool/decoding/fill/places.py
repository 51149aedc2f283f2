"""Filling by a masked model: mask tokens stand in the gap, and the surest place is set first.

What a gap holds is judged by its pseudo-likelihood: its tokens in order, each given both sides and
the tokens before it, the others masked; a token on average, so that gaps of different lengths can
be compared. Where nobody said how long a gap is, several lengths are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from unspool.decoding.fill.gaps import Gap, GappedText
from unspool.decoding.fill.masked import MaskedModel, framed, text_logprobs
from unspool.decoding.fill.result import Filled, clipped, in_order
from unspool.engine.steps import Candidate, Step
from unspool.errors import UnspoolError
from unspool.sampling.scoring import Floats
from unspool.text.tokenizer.tokenizer import Tokenizer

_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # that are tried
_PASSES = 8  # in which a gap is written, however long
_STARTS = 4  # ways to begin a gap of several tokens
_ALL = 64  # combinations of lengths of several gaps


@dataclass(frozen=True, slots=True)
class _Canvas:
    """A row of tokens with masks in its gaps."""

    row: tuple[int, ...]
    gaps: tuple[range, ...]  # the places of each
    # Of each, whether its first token brings the space before it; None: it may, and need not.
    spaced: tuple[bool | None, ...]

    @property
    def places(self) -> list[int]:
        return [place for gap in self.gaps for place in gap]


def fill_by_masks(
    model: MaskedModel, gapped: GappedText, *, candidates: int, top: int = 0
) -> tuple[Filled, ...]:
    """Fillings of a text, best first; the score is the mean log-probability of a token."""
    found: dict[tuple[str, ...], Filled] = {}
    for lengths in _lengths(gapped.gaps):
        canvas = _canvas(model, gapped, lengths)
        first = text_logprobs(model, canvas.row, canvas.places)
        for row in _written(model, canvas, first, candidates):
            filled = _judged(model, gapped, canvas, row, first, top)
            if filled is not None:
                known = found.setdefault(filled.texts, filled)
                if filled.score > known.score:
                    found[filled.texts] = filled
    if not found:
        raise UnspoolError(
            "the masked model proposed nothing that is text; allow other lengths: gap(1, 8)"
        )
    return in_order(list(found.values()))[:candidates]


def _lengths(gaps: Sequence[Gap]) -> Iterator[tuple[int, ...]]:
    """The lengths that are tried; of several gaps, those that are equally far from the least."""
    each = [
        [n for n in sorted({*_LENGTHS, max(1, gap.least), gap.most}) if gap.least <= n <= gap.most]
        for gap in gaps
    ]
    if math.prod(map(len, each)) <= _ALL:
        yield from product(*each)
    else:
        for number in range(max(map(len, each))):
            yield tuple(sizes[min(number, len(sizes) - 1)] for sizes in each)


def _canvas(model: MaskedModel, gapped: GappedText, lengths: Sequence[int]) -> _Canvas:
    tokenizer = model.tokenizer
    ids, gaps, spaced = list[int](), list[range](), list[bool | None]()
    for number, text in enumerate(gapped.texts):
        last = number == len(lengths)
        # Most vocabularies write a space with the word behind it: so it belongs to the gap's token.
        takes_space = not last and text.endswith(" ")
        ids += tokenizer.encode(text[:-1] if takes_space else text)
        if not last:
            spaced.append(takes_space if text else None)
            gaps.append(range(len(ids), len(ids) + lengths[number]))
            ids += [model.mask_id] * lengths[number]
    row, before = framed(tokenizer, ids)
    moved = [range(gap.start + before, gap.stop + before) for gap in gaps]
    return _Canvas(tuple(row), tuple(moved), tuple(spaced))


def _written(
    model: MaskedModel, canvas: _Canvas, first: Floats, candidates: int
) -> Iterator[tuple[int, ...]]:
    """Rows without masks: the surest place is set in several ways, the others follow from that."""
    places = canvas.places
    if not places:
        yield canvas.row
        return
    surest = int(np.argmax(first.max(1)))
    count = candidates if len(places) == 1 else min(candidates, _STARTS)
    for token in np.argsort(-first[surest], kind="stable")[:count]:
        row = list(canvas.row)
        row[places[surest]] = int(token)
        _set_rest(model, row, [place for place in places if place != places[surest]])
        yield tuple(row)


def _set_rest(model: MaskedModel, row: list[int], places: list[int]) -> None:
    """Set these places, the surest ones first, in a few passes."""
    at_once = -(-len(places) // _PASSES)
    while places:
        own = text_logprobs(model, row, places)
        surest = np.argsort(-own.max(1), kind="stable")[:at_once]
        for number in surest:
            row[places[number]] = int(own[number].argmax())
        places = [place for n, place in enumerate(places) if n not in surest]


def _judged(
    model: MaskedModel,
    gapped: GappedText,
    canvas: _Canvas,
    row: Sequence[int],
    first: Floats,
    top: int,
) -> Filled | None:
    """A filling with its score; None if its tokens are no text that could stand there."""
    texts = [
        _inside(model.tokenizer, row[gap.start : gap.stop], spaced)
        for gap, spaced in zip(canvas.gaps, canvas.spaced, strict=True)
    ]
    inside = tuple(text for text in texts if text is not None)
    if len(inside) < len(texts):
        return None
    steps, hidden = list[Step](), list(canvas.row)
    for number, place in enumerate(canvas.places):
        own = first[0] if not number else text_logprobs(model, hidden, [place])[0]
        steps.append(_step(model.tokenizer, own, row[place], place, top))
        hidden[place] = row[place]
    score = math.fsum(step.logprob for step in steps) / max(1, len(steps))
    rest, parts = iter(steps), list[tuple[Step, ...]]()
    for gap, text in zip(canvas.gaps, inside, strict=True):
        own_steps = [next(rest) for _ in gap]
        size = sum(len(step.bytes) for step in own_steps)
        ends = np.cumsum([len(step.bytes) for step in own_steps]).tolist()
        parts.append(clipped(own_steps, ends, size - len(text.encode()), size))
    return Filled(inside, gapped.filled(inside), score, tuple(steps), tuple(parts))


def _inside(tokenizer: Tokenizer, ids: Sequence[int], spaced: bool | None) -> str | None:
    """What tokens write into a gap; the space that stands before it already is taken off."""
    data = b"".join(map(tokenizer.token_bytes, ids))
    if spaced and not data.startswith(b" "):
        return None
    try:
        return (data if spaced is False else data.removeprefix(b" ")).decode()
    except UnicodeDecodeError:
        return None


def _step(tokenizer: Tokenizer, own: Floats, token: int, place: int, top: int) -> Step:
    best = np.argsort(-own, kind="stable")[:top]
    piece = tokenizer.token_bytes(token)
    known = own[own > -np.inf]
    return Step(
        token=token,
        bytes=piece,
        text=piece.decode("utf-8", "replace"),
        logprob=float(own[token]),
        position=place,
        rank=int((own > own[token]).sum()),
        entropy=float(-(np.exp(known) * known).sum()),
        probability=1.0,
        candidates=tuple(
            Candidate(int(t), tokenizer.token_text(int(t)), float(own[t]), math.exp(own[t]))
            for t in best
        ),
    )
