"""Recurrent states on the engine: what is kept, what is computed again, what goes first."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.null_model import logits_after
from helpers.recurrent_null import RecurrentNull
from helpers.slow_device import SlowDevice
from helpers.states_machine import END, Guesses, StatesMachine, max_recomputed, request
from unspool.backends.step import num_pages_and_states
from unspool.engine.canvas import CanvasKind, open_canvas
from unspool.engine.engine import Engine
from unspool.engine.states import DENSE, StatePool, is_kept, message_ends
from unspool.errors import SettingsError, UnspoolError

StatesMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestStates = StatesMachine.TestCase

SIZE = 16


def engine_of(**shape: Any) -> tuple[Engine, RecurrentNull, StatePool]:
    backend = RecurrentNull(**{"pages": 2000, "page_size": SIZE, "context": 20_000, **shape})
    engine = Engine(backend, lambda token: b"x")
    assert engine.tree.states is not None
    return engine, backend, engine.tree.states


def text_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 40, count).tolist()


def read_by(backend: RecurrentNull, work: Any) -> int:
    """How many tokens the model reads for something."""
    before = sum(map(sum, backend.runs))
    work()
    return sum(map(sum, backend.runs)) - before


def write(engine: Engine, prompt: list[int], count: int, drafter: Any = None) -> list[int]:
    return [step.token for step in engine.submit(request(prompt, count, drafter))]


@given(st.integers(0, 4000), st.integers(0, 4000))
def test_kept_borders_are_never_further_apart_than_promised(tip: int, back: int):
    """After a rewind, at most `max_recomputed` tokens lie after the nearest state."""
    place = max(0, tip * SIZE - back)
    positions = [border for border in range(1, tip + 1) if is_kept(border, tip)]
    nearest = max((b * SIZE for b in positions if b * SIZE <= place), default=0)
    assert place - nearest <= max_recomputed(back, SIZE)
    assert len(positions) <= DENSE + (DENSE // 2 + 1) * max(1, math.log2(tip + 1))


@given(st.integers(1, 400))
def test_what_is_not_kept_any_more_was_kept_before_and_never_comes_back(tip: int):
    for border in range(1, tip + 1):
        assert is_kept(border, tip) or not is_kept(border, tip + 1)


def test_message_ends():
    assert message_ends([5, END, 6, 7, END, 8], {END}) == [2, 5]
    assert message_ends([END] * 40, {END}) == [1, *range(33, 41)]


def test_memory_is_shared_between_pages_and_states():
    assert num_pages_and_states(1000, 10, 0) == (100, 0)
    assert num_pages_and_states(1000, 10, 1) == (91, 90), "one small state for every page"
    assert num_pages_and_states(1000, 10, 100) == (50, 5), "half of it for large ones"
    assert num_pages_and_states(500, 10, 100) == (10, 4), "at least enough to run"
    with pytest.raises(SettingsError, match=r"4 recurrent states \(400 bytes\)"):
        num_pages_and_states(400, 10, 100)
    with pytest.raises(UnspoolError, match="at least 2 slots"):
        StatePool(1, SIZE)


@pytest.mark.parametrize("back", [1, 100, 3000])
def test_a_rewind_computes_little_again(back: int):
    engine, backend, _ = engine_of(states=200)
    text = text_of(4000)
    branch = engine.open(text)
    engine.extend(branch)
    place = 4000 - back
    branch.rewind(place)
    again = read_by(backend, lambda: branch.append([7]))
    assert again <= 1 + max_recomputed(back, SIZE)
    branch.rewind(place)
    assert read_by(backend, lambda: branch.append([8])) <= SIZE, "the second time it is known"
    expected = logits_after([*text[:place], 9], 40)
    branch.rewind(place)
    assert np.array_equal(np.asarray(branch.append([9]))[0], expected)


def test_a_text_that_is_written_keeps_few_states():
    engine, backend, states = engine_of(states=200)
    branch = engine.open(text_of(40))
    engine.extend(branch)
    for place in range(600):
        branch.append([place % 38 + 2])
    pages = branch.length // SIZE
    assert states.used <= DENSE + (DENSE // 2 + 1) * math.log2(pages) + pages / SIZE + 4
    assert states.num_evicted == 0
    assert backend.captured <= 8, "it writes where it is kept, and copies nothing"


def test_the_same_prompt_again_is_not_read_again():
    engine, backend, _ = engine_of()
    prompt = text_of(200)
    write(engine, prompt, 5)
    assert read_by(backend, lambda: write(engine, prompt, 1)) == 1


def test_the_next_turn_of_a_chat_goes_on_where_the_last_one_ended():
    engine, backend, _ = engine_of()
    prompt = text_of(200)
    answer = write(engine, prompt, 20)
    turn = [*prompt, *answer[:-1], 7, 8, 9]
    assert read_by(backend, lambda: write(engine, turn, 1)) <= 4


def test_another_chat_with_the_same_first_message_begins_behind_it():
    engine, _, _ = engine_of()
    system = [*text_of(100), END]
    for seed in range(2):
        stream = engine.submit(request([*system, *text_of(50, seed + 1)], 1))
        list(stream)
    assert stream.prompt_reused == len(system)


def test_where_texts_part_is_remembered_when_it_is_seen():
    engine, _, _ = engine_of()
    shared, reused = text_of(150), []
    for seed in range(3):
        stream = engine.submit(request([*shared, 2 + seed, *text_of(300, seed + 1)], 1))
        list(stream)
        reused.append(stream.prompt_reused)
    assert reused[0] == 0 and reused[1] < 150 and reused[2] == 150


def test_a_fork_shares_the_state_until_both_go_on():
    engine, backend, states = engine_of()
    branch = engine.open(text_of(40))
    engine.extend(branch)
    used = states.used
    other = branch.fork()
    assert states.used == used
    additions = [(branch, [3]), (other, [4])]
    assert read_by(backend, lambda: engine.extend_all(additions)) == 2, "nothing is read again"
    assert states.used == used + 2, "two new ones, and the one where they part"


@pytest.mark.parametrize("cheap", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_wrong_guesses_cost_at_most_what_was_guessed_right(cheap: bool, tree: bool):
    engine, backend, states = engine_of(state_bytes=1 if cheap else 1000)
    drafter = Guesses(lambda text: int(np.argmax(logits_after(text, 40))), tree, 2)
    prompt = text_of(40)
    written: list[int] = []
    tokens = read_by(backend, lambda: written.extend(write(engine, prompt, 60, drafter)))
    text = list(prompt)
    for token in written:
        assert token == np.argmax(logits_after(text, 40))
        text.append(token)
    rounds = drafter.rounds
    assert rounds < len(written), "some guesses were right"
    per_round = (1 + 4) + (2 * (1 + 4 + 2) if tree else 0)  # its own row, and side rows beside it
    assert tokens <= len(prompt) + rounds * (per_round + (0 if cheap else 5 * (2 if tree else 1)))
    assert states.num_running == 0


def test_many_texts_in_few_slots_are_all_written():
    engine, _, states = engine_of(states=3)
    prompts = [text_of(60, seed) for seed in range(12)]
    streams = [engine.submit(request(prompt, 30)) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        text = list(prompt)
        for step in stream:
            assert step.token == np.argmax(logits_after(text, 40))
            text.append(step.token)
    assert states.num_running == 0 and states.used <= 3


def test_branches_that_wait_give_their_states_up_and_are_computed_again():
    engine, _, states = engine_of(states=4)
    branches = [engine.open(text_of(30, seed)) for seed in range(10)]
    for _ in range(2):
        results = engine.extend_all([(branch, [3]) for branch in branches])
        for branch, logits in zip(branches, results, strict=True):
            assert np.array_equal(np.asarray(logits)[0], logits_after(branch.tokens, 40))
    assert states.num_evicted > 0
    for branch in branches:
        branch.release()
    engine.call(engine.tree.index.clear)
    assert states.used == 0


def test_what_is_worth_most_stays():
    """The state behind a long prompt, rather than those a page apart that are as old."""
    engine, backend, states = engine_of(states=24)
    prompt = text_of(600)
    write(engine, prompt, 1)
    for seed in range(1, 9):
        write(engine, text_of(100, seed), 40)
    assert states.num_evicted > 0
    assert read_by(backend, lambda: write(engine, prompt, 1)) < 150


def test_states_that_go_together_leave_no_large_gap():
    """Of pages that are worth the same, every second one goes, and not all of the oldest."""
    engine, _, states = engine_of(states=64, state_bytes=1)
    branch = engine.open(text_of(60 * SIZE + 3))
    engine.extend(branch)
    assert states.used > 60
    engine.call(lambda: states.evict(30))
    positions, node = list[int](), branch.node
    while node.parent is not None:
        positions += node.states
        node = node.parent
    places = [0, *sorted(positions), 60 * SIZE]
    assert max(b - a for a, b in pairwise(places)) <= 6 * SIZE


def test_faults_lose_no_slot():
    class Device(SlowDevice, RecurrentNull):
        pass

    device = Device(delay=0.0005, faults=12, seed=3, states=12, pages=400, context=400)
    engine = Engine(device, lambda token: b"x")
    num_full = 0
    for round_ in range(4):
        prompts = [text_of(20, seed + 10 * round_) for seed in range(6)]
        streams = [engine.submit(request(prompt, 15)) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            text = list(prompt)
            try:
                for step in stream:
                    assert step.token == np.argmax(logits_after(text, 40))
                    text.append(step.token)
                num_full += 1
            except (RuntimeError, UnspoolError):
                pass
    engine.call(engine.tree.index.clear)
    assert num_full and engine.tree.states is not None and engine.tree.states.used == 0
    assert engine.tree.pool.used == 0


def test_a_canvas_behind_a_recurrent_text_begins_at_its_state():
    engine, backend, states = engine_of()
    text = text_of(100)
    canvas = open_canvas(engine, text, 6, CanvasKind(mask_id=0, sight="causal"))
    canvas.logits()
    for place in range(6):
        canvas.set(place, 5)
        assert read_by(backend, canvas.logits) == 6, "the text before it is not read again"
        tokens = [*text, *canvas.tokens]
        assert np.array_equal(np.asarray(canvas.logits())[0], logits_after(tokens, 40))
    canvas.commit(6)
    canvas.close()
    engine.call(engine.tree.index.clear)
    assert states.used == 0


@pytest.mark.parametrize("sight", ["whole", "block"])
def test_a_recurrent_model_reads_left_to_right(sight: Any):
    engine, _, _ = engine_of()
    with pytest.raises(SettingsError, match="recurrent"):
        open_canvas(engine, text_of(10), 4, CanvasKind(mask_id=0, sight=sight, block=4))
