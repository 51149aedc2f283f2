"""A replica: the engine's own scheduler and tree of pages, with a clock instead of a device.

Nothing of the engine's behaviour is written a second time here. `Scheduler.plan` decides what runs
in a step (next tokens first, chunks of prompts beside them), lets texts in and preempts them, and
`Tree` finds shared prefixes and evicts pages; what a real engine would then compute takes as long
as the table of step costs says. `Loop.work` is mirrored in `_fill` and `step_ended`: where the
backend overlaps, a step is launched before the one before it was read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fleets.costs import StepCosts
from fleets.requests import Request
from unspool.backends.step import StepLimits
from unspool.engine.scheduler import EngineTask, Scheduler
from unspool.engine.tree import Tree


class Writing(EngineTask):
    """A request that the engine has."""

    __slots__ = ("request", "tree", "written")

    def __init__(self, request: Request, tree: Tree) -> None:
        super().__init__(tree.open(request.prompt))
        self.request, self.tree = request, tree
        self.written = 0
        request.cached = min(self.branch.num_reused, self.first_needed())

    def run_ahead(self) -> bool:
        self.tree.append(self.branch, self.request.answer[self.written : self.written + 1])
        return True

    def take_token(self) -> bool:
        """One more token is picked; False if it was the last one."""
        answer = self.request.answer
        self.written += 1
        if self.written == len(answer):
            return False
        if self.has_placeholder:  # its place is taken already
            self.has_placeholder = False
        else:
            self.tree.append(self.branch, [answer[self.written - 1]])
        self.decoding = True
        return True


@dataclass(slots=True)
class Flight:
    """A step that is launched."""

    shares: list[tuple[Writing, int]]  # each row's text, and up to where it is computed
    seconds: float


class Replica:
    """One engine behind one server. `finished` is called with each request that is answered."""

    def __init__(
        self, name: str, costs: StepCosts, finished: Callable[[Request, float], None]
    ) -> None:
        shape = costs.shape
        self.name, self.costs, self.finished = name, costs, finished
        self.tree = Tree(shape.page_count, shape.page_size)
        limits = StepLimits(shape.max_rows, shape.prefill_tokens, shape.prefill_beside_decode)
        self.scheduler = Scheduler(self.tree, limits)
        self.queued: deque[Request] = deque()  # the server has them, the engine not yet
        self.writing: dict[Request, Writing] = {}
        self.busy_s = 0.0  # of steps
        self.steps = self.prefill_tokens = self.decode_tokens = 0
        self._flights: deque[Flight] = deque()
        self._depth = 2 if shape.overlaps else 1

    @property
    def ongoing(self) -> int:
        """Requests that it has, waiting ones too: the load that routers see."""
        return len(self.writing) + len(self.queued)

    def submit(self, request: Request, now: float) -> float | None:
        """Take a request in. Gives back when the step ends that begins now, if one does."""
        if len(self.queued) >= self.costs.shape.max_queued:
            request.end("refused")
            return None
        self.queued.append(request)
        if self._flights:
            return None  # the engine is told between two steps
        self._fill()
        return self._head_end(now)

    def step_ended(self, now: float) -> float | None:
        """Settle the step that ends now; when the next one ends, if there is one."""
        self._settle(self._flights.popleft(), now)
        self._fill()
        return self._head_end(now)

    def _head_end(self, now: float) -> float | None:
        return now + self._flights[0].seconds if self._flights else None

    def _fill(self) -> None:
        """Launch what can be launched before something must be read."""
        while len(self._flights) < self._depth:
            self._let_in()
            rows = self.scheduler.plan() if len(self.scheduler) else []
            if not rows:
                return
            self._flights.append(self._launch(rows))

    def _let_in(self) -> None:
        while self.queued and len(self.writing) < self.costs.shape.max_running:
            request = self.queued.popleft()
            task = self.writing[request] = Writing(request, self.tree)
            self.scheduler.add(task)

    def _launch(self, rows: list[EngineTask]) -> Flight:
        decode = context = prefill = pairs = 0
        shares: list[tuple[Writing, int]] = []
        for task in rows:
            assert isinstance(task, Writing)
            first, until = task.scheduled_start, task.scheduled_end
            if task.decoding and until - first == 1:
                decode += 1
                context += until
            else:
                count = until - first
                prefill += count
                pairs += count * (first + until + 1) // 2
                task.request.computed += count
            task.steps_in_flight += 1
            shares.append((task, until))
        self.tree.copies.clear()
        seconds = self.costs.step(decode, context, prefill, pairs)
        self.steps += 1
        self.busy_s += seconds
        self.prefill_tokens += prefill
        self.decode_tokens += decode
        return Flight(shares, seconds)

    def _settle(self, flight: Flight, now: float) -> None:
        advance, page = self.tree.advance, self.tree.page_size
        for task, until in flight.shares:
            task.steps_in_flight -= 1
            if not task.queued:
                continue  # it ended while the step was running
            branch = task.branch
            if until - branch.start < page:
                branch.num_computed = until  # all that `advance` does where no page is full
            else:
                advance(branch, until)
            if branch.num_computed < task.target_len - task.has_placeholder:
                continue
            goes_on = task.take_token()
            task.request.deliver(task.written, now)
            if not goes_on:
                self._end(task, now)

    def _end(self, task: Writing, now: float) -> None:
        self.scheduler.remove(task)
        self.tree.close(task.branch)
        del self.writing[task.request]
        task.request.end("finished")
        self.finished(task.request, now)
