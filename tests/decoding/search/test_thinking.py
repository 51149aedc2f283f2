"""The search below all policies: a shared past, its price, its pages, the same tree again."""

from __future__ import annotations

import threading

import pytest

from helpers.decoding_support import PROMPT, pages_left
from helpers.search_support import WARM, forget, held_pages, metered
from unspool.decoding.search.search import Search, run_moves
from unspool.decoding.search.think import POLICIES, stream_think, think
from unspool.decoding.search.tree import (
    BudgetUsed,
    NodeAdded,
    NodePruned,
    NodeScored,
    SearchFinished,
    TokenBudget,
)
from unspool.decoding.search.verifiers import LogprobVerifier
from unspool.errors import UnspoolError

LONG = PROMPT * 5  # 95 tokens: several pages
POLICIES_BY_IDS = [name for name in POLICIES if name not in ("think", "compose")]
OPTIONS = {
    "vote": {"extract": lambda text: text.tokens[-1] % 3},
    "beam": {"keep": 2, "width": 2, "step": "tokens", "tokens": 3},
    "dvts": {"subtrees": 2, "width": 2, "step": "tokens", "tokens": 3},
    "mcts": {"width": 2, "step": "tokens", "tokens": 3},
    "restarts": {"tokens": 3},
}


@pytest.mark.parametrize("n", [2, 8])
def test_many_branches_cost_one_prefill(tiny_lm, n):
    forget(tiny_lm)
    with metered(tiny_lm) as meter:
        result = think(tiny_lm, LONG, n=n, max_tokens=4, budget=None, end=False, **WARM)
    assert result.spent.written == 4 * n
    assert meter.tokens - result.spent.written <= 1.05 * len(LONG)
    assert meter.tokens == result.spent.total


@pytest.mark.parametrize("policy", POLICIES_BY_IDS)
def test_the_same_seed_gives_the_same_tree(tiny_lm, policy):
    """Also when the prompt, or all of it, is in the cache, which makes it cheaper, not longer."""
    request = {**OPTIONS.get(policy, {}), **WARM, "policy": policy, "max_tokens": 10}
    forget(tiny_lm)
    first = think(tiny_lm, PROMPT, budget=150, **request)
    again = think(tiny_lm, PROMPT, budget=150, **request)
    assert str(first.tree) == str(again.tree) and first.best.tokens == again.best.tokens
    assert again.spent.prompt == 1 < first.spent.prompt == len(PROMPT) - 1
    assert again.spent.written == first.spent.written
    other = think(tiny_lm, PROMPT, budget=150, **{**request, "seed": 6})
    assert str(other.tree) != str(first.tree)


def test_losers_give_their_pages_back_at_once(tiny_lm):
    forget(tiny_lm)
    assert held_pages(tiny_lm) == 0
    start = tiny_lm.prepare_generation(PROMPT, max_tokens=60, end=False, **WARM)
    with Search(tiny_lm, start, None, TokenBudget()) as search:
        texts = run_moves(search.sample([search.root], 4, 40))
        full = held_pages(tiny_lm)
        run_moves(search.prune(texts[:2]))
        fewer = held_pages(tiny_lm)
        run_moves(search.prune(texts[2:]))
        least = held_pages(tiny_lm)
        assert full > fewer > least > 0  # the prompt is still there
    assert held_pages(tiny_lm) == 0


def test_a_parent_is_let_go_with_its_last_child(tiny_lm):
    start = tiny_lm.prepare_generation(PROMPT, max_tokens=60, end=False, **WARM)
    with Search(tiny_lm, start, None, TokenBudget()) as search:
        before = run_moves(search.sample([search.root], 1, 20))
        children = run_moves(search.sample(before, 2, 20))
        run_moves(search.prune(children[:1]))
        assert before[0] in search._branches
        run_moves(search.prune(children[1:]))
        assert list(search._branches) == [search.root]


@pytest.mark.parametrize("policy", POLICIES_BY_IDS)
def test_a_search_that_is_left_gives_everything_back(tiny_lm, policy):
    request = {**OPTIONS.get(policy, {}), **WARM, "policy": policy, "max_tokens": 30}
    for length in (1, 5):
        stream = stream_think(tiny_lm, PROMPT, budget=600, **request)
        for number, _ in enumerate(stream):
            if number == length:
                break
        assert pages_left(tiny_lm) == 0
        with pytest.raises(UnspoolError, match="not finished"):
            stream.result  # noqa: B018


