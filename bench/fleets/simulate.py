"""A fleet of replicas behind a router, one event after the other.

An event is a moment and what happens then: a request comes, a step ends, a machine is lost, a
reader has read. They are taken in the order of their time, those of one moment in the order in
which they were planned, so that a run follows from its seed to the last digit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from fleets.costs import StepCosts
from fleets.failures import Failures
from fleets.replica import Replica
from fleets.requests import Request
from fleets.scaling import Autoscaler, Scaling
from fleets.trace import Session
from unspool.scale.replicas.routing import PrefixRouter, RoundRobin, page_hashes


class Router(Protocol):
    """What `unspool.scale.replicas.routing` has several of."""

    def add(self, replica: str) -> None: ...

    def remove(self, replica: str) -> None: ...

    def choose(self, hashes: Sequence[int], load: dict[str, int]) -> str: ...

    def record(self, replica: str, hashes: Sequence[int]) -> None: ...


class LeastLoaded(PrefixRouter):
    """The replica with the fewest requests: a prefix router to which prompts say nothing."""

    def choose(self, hashes: Sequence[int], load: Any) -> str:
        return super().choose((), load)

    def record(self, replica: str, hashes: Sequence[int]) -> None:
        """Nothing is remembered."""


def make_router(policy: str, costs: StepCosts) -> Router:
    """A policy by its name; one that knows how much a replica's cache holds."""
    if policy == "prefix":
        return PrefixRouter(capacity_pages=costs.shape.page_count)
    return LeastLoaded() if policy == "least-loaded" else RoundRobin()


POLICIES = ("round-robin", "least-loaded", "prefix")


@dataclass(frozen=True)
class Scenario:
    """A fleet, and what happens to it."""

    costs: StepCosts
    replicas: int
    policy: str = "prefix"
    failures: Failures = field(default_factory=Failures)
    scaling: Scaling | None = None
    seed: int = 0


@dataclass
class Outcome:
    """All that happened."""

    scenario: Scenario
    requests: list[Request] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)  # all that ever were
    sizes: list[tuple[float, int]] = field(default_factory=list)  # replicas up, from when on
    losses: list[tuple[float, str]] = field(default_factory=list)
    ended: float = 0.0


