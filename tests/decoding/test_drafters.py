"""The drafters: what each proposes, and that it stops where it does not pay."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drafts_support import Says, a_request, step_facts
from helpers.null_model import NullModel, logits_after
from helpers.recurrent_null import RecurrentNull
from unspool.decoding.speculative import drafters
from unspool.decoding.speculative.controller import HOPELESS_ROUNDS, LENGTH_PACE, AdaptiveDrafter
from unspool.decoding.speculative.drafters import (
    DraftSequences,
    EarlierTexts,
    ModelDrafter,
    PromptLookup,
    SharedLookup,
    make_drafter,
)
from unspool.engine.engine import Engine
from unspool.engine.generation import Generation
from unspool.errors import ModelFileError, SettingsError


def looked_up(text: list[int], longest: int, shortest: int, most: int) -> list[int]:
    """What `PromptLookup` should say, in the simplest way."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if length < len(text) and text[end - length : end] == text[-length:]:
                grown = list(text)
                for n in range(most):
                    grown.append(grown[end + n])
                return grown[len(text) :]
    return []


EDITS = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.integers(0, 2), min_size=1, max_size=5)), max_size=20
)


@settings(max_examples=80, deadline=None)
@given(edits=EDITS, most=st.integers(1, 9))
def test_lookup_finds_the_latest_of_the_longest(edits: Any, most: int):
    drafter, text = PromptLookup(longest=4, shortest=1), [0]
    for back, extra in edits:  # also back to the beginning, and on with another text
        text = [*text[: max(0, len(text) - back)], *extra]
        assert drafter.propose(text, most) == looked_up(text, 4, 1, most)


def test_lookup_in_earlier_texts():
    earlier = EarlierTexts(capacity=40, shortest=3)
    assert earlier.propose([1, 2, 3], 4) == [], "there is none yet"
    earlier.record([1, 2, 3, 4, 5])
    earlier.record([9, 2, 3, 4, 6, 7])
    assert earlier.propose([8, 1, 2, 3], 4) == [4, 5], "a draft ends with its text"
    assert earlier.propose([2, 3, 4], 1) == [6], "the latest match"
    assert earlier.propose([3, 4], 4) == earlier.propose([5, 9, 2], 4) == [], "no match is shorter"
    assert earlier.propose([5, 6, 7], 4) == earlier.propose([4, 6, 7], 4) == []
    drafter = SharedLookup(earlier)
    assert drafter.propose([1, 2, 3], 2) == [4, 5]
    assert drafter.propose([5, 6, 5], 2) == [] and drafter.propose([5, 6, 5, 6], 2) == [5, 6]
    earlier.record(range(100, 140))
    assert earlier.propose([1, 2, 3], 4) == [], "the oldest tokens are dropped"
    assert earlier.propose([110, 111, 112], 2) == [113, 114]


def test_a_repeated_request_is_drafted(letters: Engine):
    make = make_drafter("lookup", Model())
    options = {"seed": 3, "temperature": 1.0, "max_tokens": 40}
    prompt = [1, 2, 3, 4, 5, 6, 7]
    plain = list(letters.submit(a_request(prompt, **options)))
    texts = [list(letters.submit(a_request(prompt, make, **options))) for _ in range(2)]
    for steps in texts:
        assert step_facts(steps) == step_facts(plain)
    first, second = (Counter(step.draft for step in steps) for steps in texts)
    assert second["accepted"] > max(25, first["accepted"]) and second["rejected"] <= 1


def rounds(
    drafter: AdaptiveDrafter, right: Callable[[int], int], cost: Callable[[int], float], n: int
):
    """Play rounds: `right(n)` of n drafted tokens are accepted, at a cost of `cost(n)`."""
    notes, lengths = [], []
    for _ in range(n):
        draft = drafter.propose([1, 2, 3], 100)
        lengths.append(len(draft))
        note = drafter.learn(len(draft), right(len(draft)), cost(len(draft)))
        notes += [note] if note else []
    return notes, lengths


