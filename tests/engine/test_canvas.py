"""Canvases: after any mix of set, clear, commit, fork and rewind, the logits of a fresh run."""

from __future__ import annotations

import gc
import threading
import zlib
from pathlib import Path
from typing import Any

import canvas_support as support
import null_model
import numpy as np
import pytest
from canvas_support import MASK
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from unspool.backends.base import StepLimits
from unspool.backends.step import StepResult
from unspool.engine.canvas import Canvas, CanvasKind, open_canvas, run_passes
from unspool.engine.engine import Engine
from unspool.engine.ending import Limits
from unspool.engine.request import Request
from unspool.errors import ContextError, SettingsError, UnspoolError
from unspool.sampling import SamplingSettings
from unspool.sampling.picker import pick

VOCAB = 40
NULL_MASK = 39
SIGHTS = [("causal", 0), ("whole", 0), ("block", 2), ("block", 4), ("block", 6), ("block", 8)]
FEW = StepLimits(max_rows=8, prefill_tokens=5, prefill_beside_decode=3)


class DeepNull(null_model.NullModel):
    """A null model of two layers: a page holds of each token what it saw when it was computed, and
    with which adapter. So logits are right only if every token before was computed as it should."""

    def set_adapter(self, number: int, adapter: Any) -> None:
        pass

    def _compute(self, batch: Any) -> Any:
        if not hasattr(self, "seen"):
            self.seen = np.full(self.slots.shape, -1, np.int64)
        self.table.apply(batch.updates)
        for source, target in batch.copies.tolist():
            self.slots[target], self.seen[target] = self.slots[source], self.seen[source]
        rows = [
            (place, self.table.pages[batch.slots[row]], int(numbers))
            for row, numbers in enumerate(batch.adapters if len(batch.adapters) else batch.slots * 0)
            for place in range(batch.starts[row], batch.starts[row + 1])
        ]
        for place, pages, _ in rows:
            self.slots[self._at(pages, int(batch.positions[place]))] = batch.tokens[place]
        for place, pages, adapter in rows:
            past = [self.slots[self._at(pages, n)] for n in range(batch.visible_end[place])]
            self.seen[self._at(pages, int(batch.positions[place]))] = mixed(past, adapter)
        wanted = np.concatenate((batch.sampled, batch.logits)).tolist()
        logits = np.zeros((len(wanted), self.vocab_size), np.float32)
        for number, place in enumerate(wanted):
            _, pages, adapter = rows[place]
            past = [self.seen[self._at(pages, n)] for n in range(batch.visible_end[place])]
            assert min(past) >= 0, "a token of the past was never computed"
            logits[number] = null_model.logits_after([mixed(past, adapter)], self.vocab_size)
        count = len(batch.sampled)
        if batch.pick is None:
            return StepResult(np.empty(0, np.int64), np.empty(0), logits)
        found = pick(logits[:count], batch.pick)
        return StepResult(found.tokens, found.logprobs, logits[count:], None, found.failures)

    def _at(self, pages: Any, position: int) -> tuple[int, int]:
        return int(pages[position // self.page_size]), position % self.page_size


def mixed(numbers: list[int], adapter: int) -> int:
    """A number that tells whether any of these is another."""
    return zlib.crc32(np.array([*numbers, adapter], np.int64).tobytes()) & 0x7FFFFFFF


def fresh(tokens: list[int], sees: Any, adapters: Any, position: int) -> Any:
    """What the model says at a position when everything is computed from the beginning."""
    seen = [mixed(tokens[: sees[n]], adapters[n]) for n in range(len(tokens))]
    return null_model.logits_after([mixed(seen[: sees[position]], adapters[position])], VOCAB)


def engine_with(pages: int = 400, **options: Any) -> Engine:
    engine = Engine(DeepNull(pages=pages, vocab_size=VOCAB, limits=FEW, **options))
    engine.adapters.load("twin", None)  # type: ignore[arg-type]
    return engine


def said(text: list[int], places: list[int], kind: CanvasKind) -> Any:
    """What is to be said of each place."""
    tokens = [*text, *places]
    sees = support.ends(len(tokens), kind.sight, kind.block, len(text))
    twin = np.arange(len(tokens)) >= len(text) if kind.twin else np.zeros(len(tokens))
    shifted = range(len(text) - kind.shifted, len(tokens) - kind.shifted)
    return np.array([fresh(tokens, sees, twin.astype(int), max(0, n)) for n in shifted])


class CanvasMachine(RuleBasedStateMachine):
    """Open, set, clear, commit, append, fork, snapshot, restore and close, in any order, while the
    memory is so small that tasks are preempted."""

    canvases = Bundle("canvases")

    @initialize(
        sight=st.sampled_from(SIGHTS), shifted=st.booleans(), twin=st.booleans(),
        pages=st.integers(60, 120),
    )  # fmt: skip
    def begin(self, sight: tuple[str, int], shifted: bool, twin: bool, pages: int) -> None:
        self.engine = engine_with(pages)
        name = "twin" if twin and sight[0] == "causal" else None
        self.kind = CanvasKind(
            mask_id=NULL_MASK, sight=sight[0], block=sight[1], shifted=shifted, twin=name
        )
        self.texts: dict[Canvas, tuple[list[int], list[int]]] = {}
        self.kept: list[tuple[Any, list[int], list[int]]] = []

    @rule(target=canvases, text=st.lists(st.integers(0, 2), min_size=1, max_size=14),
          length=st.integers(1, 9))  # fmt: skip
    def open(self, text: list[int], length: int) -> Canvas:
        canvas = open_canvas(self.engine, text, length, self.kind)
        self.texts[canvas] = (list(text), [NULL_MASK] * length)
        return canvas

    @rule(canvas=canvases, part=st.floats(0, 0.99), token=st.integers(0, 2))
    def set(self, canvas: Canvas, part: float, token: int) -> None:
        places = self.texts[canvas][1]
        if places:
            place = int(part * len(places))
            canvas.set(place, token)
            places[place] = token

    @rule(canvas=canvases, part=st.floats(0, 0.99))
    def clear(self, canvas: Canvas, part: float) -> None:
        places = self.texts[canvas][1]
        if places:
            canvas.clear(int(part * len(places)))
            places[int(part * len(places))] = NULL_MASK

    @rule(canvas=canvases, part=st.floats(0, 1))
    def commit(self, canvas: Canvas, part: float) -> None:
        text, places = self.texts[canvas]
        count = int(part * len(places))
        for place in range(count):
            if places[place] == NULL_MASK:
                canvas.set(place, 1)
                places[place] = 1
        canvas.commit(count)
        text += places[:count]
        del places[:count]

    @rule(canvas=canvases, count=st.integers(1, 5))
    def append(self, canvas: Canvas, count: int) -> None:
        text, places = self.texts[canvas]
        if len(text) + len(places) < 40:
            canvas.append(count)
            places += [NULL_MASK] * count

    @rule(target=canvases, canvas=canvases)
    def fork(self, canvas: Canvas) -> Canvas:
        other = canvas.fork()
        text, places = self.texts[canvas]
        self.texts[other] = (text.copy(), places.copy())
        return other

    @rule(canvas=canvases)
    def snapshot(self, canvas: Canvas) -> None:
        text, places = self.texts[canvas]
        self.kept.append((canvas.snapshot(), text.copy(), places.copy()))

    @rule(canvas=canvases, part=st.floats(0, 0.99))
    def restore(self, canvas: Canvas, part: float) -> None:
        if self.kept:
            snapshot, text, places = self.kept[int(part * len(self.kept))]
            canvas.restore(snapshot)
            self.texts[canvas] = (text.copy(), places.copy())

    @rule(canvas=canvases)
    def look(self, canvas: Canvas) -> None:
        self._check([canvas])

    @rule()
    def look_at_all(self) -> None:
        try:
            self._check(list(self.texts))
        except UnspoolError as error:  # together they may hold more than there is
            assert "memory for keys and values is full" in str(error)

    @rule(canvas=canvases, more=st.integers(1, 6))
    def write_beside(self, canvas: Canvas, more: int) -> None:
        """An ordinary text in the same steps."""
        text = self.texts[canvas][0]
        limits = Limits(max_tokens=more, context=512)
        request = Request(
            prompt=tuple(text), settings=SamplingSettings(temperature=0), limits=limits
        )
        stream = self.engine.submit(request)
        try:
            self._check([canvas])
        except UnspoolError as error:
            assert "full" in str(error)
        tokens = text.copy()
        for step in stream:
            sees = np.arange(len(tokens)) + 1
            expected = fresh(tokens, sees, sees * 0, len(tokens) - 1)
            assert step.token == int(expected.argmax())
            tokens.append(step.token)

    @rule(canvas=consumes(canvases))
    def close(self, canvas: Canvas) -> None:
        canvas.close()
        del self.texts[canvas]

    @invariant()
    def it_says_what_stands_there(self) -> None:
        for canvas, (text, places) in getattr(self, "texts", {}).items():
            assert canvas.tokens == places and canvas.start == len(text)
            assert canvas.masked == [n for n, t in enumerate(places) if t == NULL_MASK]

    def _check(self, canvases: list[Canvas]) -> None:
        asked = [canvas for canvas in canvases if self.texts[canvas][1]]
        found = run_passes([(canvas, None) for canvas in asked])
        for canvas, logits in zip(asked, found, strict=True):
            text, places = self.texts[canvas]
            assert np.array_equal(logits, said(text, places, self.kind))
            ahead = canvas.next_logits()
            if ahead is not None:
                assert np.array_equal(ahead[0], logits[0])

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for canvas in self.texts:
                canvas.close()
            self.engine.call(self.engine.tree.index.clear)
            assert self.engine.tree.pool.used == 0, "all pages come back"
            self.engine.close()


CanvasMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCanvas = CanvasMachine.TestCase
