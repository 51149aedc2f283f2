"""What a step gives is on its way to the host before the step ends, and stays what it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.cuda_support import PAGES, backend, cuda_model
from helpers.paged_texts import Library, RandomCheckpoint, batch_of, config

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from unspool.backends.cuda import step_io  # noqa: E402
from unspool.backends.cuda.step_io import (  # noqa: E402
    DecodeStates,
    SegmentCopy,
    StepInputs,
    StepOutputs,
)
from unspool.engine.loop import concat_logits  # noqa: E402

LINES, PROMPTS, VOCABULARY = 8, 20, 5


def filled() -> StepOutputs:
    """The n-th place holds pick 10 n, and n as its log-probability."""
    outcomes = StepOutputs(LINES, PROMPTS, VOCABULARY, torch.device("cpu"))
    outcomes.picks.copy_(10 * torch.arange(LINES + PROMPTS))
    outcomes.decode_logprobs.copy_(torch.arange(LINES))
    outcomes.prefill_logprobs.copy_(LINES + torch.arange(PROMPTS))
    return outcomes


@pytest.mark.parametrize(
    ("places", "prompts"), [([0], False), ([0, 3, 7], False), ([2, 8, 27], True), ([], False)]
)
def test_each_pick_comes_with_its_own_logprob(places: list[int], prompts: bool):
    where = np.array(places, np.int64)
    result = filled().copy_to_host(where, None, None, has_prefill=prompts).result()
    assert result.tokens.tolist() == [10 * place for place in places]
    assert result.logprobs.tolist() == places
    assert result.logits.shape == (0, VOCABULARY) and not result.failures


def test_a_pick_that_is_none_fails_alone():
    outcomes = filled()
    outcomes.picks[1] = -1
    result = outcomes.copy_to_host(np.arange(3), None, None, has_prefill=False).result()
    assert list(result.failures) == [1]


@pytest.mark.parametrize("rows", [3, 200])
def test_all_is_copied_before_the_end_of_the_step(rows: int, monkeypatch: pytest.MonkeyPatch):
    """The event that tells of the end is recorded last; what the next step writes is not seen."""
    happened: list[str] = []
    usual = torch.Tensor.copy_

    def copied(target: Any, source: Any, **options: Any) -> Any:
        happened.append("copy")
        assert target.dtype == source.dtype and options == {"non_blocking": True}
        return usual(target, source, **options)

    class Event:
        def record(self) -> None:
            happened.append("event")

        def synchronize(self) -> None:
            happened.append("waited")

    outcomes = filled()
    for room in outcomes._host_buffers:
        room.done = Event()  # type: ignore[assignment]
    logits = torch.randn(rows, VOCABULARY).bfloat16()
    expected = logits.float()
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    flight = outcomes.copy_to_host(np.arange(2), logits, None, has_prefill=False)
    assert happened.pop() == "event" and set(happened) == {"copy"}
    monkeypatch.undo()
    logits.zero_()
    outcomes.picks.fill_(5)
    result = flight.result()
    assert isinstance(result.logits, np.ndarray) and happened[-1] == "waited"
    assert np.array_equal(result.logits, expected.numpy())
    assert result.tokens.tolist() == [0, 10]


def test_logits_are_read_after_the_next_step_was_launched():
    shape = config(layers=1, context=128)
    results = []
    for later in (False, True):
        running, library = (
            backend(cuda_model(RandomCheckpoint(shape))),
            Library(PAGES, shape.vocab_size),
        )
        text = library.text(6)
        flights, logits = [], []
        for _ in range(3):
            flights.append(running.launch(batch_of([(text, 2)])))
            text.read += 2
            if not later:
                logits.append(flights[-1].result().logits)
        results.append(logits or [flight.result().logits for flight in flights])
    assert np.array_equal(*map(np.concatenate, results))


def test_logits_of_different_places_are_joined_on_the_host():
    """Few rows are brought there with their step, many stay on the device."""
    joined_logits = concat_logits([np.zeros((1, 4), np.float32), torch.ones(2, 4)])
    assert isinstance(joined_logits, np.ndarray) and joined_logits.sum(1).tolist() == [0, 4, 4]
    assert torch.is_tensor(concat_logits([torch.ones(1, 4), torch.ones(2, 4)]))


@pytest.fixture
def by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy as on a GPU; blocks are small, as the interpreter is slow."""
    monkeypatch.setattr(step_io, "_COPY_BLOCK", 64)
    monkeypatch.setattr(SegmentCopy, "__call__", SegmentCopy.launch)


@pytest.mark.usefixtures("by_the_kernel")
def test_the_picks_of_the_first_rows_are_copied():
    result = filled().copy_to_host(np.array([0, 2]), None, None, has_prefill=False).result()
    assert (result.tokens.tolist(), result.logprobs.tolist()) == ([0, 20], [0, 2])


@pytest.mark.usefixtures("by_the_kernel")
def test_every_input_of_the_first_rows_is_copied():
    """Into what another step left there; also with an odd number of rows."""
    rows, count, size, states = 5, 2, 3, np.array([[7, 8], [9, 10]])
    inputs = StepInputs(rows, torch.zeros(rows), 4, 0, torch.device("cpu"))
    inputs._words.fill_(-5)
    floats, ints = np.arange(12.0).reshape(2, 6), np.arange(12).reshape(2, 6) + 50
    inputs.send(
        count, size, np.array([11, 12]), np.array([3, 4]), np.array([5, 6]), np.array([1, 2]),
        (np.array([20, 21]), np.array([30, 31])),
        (np.arange(2), floats, ints, np.array([[1, 2], [3, 4]])), np.array([40, 41]),
        DecodeStates(np.arange(3), states, np.array([[1, 60]])),
    )  # fmt: skip
    rest = [-5] * (rows - size)
    assert inputs.tokens.tolist()[:size] == [11, 12, 0]
    assert inputs.positions.tolist() == [3, 4, 0, *rest]
    assert inputs.ends.tolist() == [5, 6, 1, *rest]
    assert inputs.slots.tolist() == [2, 3, 0, *rest]
    assert inputs.adapters.tolist() == [40, 41, 0, *rest]
    assert inputs.canvas[:size].tolist() == [[1, 2], [3, 4], [-1, -1]]
    assert inputs.floats[:count].tolist() == floats.tolist()
    assert inputs.ints[:count].tolist() == ints.tolist()
    assert inputs.floats[count].tolist() == list(step_io._GREEDY)
    starts, reads, writes, captures = (x.tolist() for x in inputs.state_tensors(size))
    assert (starts, reads[:2], writes[:2], captures) == (
        [0, 1, 2, 2],
        [7, 9],
        [8, 10],
        [-1, 60, -1],
    )
    updates = inputs.updates.tolist()
    assert updates[:3] == [2, 20, 21] and updates[1 + step_io.MAX_TABLE_UPDATES :][:2] == [30, 31]
