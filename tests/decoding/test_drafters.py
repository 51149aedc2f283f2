"""The drafters: what each proposes, and that it stops where it does not pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drafts_support import Says, a_request, step_facts
from unspool.decoding.speculative.controller import HOPELESS_ROUNDS, LENGTH_PACE, AdaptiveDrafter
from unspool.decoding.speculative.drafters import PromptLookup
from unspool.engine.engine import Engine
from unspool.engine.generation import Generation

# -- the drafters ----------------------------------------------------------------------------


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


@settings(max_examples=200, deadline=None)
@given(edits=EDITS, most=st.integers(1, 9))
def test_lookup_finds_the_latest_of_the_longest(edits: Any, most: int):
    drafter, text = PromptLookup(longest=4, shortest=1), [0]
    for back, extra in edits:  # also back to the beginning, and on with another text
        text = [*text[: max(0, len(text) - back)], *extra]
        assert drafter.propose(text, most) == looked_up(text, 4, 1, most)


# -- whether it pays -------------------------------------------------------------------------


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
