"""Canvases: after any mix of set, clear, commit, fork and rewind, the logits of a fresh run."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from helpers.deep_null import MASK, SIGHTS, engine_with, expected_logits, fresh
from helpers.engine_support import request
from unspool.engine.canvas import Canvas, CanvasKind, PassRequest, open_canvas, run_passes
from unspool.errors import UnspoolError


class CanvasMachine(RuleBasedStateMachine):
    """Open, set, clear, commit, append, fork, snapshot, restore and close, in any order, with so
    little memory that tasks are preempted, with and without steps in flight."""

    canvases = Bundle("canvases")

    @initialize(
        sight=st.sampled_from(SIGHTS), shifted=st.booleans(), twin=st.booleans(),
        pages=st.integers(60, 120), overlaps=st.booleans(),
    )  # fmt: skip
    def begin(
        self, sight: tuple[str, int], shifted: bool, twin: bool, pages: int, overlaps: bool
    ) -> None:
        self.engine = engine_with(pages, overlaps=overlaps)
        name = "twin" if twin and sight[0] == "causal" else None
        self.kind = CanvasKind(
            mask_id=MASK, sight=sight[0], block=sight[1], shifted=shifted, canvas_adapter=name
        )
        self.texts: dict[Canvas, tuple[list[int], list[int]]] = {}
        self.snapshots: list[tuple[Any, list[int], list[int]]] = []

    @rule(target=canvases, text=st.lists(st.integers(0, 2), min_size=1, max_size=14),
          length=st.integers(1, 9))  # fmt: skip
    def open(self, text: list[int], length: int) -> Canvas:
        canvas = open_canvas(self.engine, text, length, self.kind)
        self.texts[canvas] = (list(text), [MASK] * length)
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
            places[int(part * len(places))] = MASK

    @rule(canvas=canvases, part=st.floats(0, 1))
    def commit(self, canvas: Canvas, part: float) -> None:
        text, places = self.texts[canvas]
        count = int(part * len(places))
        for place in range(count):
            if places[place] == MASK:
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
            places += [MASK] * count

    @rule(target=canvases, canvas=canvases)
    def fork(self, canvas: Canvas) -> Canvas:
        other = canvas.fork()
        text, places = self.texts[canvas]
        self.texts[other] = (text.copy(), places.copy())
        return other

    @rule(canvas=canvases)
    def snapshot(self, canvas: Canvas) -> None:
        text, places = self.texts[canvas]
        self.snapshots.append((canvas.snapshot(), text.copy(), places.copy()))

    @rule(canvas=canvases, part=st.floats(0, 0.99))
    def restore(self, canvas: Canvas, part: float) -> None:
        if self.snapshots:
            snapshot, text, places = self.snapshots[int(part * len(self.snapshots))]
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
            assert "KV cache is full" in str(error)

    @rule(canvas=canvases, count=st.integers(1, 6))
    def write_beside(self, canvas: Canvas, count: int) -> None:
        """Generate an ordinary text in the same steps."""
        text = self.texts[canvas][0]
        stream = self.engine.submit(request(text, count, settings={"temperature": 0}))
        canvas.fork().close()  # while a step may be in flight
        try:
            self._check([canvas])
        except UnspoolError as error:
            assert "full" in str(error)
        tokens = text.copy()
        for step in stream:
            ends = np.arange(len(tokens)) + 1
            logits = fresh(tokens, ends, ends * 0, len(tokens) - 1)
            assert step.token == int(logits.argmax())
            tokens.append(step.token)

    @rule(canvas=consumes(canvases))
    def close(self, canvas: Canvas) -> None:
        canvas.close()
        del self.texts[canvas]

    @invariant()
    def tokens_are_as_set(self) -> None:
        for canvas, (text, places) in self.texts.items():
            assert canvas.tokens == places and canvas.start == len(text)
            assert canvas.masked == [n for n, t in enumerate(places) if t == MASK]

    def _check(self, canvases: list[Canvas]) -> None:
        not_empty = [canvas for canvas in canvases if self.texts[canvas][1]]
        all_logits = run_passes([PassRequest(canvas) for canvas in not_empty])
        for canvas, logits in zip(not_empty, all_logits, strict=True):
            text, places = self.texts[canvas]
            assert np.array_equal(logits, expected_logits(text, places, self.kind))
            first = canvas.next_logits()
            if first is not None:
                assert np.array_equal(first[0], logits[0])

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for canvas in self.texts:
                canvas.close()
            self.engine.call(self.engine.tree.index.clear)
            assert self.engine.tree.pool.used == 0, "pages leaked"
            self.engine.close()


CanvasMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestCanvas = CanvasMachine.TestCase
