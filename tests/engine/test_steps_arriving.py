"""What a reader of steps can know without waiting, and what a generation is gone on with."""

from __future__ import annotations

import threading

import pytest

from unspool.decoding.speculative.drafters import PredictedText
from unspool.engine.results import StepQueue, StepStream
from unspool.errors import UnspoolError


def read_steps(stream: StepStream, count: int) -> list[int]:
    """Tokens, as a listener learns of them."""
    news, tokens, ended = threading.Event(), list[int](), False
    stream.add_listener(news.set)
    while not ended and len(tokens) < count:
        assert news.wait(30)
        news.clear()
        steps, ended = stream.read_available()
        tokens += [step.token for step in steps]
    return tokens


def test_a_listener_is_told_of_everything(tiny_lm):
    options = {"max_tokens": 20, "temperature": 0, "end": False}
    expected = tiny_lm.generate([1, 2, 3], **options).tokens
    assert read_steps(tiny_lm.stream([1, 2, 3], **options), 20) == expected
    finished = tiny_lm.stream([1, 2, 3], **options)
    for step in finished:
        first = step.token
        break
    assert first == expected[0]
    steps, _ = finished.read_available()
    assert [first, *(step.token for step in steps)] == expected[: len(steps) + 1]


def test_an_error_comes_behind_the_steps():
    queue = StepQueue()
    stream = StepStream(queue)
    calls: list[int] = []
    queue.end(UnspoolError("it broke"))
    stream.add_listener(lambda: calls.append(1))  # called immediately: a step is there already
    assert calls
    with pytest.raises(UnspoolError, match="it broke"):
        stream.read_available()
    assert stream.read_available() == ([], True)


def test_which_stop_string_it_was(lm):
    full_text = lm.generate("Once upon a time", temperature=0, max_tokens=24).text
    stream = lm.stream(
        "Once upon a time", temperature=0, max_tokens=24, stop=["zzz", full_text[20:24]]
    )
    list(stream)
    assert stream.stopped_by == full_text[20:24]
    unstopped = lm.stream("Once upon a time", temperature=0, max_tokens=4, stop=["zzz"])
    list(unstopped)
    assert unstopped.stopped_by is None


def test_a_prediction_is_drafted_and_counted(lm):
    prompt = lm.tokenizer.encode("Once upon a time")
    plain = lm.generate(prompt, temperature=0, max_tokens=48)
    drafter = PredictedText(plain.tokens, start=len(prompt))
    stream = lm.stream(prompt, temperature=0, max_tokens=48, speculate=drafter)
    assert [step.token for step in stream] == plain.tokens
    assert stream.accepted == stream.drafted >= 40


def test_a_prediction_is_picked_up_again_behind_what_differs():
    ids = [10, 11, 12, 13, 14, 15, 16]
    drafter = PredictedText(ids, start=2)
    assert drafter.propose([1, 2], 3) == [10, 11, 12]
    assert drafter.propose([1, 2, 10, 11], 3) == [12, 13, 14]
    assert drafter.propose([1, 2, 10, 99, 13, 14], 9) == [15, 16]
    assert drafter.propose([1, 2, 98, 99], 9) == []
    assert drafter.propose([1, 2, *ids], 9) == []


def test_without_the_cache_every_token_reads_the_whole_text(tiny_lm, monkeypatch):
    backend = tiny_lm.engine.backend
    usual, read = backend.launch, list[int]()

    def counted(batch):
        read.append(len(batch.tokens))
        return usual(batch)

    monkeypatch.setattr(backend, "launch", counted)
    options = {"max_tokens": 6, "temperature": 0, "end": False}
    cached = tiny_lm.generate([9, 8, 7, 6], **options)
    assert sum(read) == 4 + 5
    read.clear()
    anew = tiny_lm.generate([9, 8, 7, 6], cache=False, **options)
    assert anew.tokens == cached.tokens and anew.reused == 0
    assert sum(read) == 4 + 5 + 6 + 7 + 8 + 9
    read.clear()
    assert anew.resume(max_tokens=8, cache=True).tokens[:6] == cached.tokens
    assert sum(read) < 10


def test_going_on_step_by_step(lm):
    draft = lm.prepare_generation("The capital of Germany is", temperature=0, max_tokens=6)
    assert not draft.steps and draft.prompt
    continued, steps = draft.start_resume()
    assert [step.token for step in continued.extend(steps)] == lm.generate(
        "The capital of Germany is", temperature=0, max_tokens=6
    ).tokens
    ids = lm.tokenizer.encode(" 🙂!")
    edited = continued.rewind(2).choose(ids)
    assert edited.text.endswith(" 🙂!") and edited.tokens[2:] == ids
    hot = edited.resume(temperature=1.3, top_k=0, seed=4)
    cold = hot.resume(temperature=0, top_k=None, seed=None)
    assert cold.settings.top_k == 40 and cold.settings.temperature == 0
    assert cold.tokens[: len(hot.tokens)] == hot.tokens