def test_drafts_grow_while_they_are_right():
    drafter = AdaptiveDrafter(Says(lambda tokens: [7] * 50), longest=16)
    notes, lengths = rounds(drafter, lambda k: k, lambda k: 1 + k / 8, 12)
    assert lengths == [0, 0, 4, 8, *[16] * 8] and notes == []
    assert drafter.gain is not None and drafter.gain > 4
    _, lengths = rounds(drafter, lambda k: min(k, 1), lambda k: 1 + k / 20, 5)
    assert lengths == [16, 8, 4, 2, 2]


def test_it_stops_when_nothing_is_right_and_tries_again():
    drafter = AdaptiveDrafter(Says(lambda tokens: [7] * 50))
    notes, lengths = rounds(drafter, lambda k: 0, lambda k: 1 + k / 2, 400)
    assert lengths[:7] == [0, 0, 4, 2, 1, 1, 0]
    assert "accepted 0 of 8 tokens" in notes[0] and "times an ordinary one" in notes[0]
    assert (
        f"after {LENGTH_PACE.first_pause} tokens" in notes[0]
        and f"after {2 * LENGTH_PACE.first_pause}" in notes[1]
    )
    assert (
        lengths[6 : 6 + LENGTH_PACE.first_pause] == [0] * LENGTH_PACE.first_pause
        and lengths[6 + LENGTH_PACE.first_pause] > 0
    )
    assert sum(map(bool, lengths)) == HOPELESS_ROUNDS * len(notes) <= 20
    # The tide turns: it is noticed, and the failures are forgotten.
    _, lengths = rounds(drafter, lambda k: k, lambda k: 1.1, 700)
    assert lengths[-1] == 16