def test_another_thread_may_end_a_search(tiny_lm):
    stream = stream_think(tiny_lm, PROMPT, n=4, max_tokens=100, budget=None, end=False, **WARM)
    started, errors = threading.Event(), []

    def read() -> None:
        try:
            for _ in stream:
                started.set()
        except UnspoolError as error:
            errors.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(30)  # the prompt is read
    stream.close()
    reader.join(30)
    assert not reader.is_alive()
    assert errors in (["the search was cancelled"], [])  # or it was over already
    assert pages_left(tiny_lm) == 0


def test_an_error_gives_everything_back(tiny_lm):
    class Interrupted(LogprobVerifier):
        def score(self, texts):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        think(tiny_lm, PROMPT, policy="beam", judge=Interrupted(), max_tokens=5, **WARM)
    assert pages_left(tiny_lm) == 0


def test_events_tell_the_whole_tree(tiny_lm):
    request = {**OPTIONS["beam"], **WARM, "policy": "beam", "max_tokens": 9, "end": False}
    stream = stream_think(tiny_lm, PROMPT, budget=400, **request)
    events = list(stream)
    result = stream.result
    nodes = {node.number: node for node in result.tree.root.walk()}
    grown = [event for event in events if isinstance(event, NodeAdded)]
    assert [event.node for event in grown] == list(range(1, len(nodes)))
    for event in grown:
        node = nodes[event.node]
        assert node.parent.number == event.parent
        assert list(event.tokens) == [step.token for step in node.steps]
        assert event.logprob == pytest.approx(sum(step.logprob for step in node.steps))
        assert event.finished == (len(node.generation.tokens) == 9)
    scores = {event.node: event.score for event in events if isinstance(event, NodeScored)}
    assert scores == {n: node.score for n, node in nodes.items() if node.score is not None}
    pruned = [event.node for event in events if isinstance(event, NodePruned)]
    assert set(pruned) == {n for n, node in nodes.items() if node.pruned}
    assert len(pruned) == len(set(pruned))
    won = events[-1]
    assert isinstance(won, SearchFinished) and nodes[won.node] is result.tree.leaf
    assert not any(node.pruned for node in result.tree.best_path)
    reported = [event for event in events if isinstance(event, BudgetUsed)][-1]
    assert (reported.prompt, reported.written, reported.judged, reported.limit) == (
        result.spent.prompt, result.spent.written, 0, 400,
    )  # fmt: skip
    assert {event.to_dict()["event"] for event in events} == {
        "grown", "judged", "pruned", "spending", "won",
    }  # fmt: skip


def test_what_is_put_is_judged_and_counted(tiny_lm):
    forget(tiny_lm)
    start = tiny_lm.prepare_generation(PROMPT, max_tokens=20, **WARM)
    with metered(tiny_lm) as meter, Search(tiny_lm, start, None, TokenBudget(60)) as search:
        item, two = run_moves(search.append([(search.root, [9, 8, 7]), (search.root, [9, 8, 6])]))
        assert meter.tokens == search.budget.spent.total == len(PROMPT) - 1 + 6
        (three,) = run_moves(search.sample([two], 1, 2))
        back = run_moves(search.rewind(three, 4))
        assert back.generation.tokens == three.generation.tokens[:4] and three.pruned
        assert run_moves(search.rewind(back, 3)) is two
    expected = tiny_lm.score([*PROMPT, 9, 8, 7]).logprobs[-3:]
    assert [step.logprob for step in item.steps] == pytest.approx(expected, abs=1e-4)


def test_faults(tiny_lm):
    for options, output in (
        ({"policy": "guess"}, "there is no policy 'guess'; there are best-of, vote"),
        ({"judge": "nobody"}, "there is no judge 'nobody'"),
        ({"judge": 5}, "judge must be .* got 5"),
        ({"width": 3}, "the policy best-of has no option 'width'; it has n"),
        ({"n": 0}, "n must be .* got 0"),
        ({"budget": 0}, "budget must be"),
        ({"budget": 5}, "do not fit the budget of 5"),
        ({"budget": len(PROMPT) - 1}, "too small for a single text"),
        ({"speculate": "lookup"}, "speculate cannot be used in a search"),
        ({"guard": "loop"}, "guard cannot be used in a search"),
        ({"cache": False}, "share their past"),
        ({"policy": "beam", "judge": "vote"}, "only scores finished ones"),
        ({"policy": "beam", "step": "word"}, "step must be"),
        ({"policy": "mcts", "rule": "ucb"}, "rule must be"),
        ({"policy": "mcts", "explore": -1}, "explore must be"),
        ({"policy": "vote", "judge": "vote", "extract": "x"}, "give only one"),
    ):
        with pytest.raises(UnspoolError, match=output):
            think(tiny_lm, PROMPT, **options)
    assert pages_left(tiny_lm) == 0
