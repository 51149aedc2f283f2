"""No policy or verifier exceeds a budget."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.decoding_support import PROMPT, pages_left
from helpers.null_model import NullModel
from helpers.search_support import WARM, metered
from unspool.decoding.search.think import think
from unspool.decoding.search.tree import Spent, TokenBudget
from unspool.decoding.search.verifiers import Verdict
from unspool.engine.engine import Engine
from unspool.errors import UnspoolError


class Reader:
    """A verifier whose model reads the prompt, the text and `extra` tokens."""

    partial = True

    def __init__(self, extra: int) -> None:
        self.extra, self.read = extra, 0

    def cost(self, texts):
        return sum(len(text.prompt) + len(text.steps) + self.extra for text in texts)

    def score(self, texts):
        self.read += self.cost(texts)
        return [Verdict(float(sum(text.tokens) % 17)) for text in texts]


def small(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


PIECES = {"step": st.just("tokens"), "tokens": small(1, 6)}
POLICIES = st.one_of(
    st.fixed_dictionaries({"policy": st.just("best-of"), "n": small(1, 6)}),
    st.fixed_dictionaries({"policy": st.just("vote"), "n": small(1, 6)}),
    st.fixed_dictionaries(
        {"policy": st.just("beam"), "keep": small(1, 3), "width": small(1, 3), **PIECES}
    ),
    st.fixed_dictionaries(
        {"policy": st.just("dvts"), "subtrees": small(1, 3), "width": small(1, 3), **PIECES}
    ),
    st.fixed_dictionaries(
        {
            "policy": st.just("mcts"), "width": small(1, 3), "rounds": small(1, 6),
            "rule": st.sampled_from(["uct", "puct"]), **PIECES,
        }
    ),
    st.fixed_dictionaries(
        {
            "policy": st.just("restarts"), "k": small(1, 5), "keep": small(1, 2),
            "tokens": small(1, 6),
        }
    ),
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(POLICIES, small(1, 220), small(1, 20), st.sampled_from([None, "certainty", 0, 3]))
def test_no_budget_is_overrun(tiny_lm, policy_options, budget, max_tokens, judge):
    reader = Reader(judge) if isinstance(judge, int) else None
    with metered(tiny_lm) as meter:
        try:
            result = think(
                tiny_lm, PROMPT, judge=reader or judge, budget=budget, max_tokens=max_tokens,
                **policy_options, **WARM,
            )  # fmt: skip
        except UnspoolError as error:
            result = None
            assert "budget" in str(error) or "no answer" in str(error), error
    read = reader.read if reader else 0
    assert meter.tokens + read <= budget
    if result is not None:
        assert result.spent.total == meter.tokens + read
        assert result.best.tokens and result.score is not None
    assert pages_left(tiny_lm) == 0


def test_a_text_is_written_whole_where_there_is_room_for_one(tiny_lm):
    """What a search looks at must not leave the winner without its end."""
    for policy in ("beam", "dvts", "restarts", "mcts"):
        step = {} if policy == "restarts" else {"step": "tokens"}
        result = think(
            tiny_lm, PROMPT, policy=policy, budget=120, max_tokens=24, tokens=4, end=False,
            **step, **WARM,
        )  # fmt: skip
        assert len(result.best.tokens) == 24, policy


def test_one_that_the_budget_cuts_short_does_not_win(tiny_lm):
    """Five whole texts fit, and a bit of a sixth, which a judge of brevity would like best."""
    budget = len(PROMPT) - 1 + 5 * 10 + 3
    result = think(
        tiny_lm, PROMPT, n=9, judge=lambda text: -len(text.tokens), budget=budget, max_tokens=10,
        end=False, **WARM,
    )  # fmt: skip
    lengths = [len(node.generation.tokens) for node in result.tree.root.children]
    assert lengths == [10] * 5 + [3]
    assert len(result.best.tokens) == 10 and result.spent.written == 53


@pytest.mark.parametrize("policy", ["best-of", "beam", "dvts", "mcts", "restarts"])
def test_what_a_device_begins_ahead_is_counted_too(tiny_lm, policy):
    """Overlapping steps compute one token of a text that has already ended."""
    lm = copy.copy(tiny_lm)
    null = NullModel(overlaps=True, vocab_size=lm.vocab_size, context=128, pages=200)
    lm._shared = copy.copy(tiny_lm._shared)
    lm._shared.engine = Engine(null)
    lm.end_ids = frozenset(range(0, lm.vocab_size, 9))
    step = {} if policy in ("best-of", "restarts") else {"step": "tokens", "tokens": 3}
    for budget in (60, 150, 400):
        with metered(lm) as meter:
            result = think(lm, PROMPT, policy=policy, budget=budget, max_tokens=30, **step, **WARM)
        texts = [node for node in result.tree.root.walk() if node.parent]
        written = sum(len(node.steps) for node in texts)
        assert meter.tokens <= result.spent.total <= budget
        assert result.spent.written <= written + len(texts)
    assert pages_left(lm) == 0
    lm.engine.close()


def test_arithmetic():
    budget = TokenBudget(10)
    budget.reserve("prompt", 4)
    budget.credit_cached(3)  # of the four, three were known: not spent, and no room for others
    assert (budget.spent, budget.remaining) == (Spent(prompt=1), 6)
    budget.reserve("written", 6)
    with pytest.raises(UnspoolError, match="1 more tokens do not fit the budget of 10"):
        budget.reserve("judged", 1)
    budget.refund("written", 2)
    budget.reserve("judged", 2)
    assert budget.spent.to_dict() == {"prompt": 1, "written": 4, "judged": 2, "total": 7}
    assert TokenBudget().remaining > 1 << 60