def test_it_stops_when_right_drafts_cost_too_much():
    drafter = AdaptiveDrafter(Says(lambda tokens: [7] * 4))
    notes, _ = rounds(drafter, lambda k: k // 2, lambda k: 1.0 if k == 0 else 4.5, 30)
    assert len(notes) == 1 and "4.5 times" in notes[0]
    dear = AdaptiveDrafter(Says(lambda tokens: [7] * 4))
    _, lengths = rounds(dear, lambda k: k, lambda k: 1.0 if k == 0 else 17.0, 30)
    assert sum(map(bool, lengths)) == 2, "a machine on which runs of many tokens are a disaster"
    cheap = AdaptiveDrafter(Says(lambda tokens: [7] * 4))
    assert rounds(cheap, lambda k: k // 2, lambda k: 1.0 if k == 0 else 1.2, 90)[0] == []


def test_stopping_is_said_in_the_notes(letters: Engine):
    plain = list(letters.submit(a_request([1, 2], seed=1, max_tokens=60)))
    full = [1, 2, *(step.token for step in plain)]
    make = lambda request: AdaptiveDrafter(  # noqa: E731
        Says(lambda tokens: [(full[len(tokens)] + 1) % 12] * 3)
    )
    request = a_request([1, 2], make, seed=1, max_tokens=60)
    generation = Generation(request)
    assert step_facts(list(generation.extend(letters.submit(request)))) == step_facts(plain)
    assert any(note.startswith("drafting stopped: accepted 0 of") for note in generation.notes)
    assert Counter(step.draft for step in generation.steps)["rejected"] <= 3 * HOPELESS_ROUNDS


VOCABULARY = 40


class Model:
    """What is asked of a session, on a backend without a model."""

    view_of = None
    context = 4096

    def __init__(self, *, pages: int | None = None, states: int = 0) -> None:
        self.backends: list[NullModel] = []
        self.config: Any = SimpleNamespace(
            require_causal=lambda: None, kv_floats_per_token=1, state_bytes=states,
            vocab_size=VOCABULARY,
        )  # fmt: skip

        def build(memory: int, context: int) -> NullModel:
            shape = {"pages": pages or memory // 16, "vocab_size": VOCABULARY, "context": context}
            backend = RecurrentNull(states=12, **shape) if states else NullModel(**shape)
            self.backends.append(backend)
            return backend

        self.model: Any = SimpleNamespace(backend=build)

    @property
    def tokenizer(self) -> Any:
        raise ModelFileError("no vocabulary")


def drafted_for(model: Any) -> list[int]:
    drafter = ModelDrafter(model, a_request([1, 2, 3], context=512, max_tokens=8))
    return drafter.propose([1, 2, 3], 3)


@pytest.mark.parametrize("states", [0, 1000])
@pytest.mark.parametrize("pages", [None, 30])
def test_texts_grow_and_are_rewound_beside_each_other(pages: int | None, states: int):
    """Also where not all of them fit: the others are read again."""
    chance = random.Random(5)
    model: Any = Model(pages=pages, states=states)
    shared = DraftSequences(model)
    texts = [(shared.open(100), [1, 2, 3, 4, 5]) for _ in range(8)]
    for _ in range(150):
        text, tokens = chance.choice(texts)
        del tokens[chance.randrange(2, len(tokens) + 1) :]
        tokens += [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 5))]
        logits = None
        while logits is None:
            logits = text.logits(tokens, chance.randrange(1, 9))
        assert np.array_equal(logits, logits_after(tokens, VOCABULARY))
    assert len(model.backends) == 1
    del text, texts, _
    gc.collect()
    loop: Any = shared._loop
    loop.tree.index.clear()
    assert loop.tree.pool.used == 0 and not shared._capacities


def test_a_long_text_is_read_in_pieces():
    model: Any = Model()
    text = DraftSequences(model).open(100)
    tokens = list(range(30))
    assert [text.logits(tokens, 8) is None for _ in range(4)] == [True, True, True, False]
    assert [sum(run) for run in model.backends[0].runs] == [8, 8, 8, 6]


def test_the_backend_grows_with_the_texts_and_goes_with_the_last():
    model: Any = Model()
    shared = DraftSequences(model)
    first = shared.open(100)
    tokens = list(range(20))
    assert np.array_equal(first.logits(tokens), logits_after(tokens, VOCABULARY))
    extra = [shared.open(4000) for _ in range(3)]
    for text in (*extra, first):
        assert np.array_equal(text.logits(tokens), logits_after(tokens, VOCABULARY))
    assert [backend.page_count * 4 >= size for backend, size in zip(
        model.backends, (drafters._MIN_TOKENS, 12_100), strict=True
    )] == [True, True]  # fmt: skip
    del first, extra, text
    gc.collect()
    assert shared._loop is None, "room for long texts is not kept for none"


def test_drafters_of_one_model_share_its_backend():
    lm: Any = Model()
    draft: Any = Model()
    request = a_request([1, 2, 3], context=512, max_tokens=8)
    expected = drafted_for(Model())
    make: Any = make_drafter("model:small", lm, lambda name: draft)
    drafters = [make(request) for _ in range(4)]
    drafts = [drafter.drafter.propose([1, 2, 3], 3) for drafter in drafters]
    del drafters
    gc.collect()
    drafts.append(make(request).drafter.propose([1, 2, 3], 3))
    assert all(draft == expected for draft in drafts)
    assert len(draft.backends) == 1, "built once, for requests at the same time and one by one"


def test_what_nobody_drafts_with_is_released():
    model: Any = Model()
    drafted_for(model)
    backend = weakref.ref(model.backends.pop())
    gc.collect()
    assert backend() is None


def test_loading_a_draft_model_holds_up_no_other_request():
    lm: Any = Model()
    go_on, entered = threading.Event(), threading.Event()

    def load(name: str) -> Any:
        entered.set()
        assert go_on.wait(60)
        return Model()

    with ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(make_drafter, "model:slow", lm, load) for _ in range(2)]
        assert entered.wait(60)
        assert make_drafter("lookup", lm, load), "it waits for no model"
        go_on.set()
        assert slow[0].result(60) is slow[1].result(60), "both wait for the same model"


def test_a_model_that_could_not_be_loaded_is_tried_again():
    lm: Any = Model()

    def fail(name: str) -> Any:
        raise SettingsError("no such model")

    for _ in range(2):
        with pytest.raises(SettingsError, match="no such model"):
            make_drafter("model:missing", lm, fail)
    assert callable(make_drafter("model:missing", lm, lambda name: Model()))
