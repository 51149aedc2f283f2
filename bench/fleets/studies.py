"""The questions a plan has to answer, each as runs of the simulator.

size     how many replicas a load needs for its targets, with each routing policy
routing  what the policies come to on the same fleet
loss     what a lost machine does to the p99, and for how long
scaling  how late an autoscaler is when the load jumps

Every study gives plain rows of figures, which become tables, pictures and JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleets.arrivals import Arrivals
from fleets.costs import CostsError, StepCosts
from fleets.failures import Failures
from fleets.figures import Figures, figures, of_run, percentile
from fleets.requests import Request
from fleets.scaling import Scaling
from fleets.simulate import Outcome, Scenario, simulate
from fleets.trace import Mix, Session, make_trace, requests_per_session

Row = dict[str, Any]
WARM = 1 / 3  # of a run, before anything is counted: caches fill, chats reach their later turns
ROOMY = 12  # times as many replicas as are expected: a fleet in which hardly anybody waits
WINDOW_S = 10.0  # of the curves over time
MIX = Mix()


@dataclass(frozen=True)
class Target:
    """What readers are promised, of 99 in a hundred."""

    first_s: float = 0.5
    gap_s: float = 0.06

    def met(self, found: Figures) -> bool:
        nothing_lost = found.finished == found.requests
        return nothing_lost and found.first_p99 <= self.first_s and found.gap_p99 <= self.gap_s


@dataclass(frozen=True)
class Load:
    """Requests a second for so many seconds, in bursts unless these are left out; and the machines
    that are lost meanwhile."""

    rate: float
    seconds: float
    seed: int = 1
    bursts: bool = True
    jump_at: float | None = None
    jump: float = 1.0
    failures: Failures = field(default_factory=Failures)

    def sessions(self) -> list[Session]:
        arrivals = Arrivals(
            self.rate / requests_per_session(MIX), day_swing=0.0,
            burst=Arrivals.burst if self.bursts else 1.0, jump_at=self.jump_at, jump=self.jump,
        )  # fmt: skip
        return make_trace(self.seed, arrivals, self.seconds, MIX)


def size(
    costs: StepCosts, loads: Sequence[Load], policies: Sequence[str], target: Target
) -> list[Row]:
    """The least replicas that meet the target, for loads that rise. Each search begins where the
    load before it leads one to expect its end."""
    rows = []
    for policy in policies:
        expected = 0.0  # replicas for a request a second
        for load in loads:
            count, found = _least(costs, load, policy, target, round(load.rate * expected))
            expected = count / load.rate
            rows.append({"policy": policy, "replicas": count, **_told(found, load)})
    return rows


def _least(
    costs: StepCosts, load: Load, policy: str, target: Target, guess: int
) -> tuple[int, Figures]:
    """From a guess on, downwards while fewer will do as well, upwards until it does: more replicas
    never make it worse."""
    sessions = load.sessions()
    count = max(1, guess)
    found = _counted(costs, count, policy, load, sessions)
    if target.met(found):
        while count > 1:
            fewer = _counted(costs, count - 1, policy, load, sessions)
            if not target.met(fewer):
                break
            count, found = count - 1, fewer
    else:
        _check_reachable(target, _counted(costs, ROOMY * count, policy, load, sessions))
    while not target.met(found):
        count += 1
        found = _counted(costs, count, policy, load, sessions)
    return count, found


def _check_reachable(target: Target, found: Figures) -> None:
    if not target.met(found):
        raise CostsError(
            f"no number of replicas meets p99 targets of {target.first_s * 1e3:.0f} ms and "
            f"{target.gap_s * 1e3:.0f} ms: where nobody waits they are {found.first_p99 * 1e3:.0f} "
            f"ms and {found.gap_p99 * 1e3:.0f} ms; allow more, or shorten what is asked"
        )


def routing(
    costs: StepCosts, load: Load, replicas: Sequence[int], policies: Sequence[str]
) -> list[Row]:
    """The same requests on the same fleet, each policy."""
    sessions = load.sessions()
    return [
        {
            "replicas": count,
            "policy": policy,
            **_told(_counted(costs, count, policy, load, sessions), load),
        }
        for count in replicas
        for policy in policies
    ]


def loss(
    costs: StepCosts, load: Load, replicas: Sequence[int], policies: Sequence[str]
) -> list[Row]:
    """One machine is lost: the p99 before, at its worst, and how long until it is as before."""
    sessions, (moment,) = load.sessions(), load.failures.moments
    rows = []
    for count in replicas:
        for policy in policies:
            scenario = Scenario(costs, count, policy, load.failures, seed=load.seed)
            found = simulate(scenario, sessions)
            curve = over_time(found.requests, load.seconds)
            before = figures(found.requests, load.seconds * WARM / 2, moment).first_p99
            until = last_above(curve, 1.5 * before, moment)
            hurt = figures(found.requests, moment - WINDOW_S, until)
            rows.append(
                {
                    "replicas": count,
                    "policy": policy,
                    "retried": sum(r.attempts > 1 for r in found.requests),
                    "lost": sum(r.outcome == "lost" for r in found.requests),
                    "p99_before": before,
                    "p99_worst": max((p for t, p in curve if t >= moment), default=0.0),
                    "longest_pause": max(
                        (gap for r in found.requests if r.attempts > 1 for gap in r.gaps),
                        default=0.0,
                    ),
                    "p50_hurt": hurt.first_p50,
                    "seconds": until - moment,
                    "curve": curve,
                }
            )
    return rows


def scaling(costs: StepCosts, load: Load, least: int, scalings: Sequence[Row]) -> list[Row]:
    """The load jumps, and replicas are started: how long the target is missed, by settings. Each
    of `scalings` is settings of `Scaling`, and `start_s` if another start time is tried."""
    sessions, rows = load.sessions(), []
    assert load.jump_at is not None
    for given in scalings:
        settings = dict(given)
        shape = replace(costs.shape, start_s=settings.pop("start_s", costs.shape.start_s))
        scale = Scaling(least=least, **settings)
        scenario = Scenario(replace(costs, shape=shape), least, "prefix", scaling=scale)
        found = simulate(scenario, sessions)
        curve = over_time(found.requests, load.seconds)
        before = figures(found.requests, load.seconds * WARM / 2, load.jump_at).first_p99
        until = last_above(curve, 1.5 * before, load.jump_at)
        rows.append(
            {
                "up_delay_s": scale.up_delay_s,
                "start_s": shape.start_s,
                "target": scale.target,
                "p99_before": before,
                "p99_worst": max((p for t, p in curve if t >= load.jump_at), default=0.0),
                "refused": sum(r.outcome == "refused" for r in found.requests),
                "seconds": until - load.jump_at,
                "most": max(size for _, size in found.sizes),
                "first_new_s": _first_new(found, load.jump_at),
                "curve": curve,
                "sizes": found.sizes,
            }
        )
    return rows


def over_time(requests: Sequence[Request], seconds: float) -> list[tuple[float, float]]:
    """The p99 to the first token of those that came in each window; at the window's end."""
    windows: list[list[float]] = [[] for _ in range(math.ceil(seconds / WINDOW_S))]
    for request in requests:
        if request.outcome == "finished" and request.arrival < seconds:
            windows[int(request.arrival / WINDOW_S)].append(request.first_token_s)
    return [
        ((number + 1) * WINDOW_S, percentile(window, 99))
        for number, window in enumerate(windows)
        if window
    ]


