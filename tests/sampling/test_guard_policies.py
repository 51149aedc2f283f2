"""Policies of guards: how they are written, and that a run repairs a text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from unspool.errors import SettingsError
from unspool.sampling import guards as g
from unspool.sampling.monitors import PredicateGuard, repetition_rate

Picker = Callable[[list[int], frozenset[int]], tuple[int, bytes, float, float]]
"""(tokens so far, what is forbidden now) -> token, its bytes, logprob, entropy."""


def repair(
    next_token: Picker, policy: g.GuardPolicy, max_tokens: int
) -> tuple[list[int], g.GuardRun, str]:
    """Write with guards: the tokens, the run with its repairs, and why it ended.

    The engine does the same with a branch in place of the list.
    """
    run, tokens = policy.start(), list[int]()
    while True:
        if len(tokens) < max_tokens:
            token, piece, logprob, entropy = next_token(tokens, run.forbidden(len(tokens)))
            tokens.append(token)
            verdict = run.push(token, piece, logprob, entropy)
            if verdict.kind == "keep":
                continue
        else:
            verdict = run.finish()
        if verdict.kind == "rewind":
            del tokens[verdict.to :]
        else:
            return tokens, run, verdict.reason or "length"


def test_parsing_policies():
    assert g.GuardPolicy.parse(["loop"]) == g.GuardPolicy((g.LoopGuard(),))
    policy = g.GuardPolicy.parse(["loop:stop", "ban=foo|b:r", "surprise=8"], retries=2)
    assert policy.action == "stop" and policy.retries == 2
    assert policy.guards[1:] == (g.BannedGuard(words=("foo", "b:r")), g.SurpriseGuard(spike=8))
    assert g.GuardPolicy.parse(["pattern=a:b+=:rewind"]).guards == (
        g.BannedGuard(patterns=("a:b+=",), name="pattern"),
    )


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([], "no guard"),
        (["lop"], "did you mean 'loop'"),
        (["loop:repair"], "stop or rewind"),
        (["loop:stop", "ban=x:rewind"], "share one"),
        (["loop=3"], "not a valid guard"),
        (["ban"], "not a valid guard"),
        (["loop"] * 65, "maximum is 64"),
        (["ban=|"], "needs words"),
        (["surprise=much"], "number of nats"),
        (["surprise=-1"], "> 0 nats"),
        (["surprise=nan"], "> 0 nats"),
        (["pattern=("], "not a valid regular expression"),
        ([""], "unknown guard ''"),
    ],
)
def test_a_policy_that_cannot_be_read(items: list[str], words: str):
    with pytest.raises(SettingsError, match=re.escape(words)) as caught:
        g.GuardPolicy.parse(items)
    assert "\n" not in str(caught.value)


def test_settings_are_checked():
    for make in (
        lambda: g.LoopGuard(repeats=1),
        lambda: g.LoopGuard(keep=3),
        lambda: g.LoopGuard(min_tokens=True),
        lambda: g.BannedGuard(),
        lambda: g.BannedGuard(words=("",)),
        lambda: g.SurpriseGuard(spike=None),
        lambda: g.SurpriseGuard(window=0),
        lambda: PredicateGuard("x"),  # type: ignore[arg-type]
        lambda: g.GuardPolicy((), action="undo"),  # type: ignore[arg-type]
        lambda: g.GuardPolicy((), retries=-1),
        lambda: g.GuardPolicy((), exhausted="wait"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SettingsError):
            make()


NEXT = {n: [(n + 1) % 5, 5 + n, 10 + n] for n in range(5)}  # 0 1 2 3 4 0 1 2 ...
NEXT |= {n: [n + 1, n + 2, 0] for n in range(5, 400)}


def greedy(history: list[int], forbidden: frozenset[int]) -> tuple[int, bytes, float, float]:
    ways = NEXT[history[-1]] if history else [0]
    token = next((way for way in ways if way not in forbidden), 399)
    return token, b"", -1.0, 1.0


def test_a_loop_is_escaped():
    tokens, run, reason = repair(greedy, g.GuardPolicy((g.LoopGuard(),)), 200)
    assert reason == "length" and len(tokens) == 200
    assert tokens[:6] == [0, 1, 2, 3, 4, 9]  # the first round stays; at the second, another way
    assert [violation.start for violation in run.repairs] == [5]
    assert run.forbidden(5) == {0} and run.forbidden(6) == frozenset()
    assert repetition_rate(tokens) == 0


def test_there_are_so_many_repairs_and_no_more():
    def stubborn(history: list[int], forbidden: frozenset[int]) -> tuple[int, bytes, float, float]:
        before = history[-1] if history else 0
        return (before if before not in forbidden else before + 1), b"", -1.0, 1.0

    for retries in (0, 1, 5):
        policy = g.GuardPolicy((g.LoopGuard(),), retries=retries)
        tokens, run, reason = repair(stubborn, policy, 300)
        assert len(run.repairs) == retries and "in a row" in reason
        assert tokens == [*range(retries), *[retries] * 24]
        policy = g.GuardPolicy((g.LoopGuard(),), retries=retries, exhausted="go on")
        tokens, run, reason = repair(stubborn, policy, 300)
        assert len(run.repairs) == retries and reason == "length"
        assert tokens == [*range(retries), *[retries] * (300 - retries)]
    stop = g.GuardPolicy((g.LoopGuard(),), action="stop")
    tokens, run, _ = repair(stubborn, stop, 300)
    assert tokens == [0] * 24 and run.repairs == []


def test_what_is_forbidden_holds_while_what_is_before_it_stands():
    bad = {(1, 2), (1, 3), (4, 9, 9)}  # whole texts that are refused, at their last token

    def judge(text: str, tokens: Any) -> bool | int:
        return 0 if tokens == (1, 5, 7) else tuple(tokens) in bad

    run = g.GuardRun(g.GuardPolicy((PredicateGuard(judge),)))
    assert run.push(1, b"", -1, 1) == g.GuardVerdict()
    verdict = run.push(2, b"", -1, 1)
    assert (verdict.kind, verdict.to, verdict.forbid) == ("rewind", 1, {2})
    assert run.push(3, b"", -1, 1).forbid == {2, 3} == run.forbidden(1)
    run.push(5, b"", -1, 1)
    verdict = run.push(7, b"", -1, 1)  # back to the very beginning: the rest is another text
    assert (verdict.to, verdict.forbid) == (0, {1}) and len(run) == 0
    assert run.forbidden(0) == {1} and run.forbidden(1) == frozenset()
    for token in (4, 9, 9):
        verdict = run.push(token, b"", -1, 1)
    assert verdict.to == 2 and run.forbidden(2) == {9} and run.forbidden(0) == {1}
    run.rewind(2)
    assert run.forbidden(2) == {9}
    run.rewind(1)
    assert run.forbidden(2) == frozenset() and run.forbidden(0) == {1}


def test_the_earliest_trouble_counts_and_the_end_is_looked_at():
    late = PredicateGuard(lambda text, tokens: len(tokens) == 3, name="late")
    early = PredicateGuard(lambda text, tokens: 1 if len(tokens) == 3 else None, name="early")
    run = g.GuardRun(g.GuardPolicy((late, early)))
    assert [run.push(n, b"", -1, 1).to for n in range(3)] == [None, None, 1]
    run = g.GuardRun(g.GuardPolicy.parse(["ban=end"]))
    run.push(3, b"the ", -1, 1)
    assert run.push(4, b"end", -1, 1).kind == "keep"
    assert run.finish() == g.GuardVerdict("rewind", 1, frozenset({4}), "'end' is banned")