class Fleet:
    """One run. `play` gives it sessions and lets time pass until all are answered."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.costs = scenario, scenario.costs
        self.router = make_router(scenario.policy, scenario.costs)
        self.now = 0.0
        self.up: dict[str, Replica] = {}  # those that compute
        self.load: dict[str, int] = {}  # requests in flight, of those that the router knows
        self.found = Outcome(scenario)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._numbers, self._names = count(), count(), count()
        self._sessions: dict[int, Session] = {}
        self._known: dict[str, Replica] = {}  # all that ever were
        self._routed: dict[str, list[Request]] = {}  # sent there and not answered
        self._homeless: list[Request] = []  # there was no replica to send them to
        self._starting = 0
        self._horizon = 0.0
        scaling = scenario.scaling
        self._autoscaler = None if scaling is None else Autoscaler(scaling, scenario.replicas)

    def play(self, sessions: Sequence[Session]) -> Outcome:
        self._horizon = max((session.begins for session in sessions), default=0.0)
        for _ in range(self.scenario.replicas):
            self._start()
        for session in sessions:
            self._sessions[session.number] = session
            self.at(session.begins, self._ask, session, 0)
        for moment in self.scenario.failures.moments:
            self.at(moment, self._lose_oldest)
        if self._autoscaler is not None:
            self.at(self._autoscaler.scaling.interval_s, self._look)
        while self._events:
            moment, _, work, given = heapq.heappop(self._events)
            if moment < self.now:
                raise AssertionError(f"an event at {moment} comes after one at {self.now}")
            self.now = moment
            work(*given)
        self.found.ended = max((max(r.last, r.arrival) for r in self.found.requests), default=0.0)
        return self.found

    def at(self, moment: float, work: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self._events, (moment, next(self._order), work, given))

    # -- requests -----------------------------------------------------------------------------

    def _ask(self, session: Session, turn: int) -> None:
        answers = [said.answer for said in session.turns]
        request = Request(
            next(self._numbers), session.prompt(turn, answers), session.turns[turn].answer,
            self.now, session.number, turn,
        )  # fmt: skip
        self.found.requests.append(request)
        self._route(request)

    def _route(self, request: Request) -> None:
        if not self.load:
            self._homeless.append(request)
            return
        hashes = page_hashes(request.prompt, self.costs.shape.page_size)
        name = self.router.choose(hashes, self.load)
        self.router.record(name, hashes)
        request.replica, request.attempts = name, request.attempts + 1
        self.load[name] += 1
        self._routed[name].append(request)
        self.at(self.now + self.costs.request_s, self._submit, self._known[name], request)

    def _submit(self, replica: Replica, request: Request) -> None:
        if self.up.get(replica.name) is not replica:
            return  # its client notices with the others that it is lost
        self._run(replica, replica.submit(request, self.now))
        if request.outcome == "refused":
            self._answered(request)

    def _run(self, replica: Replica, ends: float | None) -> None:
        if ends is not None:
            self.at(ends, self._step_ended, replica)

    def _step_ended(self, replica: Replica) -> None:
        if self.up.get(replica.name) is replica:
            self._run(replica, replica.step_ended(self.now))

    def _finished(self, request: Request, now: float) -> None:
        self._answered(request)
        session = self._sessions[request.session]
        if request.turn + 1 < len(session.turns):
            pause = session.turns[request.turn + 1].pause_s
            self.at(now + pause, self._ask, session, request.turn + 1)

    def _answered(self, request: Request) -> None:
        """The router hears that a request has ended."""
        name = request.replica
        self._routed[name].remove(request)
        if name in self.load:
            self.load[name] -= 1
        elif not self._routed[name]:  # it was drained
            self.up.pop(name, None)

    # -- machines -----------------------------------------------------------------------------

    def _start(self) -> None:
        """A replica is there, with nothing in its cache."""
        number = next(self._names)
        name = f"replica {number}"
        replica = Replica(name, self.costs, self._finished)
        self.up[name] = self._known[name] = replica
        self.load[name], self._routed[name] = 0, []
        self.found.replicas.append(replica)
        self.router.add(name)
        self._note_size()
        life = self.scenario.failures.lifetime(self.scenario.seed, number)
        if life is not None and self.now + life < self._horizon:
            self.at(self.now + life, self._lose, replica)
        waiting, self._homeless = self._homeless, []
        for request in waiting:
            self._route(request)

    def _note_size(self) -> None:
        self.found.sizes.append((self.now, len(self.load)))

    def _lose_oldest(self) -> None:
        if self.up:
            self._lose(next(iter(self.up.values())))

    def _lose(self, replica: Replica) -> None:
        if self.up.get(replica.name) is not replica:
            return  # drained meanwhile
        failures = self.scenario.failures
        del self.up[replica.name]
        self.found.losses.append((self.now, replica.name))
        self.at(self.now + failures.notice_s, self._notice, replica)
        if self._autoscaler is None:  # which would see itself that one is missing
            self.at(self.now + failures.restart_s + self.costs.shape.start_s, self._start)

    def _notice(self, replica: Replica) -> None:
        """The router and the clients hear of a lost replica: its requests are sent elsewhere."""
        self.load.pop(replica.name, None)
        self.router.remove(replica.name)
        self._note_size()
        lost, self._routed[replica.name] = self._routed[replica.name], []
        for request in lost:
            if request.attempts >= self.scenario.failures.attempts:
                request.end("lost")
            else:
                self._route(request)

    # -- more and fewer of them ---------------------------------------------------------------

    def _look(self) -> None:
        assert self._autoscaler is not None
        in_flight = sum(self.load.values()) + len(self._homeless)
        wanted = self._autoscaler.look(self.now, in_flight)
        there = len(self.load) + self._starting
        for _ in range(wanted - there):
            self._starting += 1
            self.at(self.now + self.costs.shape.start_s, self._started)
        for _ in range(min(there - wanted, len(self.load) - 1)):
            self._drain(min(self.load, key=lambda name: (self.load[name], name)))
        if self._events:  # somebody may still come
            self.at(self.now + self._autoscaler.scaling.interval_s, self._look)

    def _started(self) -> None:
        self._starting -= 1
        self._start()

    def _drain(self, name: str) -> None:
        """It gets nothing new, and goes when it has answered what it has."""
        del self.load[name]
        self.router.remove(name)
        if not self._routed[name]:
            del self.up[name]
        self._note_size()


def simulate(scenario: Scenario, sessions: Sequence[Session]) -> Outcome:
    return Fleet(scenario).play(sessions)