def last_above(curve: Sequence[tuple[float, float]], limit: float, since: float) -> float:
    """The end of the first stretch behind a moment that the curve is above a limit for: from when
    on it has been below it in three windows."""
    below = 0
    until = since
    for moment, value in curve:
        if moment <= since:
            continue
        if value > limit:
            below, until = 0, moment
        else:
            below += 1
            if below == 3:
                break
    return until


def _first_new(found: Outcome, since: float) -> float:
    """Seconds until the first replica that was started for the jump."""
    before = max((size for moment, size in found.sizes if moment <= since), default=0)
    return next((t - since for t, size in found.sizes if t > since and size > before), math.inf)


def _counted(
    costs: StepCosts, replicas: int, policy: str, load: Load, sessions: Sequence[Session]
) -> Figures:
    scenario = Scenario(costs, replicas, policy, load.failures, seed=load.seed)
    found = simulate(scenario, sessions)
    return of_run(found, load.seconds * WARM, load.seconds)


def _told(found: Figures, load: Load) -> Row:
    return {
        "rate": found.requests / (load.seconds * (1 - WARM)),
        "requests": found.requests,
        "tokens_s": found.tokens_s,
        "cached": found.cached,
        "prefill_tokens": found.prefill_tokens,
        "first_p50": found.first_p50,
        "first_p99": found.first_p99,
        "gap_p50": found.gap_p50,
        "gap_p99": found.gap_p99,
        "refused": found.refused,
        "rows": found.rows,
    }
