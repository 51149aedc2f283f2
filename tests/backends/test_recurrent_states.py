"""Recurrent layers: all backends agree, and the native one is bit-identical for any chunks, states
and batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from helpers.paged_texts import batch_of
from helpers.recurrent_texts import SHAPES, Shelf, checkpoint, native, plain, some_tokens
from helpers.single_sequence import SingleSequence
from helpers.states_machine import StatesMachine
from unspool import native as library
from unspool.backends.cpu.model import CpuModel
from unspool.backends.step import Backend, Floats, ObserveRequest, StepLimits
from unspool.engine.engine import Engine
from unspool.errors import ModelFileError, UnspoolError
from unspool.lm import LanguageModel
from unspool.loading import make_drafter_for
from unspool.model.config import Recurrence
from unspool.model.files.checkpoint import load_transformer

pytestmark = pytest.mark.skipif(
    library.missing_reason() is not None, reason=str(library.missing_reason())
)
LENGTH = 90


def assert_close(actual: Floats, expected: Floats) -> None:
    assert actual.shape == expected.shape
    differs = (actual.view(np.uint32) != expected.view(np.uint32)).any(axis=-1)
    assert not differs.any(), f"tokens {np.flatnonzero(differs)[:10]} of {len(differs)} differ"


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest) -> tuple[str, Shelf, list[int], Floats]:
    shelf, tokens = Shelf(native(request.param)), some_tokens(LENGTH)
    expected = shelf.read_all(tokens, LENGTH)
    assert np.isfinite(expected).all() and expected.std() > 0.2
    return request.param, shelf, tokens, expected


def test_native_is_torch(case):
    name, shelf, tokens, expected = case
    reference = Shelf(plain(name)).read_all(tokens, 37)
    assert np.abs(expected - reference).max() < 2e-3
    taps = ObserveRequest(residuals=np.arange(20), attention=np.array([3, 17]), parts=np.arange(20))
    observed = []
    for shelf in (Shelf(native(name)), Shelf(plain(name))):
        text = shelf.text(tokens)
        shelf.read([(text, 5)])
        _, inside = shelf.read([(text, 20)], look=taps)
        assert inside is not None
        observed.append(inside)
    actual, their = observed
    for a, b in zip(actual.attention, their.attention, strict=True):
        assert np.abs(a - b).max() < 1e-3
        has_attention = np.array(SHAPES[name]["mixers"]) == "attention"
        assert np.abs(a.sum(-1) - has_attention[:, None]).max() < 1e-3, "a recurrent layer has none"
    for a, b in zip(actual.recurrent, their.recurrent, strict=True):
        assert np.array_equal(np.isnan(a), np.isnan(b)) and not np.isnan(a).all()
        assert np.nanmax(np.abs(a - b)) < 1e-3
        stateless = np.isin(SHAPES[name]["mixers"], ("attention", "none"))
        assert (np.isnan(a).all((1, 2)) == stateless).all()
    assert np.abs(actual.parts - their.parts).max() < 1e-3


def test_in_chunks_and_token_by_token(case):
    _, shelf, tokens, expected = case
    assert_close(shelf.read_all(tokens, 1), expected)
    assert_close(shelf.read_all(tokens, 37), expected)
    text = shelf.text(tokens)
    result = [shelf.read([(text, count)], in_place=True)[0][0] for count in (3, 1, 1, 60, 2, 23)]
    assert_close(np.concatenate(result), expected)


def test_on_one_thread(case):
    name, _, tokens, expected = case
    assert_close(Shelf(native(name, threads=1)).read_all(tokens, 50), expected)


def test_among_others(case):
    _, shelf, tokens, expected = case
    chance = np.random.default_rng(1)
    texts = [shelf.text(some_tokens(int(n), seed=n)) for n in chance.integers(2, 40, 10)]
    texts.append(shelf.text(tokens))
    result: dict[int, list[Floats]] = {number: [] for number in range(len(texts))}
    while unread := [n for n, text in enumerate(texts) if text.read < len(text.tokens)]:
        chosen = chance.permutation(unread)[: int(chance.integers(1, 9))].tolist()
        parts = [
            (texts[n], min(int(chance.choice([1, 1, 9])), len(texts[n].tokens) - texts[n].read))
            for n in chosen
        ]
        for number, logits in zip(chosen, shelf.read(parts)[0], strict=True):
            result[number].append(logits)
    assert_close(np.concatenate(result[10]), expected)
    assert_close(np.concatenate(result[4]), shelf.read_all(texts[4].tokens, 40))


def test_forks_share_a_state_and_captures_save_intermediate_ones(case):
    _, shelf, tokens, expected = case
    first = shelf.text(tokens)
    early, late = shelf.slots.pop(), shelf.slots.pop()
    shelf.read([(first, 50)], captures=[(9, early), (41, late), (49, shelf.slots.pop())])
    forks = []
    for slot, read in ((early, 10), (late, 42), (first.slot, 50), (first.slot, 50)):
        fork = shelf.text(tokens)
        fork.pages, fork.slot, fork.read = first.pages, slot, read
        forks.append(fork)
    result = shelf.read([(fork, len(tokens) - fork.read) for fork in forks])[0]
    for fork, logits in zip((10, 42, 50, 50), result, strict=True):
        assert_close(logits, expected[fork:])


@pytest.mark.parametrize("make", [native, plain])
def test_states_that_do_not_exist_are_rejected(make):
    shelf = Shelf(make("delta"))
    text = shelf.text(some_tokens(5))
    for states, captures in (
        ([[0, shelf.backend.state_count]], []),
        ([[-2, 0]], []),
        ([[0, -1]], []),
        ([], []),
        ([[0, 1]], [[0, shelf.backend.state_count]]),
        ([[0, 1]], [[5, 2]]),
        ([[0, 1]], [[3, 2], [1, 3]]),
    ):
        batch = batch_of([(text, 5)])
        batch.state_slots = np.array(states, np.int64).reshape(-1, 2)
        batch.state_captures = np.array(captures, np.int64).reshape(-1, 2)
        with pytest.raises(UnspoolError, match="does not exist"):
            shelf.backend.launch(batch)


def test_torch_handles_states_like_native():
    shelf, tokens = Shelf(plain("delta")), some_tokens(LENGTH)
    expected = shelf.read_all(tokens, LENGTH)
    assert np.abs(shelf.read_all(tokens, 7) - expected).max() < 1e-4
    first, slot = shelf.text(tokens), shelf.slots.pop()
    shelf.read([(first, 50)], captures=[(19, slot)])
    fork = shelf.text(tokens)
    fork.pages, fork.slot, fork.read = first.pages, slot, 20
    other = shelf.text(tokens)
    result = shelf.read([(fork, 30), (first, 1), (other, 1)])[0]
    assert np.abs(np.concatenate(result) - expected[[*range(20, 51), 0]]).max() < 1e-4


@pytest.mark.parametrize("name", ["conv", "delta", "mamba2"])
def test_the_torch_recurrence_is_bit_identical_in_any_chunks(name: str):
    model = load_transformer(checkpoint(name))
    mixer = next(layer.mixer for layer in model.layers if layer.mixer is not None)
    x = torch.randn(3, 40, model.config.width, generator=torch.Generator().manual_seed(0))
    parts = mixer.project(x)
    full, state = mixer.recur(parts, mixer.zero_state(3, x.device))
    now, result = mixer.zero_state(1, x.device), []
    for start, end in ((0, 1), (1, 2), (2, 19), (19, 40)):
        piece, now = mixer.recur(tuple(part[1:2, start:end] for part in parts), now)
        result.append(piece)
    assert torch.equal(torch.cat(result, 1), full[1:2]) and torch.equal(now, state[1:2])


def test_limits_of_the_kernels():
    for changes in ({"conv_kernel": 9}, {"key_width": 300}):
        shape = {"key_heads": 2, "value_heads": 2, "key_width": 8, "value_width": 8}
        recurrence = Recurrence(**{"conv_kernel": 4, **shape, **changes})
        with pytest.raises(ModelFileError, match="backend='torch'"):
            CpuModel(checkpoint("delta", recurrence=recurrence), store=None, threads=1, kv_bits=16)


# -- Models with recurrent layers: any use of a sequence is bit-identical to a fresh run ----------


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
        self.states_by_tokens: dict[tuple[int, ...], Any] = {}
        return created

    def expected(self, tokens: list[int]) -> Any:
        key = tuple(tokens)
        if key not in self.states_by_tokens:
            self.single_process.call(self.single_process.tree.index.clear)
            branch = self.single_process.open(tokens)
            self.states_by_tokens[key] = np.asarray(self.single_process.extend(branch))[-1].copy()
            branch.release()
        return self.states_by_tokens[key]

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "single_process"):
            self.single_process.close()


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", ["conv", "delta", "mamba2", "halves"])
def test_bits_of_a_fresh_run(backend: str, name: str):
    class Machine(OnModel):
        kind = (backend, name)

    examples, steps = (4, 12) if backend == "native" else (2, 8)
    few = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(Machine, settings=few)


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
        result.append([text.tokens for text in (*samples, *ranking.generations, drafted)])
        result[-1] += [lm.score(prompt).logprobs, look.attention.tolist()]
        assert (slots.num_evicted > 0) == (slots.count == 4)
        lm.close()
    assert result[0] == result[1]


def test_a_single_sequence_rewinds_to_any_position():
    text, fresh = SingleSequence(model(), 200), [3, 4, 5, 6] * 10
    text.append(fresh)
    for length, extra in ((40, 5), (39, 1), (44, 2), (7, 30), (30, 1), (20, 3), (0, 4)):
        text.rewind(min(length, len(text)))
        fresh = [*fresh[: len(text)], *range(9, 9 + extra)]
        for token in fresh[len(text) :]:
            logits = np.array(text.append([token]))
        assert len(text) == len(fresh)
        alone = SingleSequence(model(), 200)
        assert np.array_equal(logits, alone.append(fresh))
