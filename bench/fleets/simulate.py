"""A simulated fleet of replicas behind a router, event by event.

An event is a time and a callback: a request arrives, a step ends, a machine is lost. Events run in
the order of their time, and of their creation if the time is equal, so a run follows from its seed
to the last digit.

A replica is the engine's own `Scheduler` and `Tree`, with a clock instead of a device: `plan`
decides what runs in a step, admits and preempts texts; `Tree` finds shared prefixes and evicts
pages. Only the duration of a step comes from a measured table. `Replica._fill` and `step_ended`
mirror `Loop.work`: if the backend overlaps, a step is launched before the previous one was read.
"""

import heapq
import json
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fleets.trace import Request, Session
from unspool.backends.step import StepLimits
from unspool.engine.scheduler import EngineTask, Scheduler
from unspool.engine.tree import Tree
from unspool.scale.replicas.routing import PrefixRouter, RoundRobin, page_hashes

# -- step costs ------------------------------------------------------------------------------------

COSTS_FOLDER = Path(__file__).parent / "costs"


class CostsError(Exception):
    """A table of step costs is missing or invalid, or no fleet meets a target."""


@dataclass(frozen=True)
class Shape:
    """A replica apart from its speed: `StepLimits` of its backend, its memory, its server."""

    page_size: int = 16
    page_count: int = 20_000
    max_rows: int = 256
    prefill_tokens: int = 256
    prefill_beside_decode: int = 64
    overlaps: bool = False  # whether a step is launched before the previous one was read
    max_running: int = 64  # texts that the server gives to the engine
    max_queued: int = 256  # requests that wait for that; others are refused
    start_s: float = 5.0  # from starting the process to the first request


