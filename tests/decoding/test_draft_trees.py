"""Trees of drafts: any tree, the same text; its rows give their pages back; vectors are shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import drafts_support
from helpers.drafts_support import leftover
from helpers.null_model import NullModel, logits_after
from unspool.engine.drafting import DraftChain, PendingDraft, split_into_chains, truncate_chains
from unspool.engine.engine import Engine
from unspool.engine.request import DraftTree
from unspool.engine.results import Step
from unspool.sampling.guards import GuardPolicy

VOCABULARY = 40
KEPT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Plants:
    """Proposes trees; sees vectors; keeps both, to be looked at."""

    def __init__(self, say: Any, reads: tuple[int, ...] = ()) -> None:
        self.say, self.reads = say, reads
        self.observed: list[tuple[int, int, int]] = []  # layer, position, token
        self.texts: list[list[int]] = []
        self.rounds: list[tuple[int, int]] = []
        self.right: list[bool] = []  # whether the observed tokens are those of the text

    def needs(self, tokens: Sequence[int]) -> int:
        return len(tokens) - 3

    def see(self, first: int, vectors: Any) -> None:
        del self.observed[first:]
        assert len(self.observed) == first or first >= len(self.observed)
        self.observed += [(0, -1, -1)] * (first - len(self.observed))
        self.observed += [tuple(map(int, row)) for row in vectors[-1]]

    def propose(self, tokens: Sequence[int], most: int) -> Any:
        self.texts.append(list(tokens))
        if self.reads:  # everything but the last token was computed, as it stands now
            existing = self.observed[: len(tokens) - 1]
            mine = [(self.reads[-1], n, token) for n, token in enumerate(tokens[:-1])]
            cached = sum(1 for _, position, _ in existing if position < 0)  # found, not computed
            self.right.append(len(existing) == len(mine) and existing[cached:] == mine[cached:])
        return self.say(list(tokens), most)

    def learn(self, proposed: int, accepted: int, seconds: float) -> str | None:
        self.rounds.append((proposed, accepted))
        return None


a_request = partial(drafts_support.a_request, max_tokens=24, context=96, **KEPT)


def step_facts(steps: Sequence[Step]) -> list[tuple[Any, ...]]:
    return [(s.token, s.text, s.position, s.finish_reason, s.logprob, s.retracts) for s in steps]


def engine_of(**shape: Any) -> Engine:
    return Engine(NullModel(vocab_size=VOCABULARY, context=96, **shape), lambda t: bytes([48 + t]))


@pytest.fixture(scope="module", params=[True, False], ids=["echoed", "computed again"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    created = engine_of(pages=400, echoes=request.param)
    yield created
    created.close()


def branching(tokens: list[int], most: int, *, seed: int = 0, size: int = 12) -> DraftTree:
    """A tree over the likeliest continuations, so that some of it is right, some not."""
    chance = np.random.default_rng([seed, *tokens])
    result, parents = list[int](), list[int]()
    for _ in range(size):
        parent = int(chance.integers(-1, len(result)))
        path, here = list[int](), parent
        while here >= 0:
            path.append(result[here])
            here = parents[here]
        if len(path) >= most:
            continue
        logits = logits_after([*tokens, *reversed(path)], VOCABULARY)
        used = {result[n] for n in range(len(result)) if parents[n] == parent}
        order = [int(token) for token in np.argsort(-logits) if token not in used]
        result.append(order[0] if chance.random() < 0.8 else order[3])
        parents.append(parent)
    return DraftTree(result, parents)


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.8]),
        "seed": st.integers(0, 4),
        "max_tokens": st.integers(1, 24),
        "end_ids": st.sampled_from([frozenset(), frozenset([3, 7])]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "top": st.sampled_from([0, 2]),
        "mirostat_tau": st.sampled_from([0.0, 0.0, 3.0]),
    }
)


@settings(max_examples=30, deadline=None)
@given(
    options=OPTIONS,
    prompt=st.lists(st.integers(0, 39), min_size=1, max_size=20),
    seed=st.integers(0, 9),
)
def test_no_tree_changes_the_text(
    engine: Engine, options: dict[str, Any], prompt: list[int], seed: int
):
    plain = list(engine.submit(a_request(prompt, **options)))
    drafter = Plants(lambda tokens, most: branching(tokens, most, seed=seed), reads=(1,))
    steps = list(engine.submit(a_request(prompt, drafter, **options)))
    assert step_facts(steps) == step_facts(plain)
    full = [*prompt, *(step.token for step in steps)]
    for text in drafter.texts:
        assert text == full[: len(text)]
    assert all(drafter.right)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_tree_at_all(engine: Engine, data: st.DataObject):
    """Also such as no head would draw: tokens that are none, the same one twice, long chains."""

    def say(tokens: list[int], most: int) -> DraftTree:
        count = data.draw(st.integers(0, 8))
        guesses = [data.draw(st.integers(-1, VOCABULARY)) for _ in range(count)]
        return DraftTree(guesses, [data.draw(st.integers(-1, n - 1)) for n in range(count)])

    options = {"temperature": 0.8, "seed": 1, "max_tokens": 8}
    plain = list(engine.submit(a_request([5, 6], **options)))
    assert step_facts(engine.submit(a_request([5, 6], Plants(say), **options))) == step_facts(plain)


def test_a_tree_of_all_that_may_come_is_followed(engine: Engine):
    options = {"temperature": 0.8, "seed": 2, "max_tokens": 20}
    plain = list(engine.submit(a_request([1, 2, 3], **options)))
    full = [1, 2, 3, *(step.token for step in plain)]

    def say(tokens: list[int], most: int) -> DraftTree:
        right = full[len(tokens) : len(tokens) + 3]
        wrong = [(token + 1) % VOCABULARY for token in right]
        # Behind each right token a wrong one first, so that the right path changes rows.
        nodes, parents, before = [], [], -1
        for good, bad in zip(right, wrong, strict=True):
            nodes += [bad, good]
            parents += [before, before]
            before = len(nodes) - 1
        return DraftTree(nodes, parents)

    runs, drafter = engine.steps, Plants(say, reads=(0, 2))
    steps = list(engine.submit(a_request([1, 2, 3], drafter, **options)))
    assert step_facts(steps) == step_facts(plain)
    assert engine.steps - runs == 6, "the prompt, then four tokens at a time"
    assert [step.draft for step in steps].count("accepted") == 14
    assert drafter.rounds and set(drafter.rounds) == {(6, 3)}
    assert drafter.right and all(drafter.right)
    assert leftover(engine) == 0


def test_beside_others_and_with_little_memory():
    """Rows beside the text take no page from anybody; preempted texts come out the same."""
    prompts = [[n, n + 1, n + 2] for n in range(6)]
    options = {"temperature": 0.8, "max_tokens": 20}
    with_room = engine_of(pages=400)
    plain = [
        step_facts(with_room.submit(a_request(p, seed=n, **options))) for n, p in enumerate(prompts)
    ]
    with_room.close()
    for echoes in (True, False):
        tight = engine_of(pages=22, echoes=echoes)
        streams = [
            tight.submit(
                a_request(
                    p,
                    Plants(lambda tokens, most: branching(tokens, most), (1,)) if n % 2 else None,
                    seed=n, priority=n % 3, **options,
                )
            )
            for n, p in enumerate(prompts)
        ]  # fmt: skip
        assert [step_facts(stream) for stream in streams] == plain
        assert tight.scheduler.preemptions > 0
        assert leftover(tight) == 0
        tight.close()


def test_with_a_guard(engine: Engine):
    options = {"temperature": 0.8, "seed": 5, "max_tokens": 24}
    first = list(engine.submit(a_request([9, 9], **options)))
    word = bytes([48 + first[4].token]).decode() + bytes([48 + first[5].token]).decode()
    guards = GuardPolicy.parse([f"pattern={re.escape(word)}"])
    plain = list(engine.submit(a_request([9, 9], guards=guards, **options)))
    assert any(step.retracts for step in plain)
    drafter = Plants(lambda tokens, most: branching(tokens, most), reads=(1,))
    steps = list(engine.submit(a_request([9, 9], drafter, guards=guards, **options)))
    assert step_facts(steps) == step_facts(plain)
    assert drafter.right and all(drafter.right)


def test_leaving_early_gives_everything_back(engine: Engine):
    drafter = Plants(lambda tokens, most: branching(tokens, most))
    for count in range(1, 6):
        stream = engine.submit(a_request([4, count], drafter, temperature=0.8, seed=count))
        for number, _ in enumerate(stream):
            if number == count:
                break
        stream.close()
    assert leftover(engine) == 0


def test_a_drafter_that_fails_when_shown_something(engine: Engine):
    class Blind(Plants):
        def see(self, first: int, vectors: Any) -> None:
            raise RuntimeError("no eyes")

    options = {"temperature": 0, "max_tokens": 6}
    plain = list(engine.submit(a_request([1], **options)))
    stream = engine.submit(a_request([1], Blind(lambda tokens, most: [], (1,)), **options))
    assert step_facts(stream) == step_facts(plain)
    assert any("no eyes" in note for note in stream.notes)


def test_runs_of_a_tree():
    tree = DraftTree([1, 2, 3, 4, 5, 6], [-1, 0, -1, 1, 0, 2])
    chains = split_into_chains(tree)
    assert [(chain.tokens_before(), chain.tokens) for chain in chains] == [
        ([], [1, 2, 4]), ([], [3, 6]), ([1], [5]),
    ]  # fmt: skip
    remaining = truncate_chains(chains, [0, 2, 1])
    assert [chain.tokens for chain in remaining] == [[], [3, 6]], (
        "what stood behind a dropped token is gone"
    )
    for chain in remaining:
        chain.row = object()  # type: ignore[assignment]
    draft = PendingDraft(remaining)
    assert draft.accept(3) and draft.num_accepted == 1
    assert not draft.accept(9) and draft.accept(6)
    assert draft.num_accepted == 2 and not draft.has_candidate()
    assert [chain.tokens for chain in split_into_chains([7, 8])] == [[7, 8]]
    assert split_into_chains([])[0].tokens == [] and DraftChain().tokens_before() == []
