"""The fleet's simulator: nothing is lost or doubled, time runs forward, queues are as in the books,
and the same seed gives the same run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fleets.simulate import (
    POLICIES,
    Autoscaler,
    Failures,
    Outcome,
    Scaling,
    Scenario,
    Shape,
    StepCosts,
    Table,
    figures,
    simulate,
)
from fleets.trace import SMALL, Arrivals, Session, Turn, make_trace, requests_per_session

QUICK = StepCosts(
    "test", "", Table((1, 8), (0.01, 0.03)), Table((16, 64), (0.05, 0.15)), 1e-6, 1e-6, 0.002,
    Shape(page_count=600, max_running=8, max_queued=40, start_s=3.0),
)  # fmt: skip


def trace(seed: int = 1, seconds: float = 60.0, rate: float = 4.0) -> list[Session]:
    arrivals = Arrivals(rate / requests_per_session(SMALL), burst_s=3.0, calm_s=12.0)
    return make_trace(seed, arrivals, seconds, SMALL)


def facts(result: Outcome) -> list[tuple[float | int | str, ...]]:
    return [
        (r.number, r.arrival, r.first, r.last, r.replica, r.cached, r.outcome)
        for r in result.requests
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_exactly_once(policy: str) -> None:
    """With failures, a full queue and an autoscaler together. (Ending twice is an error, and so
    is an event in the past.)"""
    failures = Failures(mtbf_s=25.0, notice_s=1.0, restart_s=4.0, attempts=2)
    scaling = Scaling(1, 5, target=3.0, interval_s=1.0, look_back_s=3, up_delay_s=2, down_delay_s=6)
    sessions = trace()
    result = simulate(Scenario(QUICK, 3, policy, failures, scaling, seed=5), sessions)
    assert result.losses and len({size for _, size in result.sizes}) > 2
    assert {r.outcome for r in result.requests} >= {"finished"}
    outcomes_of: dict[int, list[str]] = {}
    for request in result.requests:
        outcomes_of.setdefault(request.session, []).append(request.outcome)
        if request.outcome == "finished":
            assert request.arrival < request.first <= request.last
            assert request.delivered == len(request.answer) == len(request.gaps) + 1
            assert min(request.gaps, default=0) >= 0
        else:
            assert request.outcome in ("lost", "refused")
    # A session runs to its end, unless one of its requests failed.
    for session in sessions:
        outcomes = outcomes_of[session.number]
        assert outcomes[:-1] == ["finished"] * (len(outcomes) - 1)
        assert len(outcomes) == len(session.turns) or outcomes[-1] != "finished"


def test_the_same_seed_gives_the_same_run() -> None:
    failures = Failures(mtbf_s=30.0, notice_s=1.0, restart_s=4.0)
    first, again, other = (
        facts(simulate(Scenario(QUICK, 2, "prefix", failures, seed=seed), trace()))
        for seed in (3, 3, 4)
    )
    assert first == again != other


@pytest.mark.parametrize("lengths", ["equal", "geometric"])
def test_a_single_queue_is_as_in_the_books(lengths: str) -> None:
    """One text at a time, Poisson arrivals: the mean wait is that of Pollaczek and Khinchine,
    rate x E[service squared] / 2 (1 - load). Equal services are M/D/1, geometric ones nearly M/M/1.
    """
    step, mean, load, count = 0.1, 10, 0.6, 2000
    random = np.random.default_rng(8)
    tokens = np.full(count, mean) if lengths == "equal" else random.geometric(1 / mean, count)
    begins = np.cumsum(random.exponential(step * mean / load, count))
    sessions = [
        Session(n, "single", float(at), [], [Turn([n + 5], [1] * int(size), 0.0)])
        for n, (at, size) in enumerate(zip(begins, tokens, strict=True))
    ]
    shape = Shape(page_count=64, max_running=1, max_queued=10**6)
    costs = StepCosts("test", "", Table((1,), (step,)), Table((1,), (step,)), shape=shape)
    result = simulate(Scenario(costs, 1, "round-robin"), sessions).requests
    service = tokens * step
    waits = [r.first_token_s - step for r in result]
    rate = count / begins[-1]
    expected = rate * np.mean(service**2) / (2 * (1 - rate * np.mean(service)))
    assert np.mean(waits) == pytest.approx(expected, rel=0.15)


def test_routing_by_prefix_computes_fewer_prompt_tokens() -> None:
    requests = {p: simulate(Scenario(QUICK, 3, p), trace()).requests for p in POLICIES}
    # When turns come depends on how quickly they are answered; what they say does not.
    said = [{(r.session, r.turn): r.prompt for r in requests[p]} for p in POLICIES]
    assert said[0] == said[1] == said[2]
    prefix, robin = figures(requests["prefix"]), figures(requests["round-robin"])
    assert prefix.prompt_tokens == robin.prompt_tokens
    assert prefix.prefill_tokens < 0.8 * robin.prefill_tokens


def test_a_lost_replica_costs_its_requests_a_second_attempt_and_nobody_else() -> None:
    failures = Failures(moments=(20.0,), notice_s=2.0, restart_s=5.0)
    sessions = trace(seconds=50)
    calm = simulate(Scenario(QUICK, 2, "prefix"), sessions)
    result = simulate(Scenario(QUICK, 2, "prefix", failures), sessions)
    (moment, name), *_ = result.losses
    assert moment == 20.0
    again = [r for r in result.requests if r.attempts > 1]
    assert again and all(r.outcome == "finished" for r in result.requests)
    assert all(r.attempts == 2 and r.replica != name for r in again)
    assert all(r.arrival <= 22.0 and (r.last > 22.0) for r in again)
    # Before the loss nothing is different; what was read before it is not read again.
    early = [t for t in facts(result) if isinstance(t[3], float) and t[3] < 20.0]
    assert early == [t for t in facts(calm) if isinstance(t[3], float) and t[3] < 20.0]
    started = [r for r in again if r.first < 20.0]
    assert all(max(r.gaps, default=0) >= 2.0 for r in started)
    sizes = [size for _, size in result.sizes]
    assert sizes == [1, 2, 1, 2]


def test_without_any_replica_requests_wait_for_one() -> None:
    failures = Failures(moments=(5.0,), notice_s=0.5, restart_s=5.0)
    result = simulate(Scenario(QUICK, 1, "prefix", failures), trace(seconds=20, rate=1.0))
    assert all(r.outcome == "finished" for r in result.requests)
    waited = [r for r in result.requests if 5.5 < r.arrival < 13.0]
    assert waited and all(r.first > 13.0 for r in waited)


def test_the_autoscaler_waits_for_its_delays() -> None:
    scaling = Scaling(1, 4, target=10, interval_s=5, look_back_s=5, up_delay_s=10, down_delay_s=20)
    scaler = Autoscaler(scaling, 1)
    sizes = [scaler.update(float(now), 35) for now in range(0, 25, 5)]
    assert sizes == [1, 1, 4, 4, 4]
    sizes = [scaler.update(float(now), 0) for now in range(25, 70, 5)]
    assert sizes[0] == 4 and sizes[-1] == 1
    assert sizes.count(4) >= 4


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    random = np.random.default_rng(2)
    usual = Arrivals(0.5, burst_s=2.0, calm_s=10.0)
    day = usual.times(random, 86_400.0)
    assert len(day) / 86_400 == pytest.approx(0.5, rel=0.05)
    assert day == sorted(day)
    counts = np.histogram(day, 2000)[0]
    poisson = Arrivals(0.5, burst=1.0).times(random, 86_400.0)
    calm = np.histogram(poisson, 2000)[0]
    assert np.var(calm) == pytest.approx(np.mean(calm), rel=0.1)
    assert np.var(counts) > 1.3 * np.mean(counts)  # bursts: more than a Poisson process
    jumped = replace(usual, jump_at=3000.0, jump=3.0).times(random, 6000.0)
    assert sum(t >= 3000 for t in jumped) > 1.8 * sum(t < 3000 for t in jumped)


def test_sessions_share_their_beginnings_and_grow() -> None:
    sessions = trace(seconds=200)
    openings = [tuple(s.opening) for s in sessions if s.kind == "single"]
    assert len(set(openings)) < len(openings)
    talk = max(sessions, key=lambda session: len(session.turns))
    answers = [turn.answer for turn in talk.turns]
    first, second = talk.prompt(0, answers), talk.prompt(1, answers)
    assert second[: len(first)] == first
    assert second[len(first) :] == [*talk.turns[0].answer, *talk.turns[1].question]
    assert all(len(s.prompt(0, [])) <= SMALL.context for s in sessions)
