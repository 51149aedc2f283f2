"""Models with recurrent layers in both backends: whatever is done with a text, it gives the bits of
a fresh run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from recurrent_texts import native, plain
from states_machine import StatesMachine
from unspool import native as library
from unspool.backends.base import Backend, StepLimits
from unspool.engine.engine import Engine

KINDS = {"native": native, "torch": plain}


class OnModel(StatesMachine):
    """The same use, of a real model; what is right is said by an engine that reads each text whole,
    as if for the first time."""

    kind = ("native", "conv")

    def make(self, slots: int, pages: int, cheap: bool, overlaps: bool) -> Any:
        backend, name = self.kind
        made: Any = KINDS[backend](name, context=512)
        self.fresh: Backend = KINDS[backend](name, context=512)
        made.state_count = min(slots, made.state_count)
        made.page_count = min(pages, made.page_count)
        made.limits = StepLimits(8, 24, 8)
        made.runs = []
        launch = made.launch

        def counted(batch: Any) -> Any:
            made.runs.append(np.diff(batch.starts).tolist())
            return launch(batch)

        made.launch = counted
        self.error = 1e-4 if backend == "torch" else 0.0  # its products vary with what is beside
        self.alone = Engine(self.fresh)
        self.known: dict[tuple[int, ...], Any] = {}
        return made

    def expected(self, tokens: list[int]) -> Any:
        key = tuple(tokens)
        if key not in self.known:
            self.alone.call(self.alone.tree.index.clear)
            branch = self.alone.open(tokens)
            self.known[key] = np.asarray(self.alone.extend(branch))[-1].copy()
            branch.release()
        return self.known[key]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "alone"):
            self.alone.close()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", ["conv", "delta"])
def test_bits_of_a_fresh_run(backend: str, name: str):
    if backend == "native" and library.missing() is not None:
        pytest.skip(str(library.missing()))
    from hypothesis.stateful import run_state_machine_as_test

    class Machine(OnModel):
        kind = (backend, name)

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=8, stateful_step_count=15, deadline=None)
    )