@dataclass(frozen=True)
class Table:
    """Seconds as a function of a number, linear between the measured points."""

    at: tuple[int, ...]  # increasing
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        increasing = all(a < b for a, b in pairwise(self.at))
        if not (self.at and len(self.at) == len(self.seconds) and increasing):
            raise CostsError("a table needs increasing numbers, and as many seconds")
        if min(self.seconds) < 0:
            raise CostsError("a step cannot take less than 0 seconds")

    def __call__(self, number: int) -> float:
        """Interpolate; beyond the last point, extend the last segment."""
        points, seconds = self.at, self.seconds
        if number <= points[0] or len(points) == 1:
            return seconds[0]
        right = min(bisect_right(points, number), len(points) - 1)
        share = (number - points[right - 1]) / (points[right] - points[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step: decode(rows) + prefill(tokens) + attention, and the measured replica."""

    name: str
    source: str  # how, where and by which command it was measured
    decode: Table  # by texts that get a token
    prefill: Table  # by prompt tokens
    context_s: float = 0.0  # per context token of the texts that get a token
    pair_s: float = 0.0  # per pair of a prompt token and a token it attends to
    request_s: float = 0.0  # outside of the steps, per request
    shape: Shape = field(default_factory=Shape)

    def step(self, rows: int, context: int, prefill: int, pairs: int) -> float:
        seconds = context * self.context_s + pairs * self.pair_s
        if rows:
            seconds += self.decode(rows)
        return seconds + self.prefill(prefill) if prefill else seconds

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load_costs(name: str) -> StepCosts:
    """Load a table by its file, or by the name of one in bench/fleets/costs."""
    file = Path(name) if name.endswith(".json") else COSTS_FOLDER / f"{name}.json"
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for key in ("decode", "prefill"):
            fields[key] = Table(tuple(fields[key]["at"]), tuple(fields[key]["seconds"]))
        return StepCosts(**{**fields, "shape": Shape(**fields.get("shape", {}))})
    except FileNotFoundError:
        names = ", ".join(sorted(path.stem for path in COSTS_FOLDER.glob("*.json")))
        raise CostsError(
            f"no table of step costs at {file}; stored ones: {names}; "
            "`python bench/fleet.py calibrate` measures this machine"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise CostsError(f"{file} is not a table of step costs: {error}") from None


# -- a replica -------------------------------------------------------------------------------------


class RunningRequest(EngineTask):
    """A request in the engine."""

    __slots__ = ("request", "tree", "written")

    def __init__(self, request: Request, tree: Tree) -> None:
        super().__init__(tree.open(request.prompt))
        self.request, self.tree, self.written = request, tree, 0
        request.cached = min(self.branch.num_reused, self.first_needed())

    def run_ahead(self) -> bool:
        self.tree.append(self.branch, self.request.answer[self.written : self.written + 1])
        return True

    def add_token(self) -> bool:
        """Add one sampled token; False if it was the last one."""
        answer = self.request.answer
        self.written += 1
        if self.written == len(answer):
            return False
        if self.has_placeholder:  # its position is reserved already
            self.has_placeholder = False
        else:
            self.tree.append(self.branch, [answer[self.written - 1]])
        self.decoding = True
        return True


class Replica:
    """One engine behind one server; calls `finished` with each answered request."""

    def __init__(
        self, name: str, costs: StepCosts, finished: Callable[[Request, float], None]
    ) -> None:
        shape = costs.shape
        self.name, self.costs, self.finished = name, costs, finished
        self.tree = Tree(shape.page_count, shape.page_size)
        limits = StepLimits(shape.max_rows, shape.prefill_tokens, shape.prefill_beside_decode)
        self.scheduler = Scheduler(self.tree, limits)
        self.queued: deque[Request] = deque()  # in the server, not yet in the engine
        self.tasks: dict[Request, RunningRequest] = {}
        self.busy_s = 0.0
        self.steps = self.decode_tokens = 0
        # Launched steps: each row's task and where it ends, and the seconds of the step.
        self._launched: deque[tuple[list[tuple[RunningRequest, int]], float]] = deque()

    def submit(self, request: Request, now: float) -> float | None:
        """Accept a request; return the end of the step that starts now, if there is one."""
        if len(self.queued) >= self.costs.shape.max_queued:
            request.end("refused")
            return None
        self.queued.append(request)
        if self._launched:
            return None  # the engine admits between two steps
        self._fill()
        return self._step_end(now)

    def step_ended(self, now: float) -> float | None:
        """Settle the step that ends now; return the end of the next one, if there is one."""
        self._settle(self._launched.popleft()[0], now)
        self._fill()
        return self._step_end(now)

    def _step_end(self, now: float) -> float | None:
        return now + self._launched[0][1] if self._launched else None

    def _fill(self) -> None:
        """Launch what can be launched before a result must be read."""
        shape = self.costs.shape
        while len(self._launched) < (2 if shape.overlaps else 1):
            while self.queued and len(self.tasks) < shape.max_running:
                request = self.queued.popleft()
                self.tasks[request] = RunningRequest(request, self.tree)
                self.scheduler.add(self.tasks[request])
            rows = self.scheduler.plan() if len(self.scheduler) else []
            if not rows:
                return
            self._launch(rows)

    def _launch(self, rows: list[Any]) -> None:
        decode = context = prefill = pairs = 0
        ends: list[tuple[RunningRequest, int]] = []
        for task in rows:
            first, end = task.scheduled_start, task.scheduled_end
            if task.decoding and end - first == 1:
                decode += 1
                context += end
            else:
                tokens = end - first
                prefill += tokens
                pairs += tokens * (first + end + 1) // 2
                task.request.computed += tokens
            task.steps_in_flight += 1
            ends.append((task, end))
        self.tree.copies.clear()
        seconds = self.costs.step(decode, context, prefill, pairs)
        self.steps += 1
        self.busy_s += seconds
        self.decode_tokens += decode
        self._launched.append((ends, seconds))

    def _settle(self, ends: list[tuple[RunningRequest, int]], now: float) -> None:
        for task, end in ends:
            task.steps_in_flight -= 1
            if not task.queued:
                continue  # it ended while the step was running
            branch = task.branch
            if end - branch.start < self.tree.page_size:
                branch.num_computed = end  # all that `advance` does if no page is full
            else:
                self.tree.advance(branch, end)
            if branch.num_computed < task.target_len - task.has_placeholder:
                continue
            continues = task.add_token()
            task.request.deliver(task.written, now)
            if not continues:
                self.scheduler.remove(task)
                self.tree.close(branch)
                del self.tasks[task.request]
                task.request.end("finished")
                self.finished(task.request, now)


# -- failures, scaling, routing --------------------------------------------------------------------


@dataclass(frozen=True)
class Failures:
    """Lost replicas: each at random, once in `mtbf_s` on average, and the oldest at `moments`."""

    mtbf_s: float | None = None  # mean time between failures of one replica; None: never
    moments: tuple[float, ...] = ()
    notice_s: float = 5.0  # until the router stops sending there and clients retry
    restart_s: float = 60.0  # until there is another machine; then the engine has to start
    attempts: int = 4  # of a request, before its client reports an error

    def lifetime(self, seed: int, replica: int) -> float | None:
        if self.mtbf_s is None:
            return None
        return float(np.random.default_rng([seed, 4, replica]).exponential(self.mtbf_s))


@dataclass(frozen=True)
class Scaling:
    """Ray Serve's `autoscaling_config`, with shorter names and its defaults."""

    least: int
    most: int
    target: float = 32.0  # target_ongoing_requests
    interval_s: float = 10.0  # metrics_interval_s
    look_back_s: float = 30.0
    up_delay_s: float = 30.0  # upscale_delay_s
    down_delay_s: float = 600.0  # downscale_delay_s


class Autoscaler:
    """Ray Serve's rule: mean requests in flight over `look_back_s`, divided by `target`.

    The number of replicas changes when the rule has asked for more during `up_delay_s`, or for
    fewer during `down_delay_s`.
    """

    def __init__(self, scaling: Scaling, replicas: int) -> None:
        self.scaling, self.num_replicas = scaling, replicas
        self._samples: deque[tuple[float, int]] = deque()
        self._change: tuple[int, float] | None = None  # direction of the change, since when

    def update(self, now: float, in_flight: int) -> int:
        """Number of replicas from now on."""
        scaling, samples = self.scaling, self._samples
        samples.append((now, in_flight))
        while samples[0][0] < now - scaling.look_back_s:
            samples.popleft()
        mean = sum(number for _, number in samples) / len(samples)
        desired = min(max(math.ceil(mean / scaling.target), scaling.least), scaling.most)
        direction = (desired > self.num_replicas) - (desired < self.num_replicas)
        if direction == 0:
            self._change = None
        elif self._change is None or self._change[0] != direction:
            self._change = (direction, now)
        if self._change is not None:
            delay = scaling.up_delay_s if direction > 0 else scaling.down_delay_s
            if now - self._change[1] >= delay:
                self.num_replicas, self._change = desired, None
        return self.num_replicas


class Router(Protocol):
    """Interface of the routers in `unspool.scale.replicas.routing`."""

    def add(self, replica: str) -> None: ...
    def remove(self, replica: str) -> None: ...
    def choose(self, hashes: Sequence[int], load: dict[str, int]) -> str: ...
    def record(self, replica: str, hashes: Sequence[int]) -> None: ...


class LeastLoaded(PrefixRouter):
    """The replica with the fewest requests: a prefix router that ignores prompts."""

    def choose(self, hashes: Sequence[int], load: Any) -> str:
        return super().choose((), load)

    def record(self, replica: str, hashes: Sequence[int]) -> None: ...


POLICIES = ("round-robin", "least-loaded", "prefix")


def make_router(policy: str, costs: StepCosts) -> Router:
    if policy == "prefix":
        return PrefixRouter(capacity_pages=costs.shape.page_count)
    return LeastLoaded() if policy == "least-loaded" else RoundRobin()


# -- the fleet -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A fleet and what happens to it."""

    costs: StepCosts
    replicas: int
    policy: str = "prefix"
    failures: Failures = field(default_factory=Failures)
    scaling: Scaling | None = None
    seed: int = 0


@dataclass
class Outcome:
    """Everything that happened in a run."""

    requests: list[Request] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)  # also those that are gone
    sizes: list[tuple[float, int]] = field(default_factory=list)  # number of replicas since when
    losses: list[tuple[float, str]] = field(default_factory=list)


class Fleet:
    """One run: `play` sends sessions and runs until all are answered."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.costs = scenario, scenario.costs
        self.router = make_router(scenario.policy, scenario.costs)
        self.now = 0.0
        self.up: dict[str, Replica] = {}  # replicas that compute
        self.load: dict[str, int] = {}  # requests in flight, of replicas that the router knows
        self.outcome = Outcome()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._numbers, self._names = count(), count(), count()
        self._sessions: dict[int, Session] = {}
        self._replicas: dict[str, Replica] = {}  # also those that are gone
        self._routed: dict[str, list[Request]] = {}  # sent there and not answered
        self._unrouted: list[Request] = []  # there was no replica
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
            self._schedule(session.begins, self._ask, session, 0)
        for moment in self.scenario.failures.moments:
            self._schedule(moment, self._lose_oldest)
        if self._autoscaler is not None:
            self._schedule(self._autoscaler.scaling.interval_s, self._scale)
        while self._events:
            moment, _, callback, arguments = heapq.heappop(self._events)
            if moment < self.now:
                raise AssertionError(f"an event at {moment} comes after one at {self.now}")
            self.now = moment
            callback(*arguments)
        return self.outcome

    def _schedule(self, moment: float, callback: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (moment, next(self._order), callback, arguments))

    def _ask(self, session: Session, turn: int) -> None:
        answers = [earlier.answer for earlier in session.turns]
        request = Request(
            next(self._numbers), session.prompt(turn, answers), session.turns[turn].answer,
            self.now, session.number, turn,
        )  # fmt: skip
        self.outcome.requests.append(request)
        self._route(request)

    def _route(self, request: Request) -> None:
        if not self.load:
            self._unrouted.append(request)
            return
        hashes = page_hashes(request.prompt, self.costs.shape.page_size)
        name = self.router.choose(hashes, self.load)
        self.router.record(name, hashes)
        request.replica, request.attempts = name, request.attempts + 1
        self.load[name] += 1
        self._routed[name].append(request)
        arrival = self.now + self.costs.request_s
        self._schedule(arrival, self._submit, self._replicas[name], request)

    def _submit(self, replica: Replica, request: Request) -> None:
        if self.up.get(replica.name) is not replica:
            return  # its client notices the loss later, with the others
        self._schedule_step_end(replica, replica.submit(request, self.now))
        if request.outcome == "refused":
            self._answered(request)

    def _schedule_step_end(self, replica: Replica, end: float | None) -> None:
        if end is not None:
            self._schedule(end, self._step_ended, replica)

    def _step_ended(self, replica: Replica) -> None:
        if self.up.get(replica.name) is replica:
            self._schedule_step_end(replica, replica.step_ended(self.now))

    def _finished(self, request: Request, now: float) -> None:
        self._answered(request)
        session = self._sessions[request.session]
        if request.turn + 1 < len(session.turns):
            pause = session.turns[request.turn + 1].pause_s
            self._schedule(now + pause, self._ask, session, request.turn + 1)

    def _answered(self, request: Request) -> None:
        name = request.replica
        self._routed[name].remove(request)
        if name in self.load:
            self.load[name] -= 1
        elif not self._routed[name]:  # it was drained
            self.up.pop(name, None)

    def _start(self) -> None:
        """Add a replica with an empty cache."""
        number = next(self._names)
        name = f"replica {number}"
        replica = Replica(name, self.costs, self._finished)
        self.up[name] = self._replicas[name] = replica
        self.load[name], self._routed[name] = 0, []
        self.outcome.replicas.append(replica)
        self.router.add(name)
        self._record_size()
        life = self.scenario.failures.lifetime(self.scenario.seed, number)
        if life is not None and self.now + life < self._horizon:
            self._schedule(self.now + life, self._lose, replica)
        waiting, self._unrouted = self._unrouted, []
        for request in waiting:
            self._route(request)

    def _record_size(self) -> None:
        self.outcome.sizes.append((self.now, len(self.load)))

    def _lose_oldest(self) -> None:
        if self.up:
            self._lose(next(iter(self.up.values())))

    def _lose(self, replica: Replica) -> None:
        if self.up.get(replica.name) is not replica:
            return  # drained before
        failures = self.scenario.failures
        del self.up[replica.name]
        self.outcome.losses.append((self.now, replica.name))
        self._schedule(self.now + failures.notice_s, self._notice, replica)
        if self._autoscaler is None:  # otherwise the autoscaler replaces it
            self._schedule(self.now + failures.restart_s + self.costs.shape.start_s, self._start)

    def _notice(self, replica: Replica) -> None:
        """The router and the clients notice a lost replica; its requests are sent again."""
        self.load.pop(replica.name, None)
        self.router.remove(replica.name)
        self._record_size()
        lost, self._routed[replica.name] = self._routed[replica.name], []
        for request in lost:
            if request.attempts >= self.scenario.failures.attempts:
                request.end("lost")
            else:
                self._route(request)

    def _scale(self) -> None:
        assert self._autoscaler is not None
        in_flight = sum(self.load.values()) + len(self._unrouted)
        desired = self._autoscaler.update(self.now, in_flight)
        current = len(self.load) + self._starting
        for _ in range(desired - current):
            self._starting += 1
            self._schedule(self.now + self.costs.shape.start_s, self._started)
        for _ in range(min(current - desired, len(self.load) - 1)):
            self._drain(min(self.load, key=lambda name: (self.load[name], name)))
        if self._events:
            self._schedule(self.now + self._autoscaler.scaling.interval_s, self._scale)

    def _started(self) -> None:
        self._starting -= 1
        self._start()

    def _drain(self, name: str) -> None:
        """Send nothing to a replica; it ends when it has answered its requests."""
        del self.load[name]
        self.router.remove(name)
        if not self._routed[name]:
            del self.up[name]
        self._record_size()


def simulate(scenario: Scenario, sessions: Sequence[Session]) -> Outcome:
    return Fleet(scenario).play(sessions)


# -- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """Of the requests that came within a window; seconds and counts."""

    requests: int
    finished: int
    refused: int
    tokens_s: float
    prompt_tokens: int
    prefill_tokens: int  # prompt tokens that were computed
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    rows: float = 0.0  # mean number of texts that got a token in a step

    @property
    def cached(self) -> float:
        """Share of the prompts that was not computed."""
        return 1 - self.prefill_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def figures(requests: Sequence[Request], since: float = 0.0, until: float = 1e18) -> Figures:
    window = [r for r in requests if since <= r.arrival < until]
    done = [r for r in window if r.outcome == "finished"]
    start = min((r.arrival for r in window), default=0.0)
    end = max((r.last for r in done), default=start)
    gaps = np.concatenate([np.frombuffer(r.gaps) for r in done if r.gaps] or [np.zeros(0)])
    first = [r.first_token_s for r in done]
    return Figures(
        requests=len(window), finished=len(done),
        refused=sum(r.outcome == "refused" for r in window),
        tokens_s=sum(len(r.answer) for r in done) / max(1e-9, end - start),
        prompt_tokens=sum(len(r.prompt) for r in done),
        prefill_tokens=sum(r.computed for r in done),
        first_p50=quantile(first, 50), first_p99=quantile(first, 99),
        gap_p50=quantile(gaps, 50), gap_p99=quantile(gaps, 99),
    )  # fmt: skip


def run_figures(outcome: Outcome, since: float, until: float) -> Figures:
    """Figures of a fleet, with the mean batch size of its replicas."""
    steps = sum(replica.steps for replica in outcome.replicas)
    rows = sum(replica.decode_tokens for replica in outcome.replicas) / max(1, steps)
    return replace(figures(outcome.requests, since, until), rows=rows)


def quantile(values: Iterable[float], share: float) -> float:
    """Percentile by interpolation; 0 if there are no values."""
    array = np.fromiter(values, float) if not isinstance(values, np.ndarray) else values
    return float(np.percentile(array, share)) if len(array) else 0.0
