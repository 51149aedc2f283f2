"""Guards, grammars and edits: texts that are rewound and continued differently."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.engine_support import new_engine, nothing_leaks, pause_thread, request
from helpers.search_support import metered
from unspool import SettingsError, UnspoolError
from unspool.decoding.speculative.drafters import PredictedText
from unspool.engine.generation import Generation
from unspool.engine.results import StepQueue, StepStream
from unspool.sampling.guards import GuardPolicy
from unspool.sampling.monitors import BannedGuard, GuardError, PredicateGuard, SurpriseGuard


def written(policy: GuardPolicy) -> tuple[list[Any], Any]:
    """Steps as they are left after all retractions, and the stream they came from."""
    engine = new_engine(pages=200, vocab_size=26)
    stream = engine.submit(request([1, 2, 3], 60, guards=policy))
    steps: list[Any] = []
    for step in stream:
        if step.retracts:
            del steps[len(steps) - step.retracts :]
        steps.append(step)
    nothing_leaks(engine)
    return steps, stream


def test_what_is_banned_is_taken_back_and_written_differently():
    plain, _ = written(GuardPolicy((SurpriseGuard(spike=1e9),)))
    text = b"".join(step.bytes for step in plain).decode()
    word = text[20:22]
    guarded, stream = written(
        GuardPolicy((BannedGuard(words=(word,), whole_words=False),), retries=50)
    )
    changed = b"".join(step.bytes for step in guarded).decode()
    assert word in text and word not in changed
    at = text.index(word)
    assert changed[:at] == text[:at], "what stood before is left alone"
    assert "".join(step.text for step in guarded) == changed
    assert len(guarded) == len(plain) == 60
    assert any("rewound" in note for note in stream.notes)


def test_a_guard_can_stop_a_text():
    plain, _ = written(GuardPolicy((SurpriseGuard(spike=1e9),)))
    text = b"".join(step.bytes for step in plain).decode()
    policy = GuardPolicy((BannedGuard(words=(text[20:22],), whole_words=False),), action="stop")
    stopped, stream = written(policy)
    assert stopped[-1].finish_reason == "guard"
    assert len(stopped) < 60
    assert stream.notes[-1].startswith("stopped: ")


def test_a_predicate_that_raises_fails_its_text_alone():
    def judge(text: str, tokens: Any) -> bool:
        raise RuntimeError("my mistake")

    engine = new_engine()
    broken = engine.submit(request([1, 2], guards=GuardPolicy((PredicateGuard(judge),))))
    fine = engine.submit(request([1, 2]))
    with pytest.raises(GuardError, match="my mistake"):
        list(broken)
    assert len(list(fine)) == 20


def test_the_guard_takes_back_a_loop(lm: Any):
    options = {"temperature": 0, "max_tokens": 60, "end": False, "logit_bias": {" cat": 100}}
    looping = lm.generate("The", **options)
    guarded = lm.generate("The", guard="loop", **options)
    assert looping.text == " cat" * 60
    assert any(note.startswith("rewound") for note in guarded.notes)
    assert guarded.tokens[0] == looping.tokens[0] and guarded.tokens != looping.tokens
    assert guarded.text == lm.tokenizer.decode(guarded.tokens)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [7, 36, 150]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_grammars_hold(lm: Any):
    options = {"max_tokens": 80, "seed": 3, "temperature": 1.0, "explain": True}
    generation = lm.chat("Invent a person.", json_schema=PERSON, **options)
    assert generation.finish_reason == "stop"
    person = json.loads(generation.text)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)
    assert generation.steps[0].stages[0].name == "grammar"
    dated = lm.generate("Date:", regex=r" [0-9]{4}-[0-9]{2}-[0-9]{2}", max_tokens=30, seed=1)
    assert re.fullmatch(r" [0-9]{4}-[0-9]{2}-[0-9]{2}", dated.text)
    picked = lm.generate("The sky is", choice=[" blue", " green"], temperature=0)
    assert picked.text in (" blue", " green")
    lark = lm.generate("Sum:", grammar='start: NUM "+" NUM\nNUM: /[0-9]{1,3}/', max_tokens=20)
    assert re.fullmatch(r"[0-9]{1,3}\+[0-9]{1,3}", lark.text)
    gbnf = lm.generate("Yes or no?", grammar='root ::= "yes" | "no"', max_tokens=9)
    assert gbnf.text in ("yes", "no")


def test_a_grammar_with_drafts_guards_and_going_on_gives_the_same_text(lm: Any):
    options = {"json_schema": PERSON, "max_tokens": 60, "seed": 5, "temperature": 1.0}
    alone = lm.generate("Person:", **options)
    assert lm.generate("Person:", speculate="lookup", **options).tokens == alone.tokens
    assert alone.rewind(4).resume().tokens == alone.tokens
    letters = "[A-Z][a-z]{3,8}"
    name = lm.generate("Name:", regex=letters, seed=2, max_tokens=12).text
    other = lm.generate("Name:", regex=letters, seed=2, max_tokens=12, guard=f"pattern={name}")
    assert re.fullmatch(letters, other.text) and other.text != name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json_schema": {"type": "nonsense"}}, "schema"),
        ({"regex": "(("}, "regex|expression"),
        ({"regex": "a", "choice": ["b"]}, "only one"),
        ({"choice": []}, "choice"),
        ({"grammar": 7}, "grammar must be"),
        ({"guard": "lop"}, "did you mean 'loop'"),
        ({"speculate": "magic"}, "speculat"),
        ({"logit_bias": {9_000_000: 1.0}}, "token 9000000"),
    ],
)
def test_bad_constraints_are_refused_before_anything_runs(lm: Any, options: Any, words: str):
    runs = lm.engine.steps
    with pytest.raises(SettingsError, match=words) as caught:
        lm.generate("x", **options)
    assert "\n" not in str(caught.value)
    assert lm.engine.steps == runs


def test_rewind_choose_resume(tiny_lm: Any):
    first = tiny_lm.generate([5, 6, 7], max_tokens=20, seed=9, end=False, temperature=1.0)
    assert first.rewind(8).tokens == first.tokens[:8]
    assert first.rewind(-3).tokens == first.tokens[:-3]
    again = first.rewind(8).resume()
    assert again.tokens == first.tokens, "the same draws at the same positions"
    assert again.reused >= 10, "and nothing of what stayed was computed again"
    other = first.rewind(8).choose(42).resume()
    assert other.tokens[:9] == [*first.tokens[:8], 42] and len(other.tokens) == 20
    assert other.steps[8].chosen and not other.steps[9].chosen
    judged = tiny_lm.score([*first.prompt, *other.tokens]).logprobs
    assert [s.logprob for s in other.steps] == pytest.approx(judged[3:], abs=1e-4)
    assert first.tokens[8] != 42 and len(first.tokens) == 20, "the old text is as it was"
    continued = first.resume(max_tokens=10)
    assert continued.tokens[:20] == first.tokens and len(continued.tokens) == 30
    hot = first.rewind(2).resume(temperature=0)
    cold = first.rewind(2).resume(temperature=0)
    assert hot.tokens == cold.tokens


def test_max_tokens_of_resume_counts_new_tokens(tiny_lm: Any):
    options = {"seed": 9, "end": False, "temperature": 1.0}
    long = tiny_lm.generate([5, 6, 7], max_tokens=30, **options)
    six = tiny_lm.generate([5, 6, 7], max_tokens=6, **options)
    ten = six.resume(max_tokens=4)
    assert (ten.tokens, ten.finish_reason) == (long.tokens[:10], "length")
    assert len(ten.resume().tokens) == 14, "as many again as the last call allowed"
    assert len(six.resume().resume().tokens) == 18
    nothing = six.resume(max_tokens=0)
    assert (nothing.tokens, nothing.finish_reason) == (six.tokens, "length")
    assert six.rewind(2).resume(max_tokens=1).tokens == long.tokens[:3]
    assert six.rewind(2).resume().tokens == six.tokens, "without it, up to the old length"
    assert six.rewind(2).finish_reason == "interrupted"
    full = tiny_lm.generate([5] * 120, max_tokens=500, **options)
    assert (len(full.tokens), full.finish_reason) == (8, "context")
    continued = full.resume(max_tokens=4)
    assert (continued.tokens, continued.finish_reason) == (full.tokens, "context")


def test_alternatives(tiny_lm: Any):
    generation = tiny_lm.generate([5, 6, 7], max_tokens=6, seed=1, end=False, top=4)
    for index in (0, 3):
        options = generation.alternatives(index, top=4)
        explained = generation.steps[index].candidates
        assert [c.token for c in options] == [c.token for c in explained]
        assert [c.logprob for c in options] == pytest.approx(
            [c.logprob for c in explained], abs=1e-4
        )
    with pytest.raises(SettingsError, match="index must be from 0"):
        generation.alternatives(9)
    with pytest.raises(SettingsError, match="cannot rewind to 7"):
        generation.rewind(7)
    with pytest.raises(UnspoolError, match="token 999"):
        generation.choose(999)


def test_mirostat_goes_on_as_if_it_had_never_stopped(tiny_lm: Any):
    options = {"max_tokens": 24, "seed": 3, "end": False, "mirostat_tau": 4.0, "temperature": 1.0}
    full_text = tiny_lm.generate([5, 6, 7], **options)
    assert full_text.rewind(11).resume().tokens == full_text.tokens


def test_going_on_shows_every_character_once():
    """Tokens that are single bytes of a text full of long characters, cut anywhere."""
    data = "Grün 🌿 und 東京".encode()
    engine = new_engine(lambda t: bytes([data[t % len(data)]]), pages=200, vocab_size=256)

    class Source:
        def continue_generation(self, generation: Generation, **options: Any) -> Any:
            most = len(generation.steps) + options["max_tokens"]
            generation.request = dataclasses.replace(
                generation.request,
                limits=dataclasses.replace(generation.request.limits, max_tokens=most),
                written=tuple(generation.steps),
            )
            return engine.submit(generation.request)

    for cut in range(1, 24):
        first_request = request([1, 2], cut, seed=cut, limits={"stop": ("🌿 x",)})
        started = Generation(first_request, source=Source())
        list(started.extend(engine.submit(first_request)))
        continued = started.resume(max_tokens=24)
        full_text = b"".join(step.bytes for step in continued.steps).decode("utf-8", "replace")
        assert continued.text == full_text


def test_releasing_a_branch_that_somebody_waits_for_leaks_nothing():
    engine = new_engine(pages=50)
    branch, gate = engine.open([1] * 40), pause_thread(engine)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(engine.extend, branch)
        while len(engine.loop._commands) < 1:
            time.sleep(0.001)
        releasing = threads.submit(engine.release, branch)
        while len(engine.loop._commands) < 2:
            time.sleep(0.001)
        gate.set()  # both are carried out before the next step
        with pytest.raises(UnspoolError, match="released"):
            waiting.result(30)
        releasing.result(30)
    nothing_leaks(engine)


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"frequency_penalty": 0.4}], ids=str)
def test_steps_can_be_explained_afterwards(tiny_lm: Any, options: dict[str, Any]):
    sampling = {"max_tokens": 12, "seed": 3, "end": False, **options}
    silent = tiny_lm.generate([5, 6, 7], **sampling)
    explained = tiny_lm.generate([5, 6, 7], explain=True, top=4, **sampling)
    assert silent.tokens == explained.tokens
    assert not any(step.explained or step.stages for step in silent.steps)
    later = silent.explained(top=4)
    for after, other, plain in zip(later.steps, explained.steps, silent.steps, strict=True):
        assert (after.token, after.rank, after.text) == (other.token, other.rank, other.text)
        assert plain.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert after.entropy == pytest.approx(other.entropy, abs=1e-4)
        assert after.probability == pytest.approx(other.probability, abs=1e-4)
        assert [s.name for s in after.stages] == [s.name for s in other.stages]
        assert [c.token for c in after.candidates] == [c.token for c in other.candidates]
        assert (after.draw is None) == (other.draw is None)
    changed = silent.rewind(4).choose(42).resume().explained()
    assert changed.steps[4].token == 42 and changed.steps[4].chosen
    assert all(step.explained for step in changed.steps)


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
    options = {"temperature": 0, "max_tokens": 24}
    full_text = lm.generate("Once upon a time", **options).text
    stop = full_text[20:24]
    stopped, steps = lm.begin("Once upon a time", stop=["zzz", stop], **options)
    list(stopped.extend(steps))
    assert steps.stopped_by == stop and stopped.finish_reason == "stop"
    assert stopped.text == full_text[: full_text.index(stop)]
    unstopped = lm.stream("Once upon a time", stop=["zzz"], **options)
    list(unstopped)
    assert unstopped.stopped_by is None


def test_a_prediction_is_picked_up_again_behind_what_differs():
    ids = [10, 11, 12, 13, 14, 15, 16]
    drafter = PredictedText(ids, start=2)
    assert drafter.propose([1, 2], 3) == [10, 11, 12]
    assert drafter.propose([1, 2, 10, 11], 3) == [12, 13, 14]
    assert drafter.propose([1, 2, 10, 99, 13, 14], 9) == [15, 16]
    assert drafter.propose([1, 2, 98, 99], 9) == []
    assert drafter.propose([1, 2, *ids], 9) == []


def test_without_the_cache_every_token_reads_the_whole_text(tiny_lm):
    options = {"max_tokens": 6, "temperature": 0, "end": False}
    with metered(tiny_lm) as meter:
        cached = tiny_lm.generate([9, 8, 7, 6], **options)
    assert meter.tokens == 4 + 5
    with metered(tiny_lm) as meter:
        anew = tiny_lm.generate([9, 8, 7, 6], cache=False, **options)
    assert anew.tokens == cached.tokens and anew.reused == 0
    assert meter.tokens == 4 + 5 + 6 + 7 + 8 + 9
    with metered(tiny_lm) as meter:
        assert anew.resume(max_tokens=8, cache=True).tokens[:6] == cached.tokens
    assert meter.tokens < 10


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
