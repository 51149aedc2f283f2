"""Models with recurrent layers: any use of a sequence is bit-identical to a fresh run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from helpers.recurrent_texts import checkpoint, native, plain
from helpers.single_sequence import SingleSequence
from helpers.states_machine import StatesMachine
from unspool import native as library
from unspool.backends.cpu.model import CpuModel
from unspool.backends.step import Backend, StepLimits
from unspool.engine.engine import Engine
from unspool.lm import LanguageModel
from unspool.loading import make_drafter_for

needs_native = pytest.mark.skipif(
    library.missing_reason() is not None, reason=str(library.missing_reason())
)
STATE = checkpoint("delta").config.state_bytes
KINDS = {"native": native, "torch": plain}


def model() -> CpuModel:
    return CpuModel(checkpoint("delta", context=512), store=None, threads=1, kv_bits=32)


class OnModel(StatesMachine):
    """The same operations on a real model; the reference is an engine that prefills each sequence
    from scratch."""

    kind = ("native", "conv")

    def make(self, slots: int, pages: int, cheap: bool, overlaps: bool) -> Any:
        backend, name = self.kind
        created: Any = KINDS[backend](name, context=512)
        self.fresh: Backend = KINDS[backend](name, context=512)
        created.state_count = min(slots, created.state_count)
        created.page_count = min(pages, created.page_count)
        created.limits = StepLimits(8, 24, 8)
        created.runs = []
        launch = created.launch

        def counted(batch: Any) -> Any:
            created.runs.append(np.diff(batch.row_starts).tolist())
            return launch(batch)

        created.launch = counted
        self.error = 1e-4 if backend == "torch" else 0.0  # its products vary with what is beside
        self.single_process = Engine(self.fresh)
        self.known: dict[tuple[int, ...], Any] = {}
        return created

    def expected(self, tokens: list[int]) -> Any:
        key = tuple(tokens)
        if key not in self.known:
            self.single_process.call(self.single_process.tree.index.clear)
            branch = self.single_process.open(tokens)
            self.known[key] = np.asarray(self.single_process.extend(branch))[-1].copy()
            branch.release()
        return self.known[key]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "single_process"):
            self.single_process.close()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", ["conv", "delta", "mamba2", "halves"])
def test_bits_of_a_fresh_run(backend: str, name: str):
    if backend == "native" and library.missing_reason() is not None:
        pytest.skip(str(library.missing_reason()))

    class Machine(OnModel):
        kind = (backend, name)

    examples, steps = (8, 12) if backend == "native" else (3, 8)
    few = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(Machine, settings=few)


@needs_native
def test_little_memory_gives_the_same_results():
    """Samples, scores, drafts, beams and observations with four slots, and with enough."""
    result = []
    for memory in (16 << 20, 9 * STATE):
        lm = LanguageModel(model(), None, context=512, memory=memory, make_drafter=make_drafter_for)
        slots = lm.engine.tree.states
        assert slots is not None and (slots.count == 4) == (memory < 16 << 20)
        prompt = [3, 4, 5, 6] * 10
        samples = lm.samples(prompt, 3, max_tokens=20, seed=1, end=False)
        ranking = lm.beam(prompt, max_tokens=8, end=False, results=2)
        drafted = lm.generate(prompt, max_tokens=30, temperature=0, end=False, speculate="lookup")
        assert drafted.tokens == lm.generate(prompt, max_tokens=30, temperature=0, end=False).tokens
        look = lm.look(prompt, 11)
        result.append(
            (
                [sample.tokens for sample in samples],
                lm.score(prompt).logprobs,
                drafted.tokens,
                [text.tokens for text in ranking.generations],
                look.attention.tolist(),
            )
        )
        assert (slots.num_evicted > 0) == (slots.count == 4)
        lm.close()
    assert result[0] == result[1]


@needs_native
def test_a_single_sequence_rewinds_to_any_position():
    text, fresh = SingleSequence(model(), 200), [3, 4, 5, 6] * 10
    text.append(fresh)
    for length, more in ((40, 5), (39, 1), (44, 2), (7, 30), (30, 1), (20, 3), (0, 4)):
        text.rewind(min(length, len(text)))
        fresh = [*fresh[: len(text)], *range(9, 9 + more)]
        for token in fresh[len(text) :]:
            logits = np.array(text.append([token]))
        assert len(text) == len(fresh)
        alone = SingleSequence(model(), 200)
        assert np.array_equal(logits, alone.append(fresh))
