"""The scheduler: continuous batching with chunked prefill and preemption.

A task is a branch with tokens to compute; it is running or waiting. Decode rows (next tokens with
their drafts) are planned first, so that running texts keep flowing. Prompts are prefilled beside
them in chunks, within a token budget. When memory runs out, the task that arrived last is preempted
and computed again later: slower, never different. A waiting task is admitted only when all of it
fits and every running task has a page to grow into (the watermark), so that no task is admitted
only to be preempted.

Requests take turns, not rows: of the rows of one request (`Task.group`), one at a time waits in the
queue, and the next one joins at its end. So a request of 128 texts delays another request by one
text, and not by 128.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Sequence

from unspool.backends.step import Details, Logits, Observations, StepLimits
from unspool.engine.states import OutOfStatesError
from unspool.engine.tree import Branch, OutOfPagesError, Tree
from unspool.errors import UnspoolError
from unspool.sampling.picker import Ints, SamplingRows

SMALLEST_CHUNK = 16  # tokens, of a prompt that does not end with the chunk
_MAX_ADMITTED_PER_STEP = 64


class EngineTask:
    """A branch to be computed, and which outputs are needed. Subclasses take the outputs."""

    __slots__ = (
        "admitted",
        "ahead_until",
        "arrival",
        "backlogged",
        "branch",
        "cached",
        "compute_end",
        "decoding",
        "details",
        "group",
        "has_placeholder",
        "has_side_rows",
        "hidden_layers",
        "inside",
        "logits",
        "num_logits",
        "observe_attention",
        "observed_positions",
        "observed_sites",
        "pick_floats",
        "pick_ints",
        "pick_number",
        "pick_rows",
        "picked",
        "priority",
        "queued",
        "scheduled_end",
        "scheduled_start",
        "sees_history",
        "state_marks",
        "steps_in_flight",
    )  # fmt: skip

    def __init__(self, branch: Branch, num_logits: int = 1, priority: int = 0) -> None:
        self.branch = branch
        self.num_logits = num_logits  # outputs are needed for this many of the last tokens
        # Numbers for sampling on the backend; None: the backend returns logits instead.
        self.pick_floats: list[float] | None = None
        self.pick_ints: list[int] = []
        self.sees_history = False  # whether penalties apply
        # Of a canvas: the settings of each of its first outputs; the others are not needed.
        self.pick_rows: SamplingRows | None = None
        self.picked: list[tuple[int, float]] = []  # sampled tokens and their log-probabilities
        self.details: list[Details] = []  # of a canvas, what belongs to each sampled token
        self.logits: list[Logits] = []  # or the logits, one array a chunk
        self.inside: list[Observations] = []
        self.observed_positions: frozenset[int] = frozenset()  # return activations of these
        # Which values to return of them instead: (site, layer), as in `interventions.SITES`.
        self.observed_sites: tuple[tuple[str, int], ...] = ()
        self.observe_attention = True  # also attention and each layer's parts, not only residuals
        self.hidden_layers: tuple[int, ...] = ()  # hidden states to return for all tokens computed
        self.has_side_rows = False  # whether a draft tree has chains in rows of their own
        self.state_marks: Collection[int] = ()  # positions where recurrent states are worth keeping
        self.priority = priority  # higher first
        self.arrival = 0  # order of arrival; within a group, the order of turns
        self.group: object = None  # the request that it shares its turns with; None: no other task
        self.cached = True  # whether the prefix cache may be used
        self.decoding = False  # the prompt is computed: only next tokens remain
        self.compute_end: int | None = None  # compute up to here instead of the branch's end
        self.scheduled_start = 0  # the next step computes the positions from here ...
        self.scheduled_end = 0  # ... up to here
        self.steps_in_flight = 0  # steps with it that are launched and not settled
        self.pick_number = 0  # index of its first sampled token in the last of these steps
        self.has_placeholder = (
            False  # the last token of the branch is a placeholder, not sampled yet
        )
        # A branch shorter than this may get a placeholder without asking `run_ahead`.
        self.ahead_until = 0
        self.queued = False  # whether the scheduler has it
        self.admitted = False  # whether it is running
        self.backlogged = False  # whether it waits for another task of its group

    @property
    def samples_on_host(self) -> bool:
        """Whether the backend returns logits instead of sampling itself."""
        return self.pick_floats is None

    @property
    def has_one_output(self) -> bool:
        """Whether only the last token's output is needed: those of a long chunk are large."""
        return self.num_logits == 1 and not self.hidden_layers

    @property
    def waits_for_others(self) -> bool:
        """Whether its next step is better computed with other tasks than right after their step."""
        return False

    def complete(self) -> None:
        """Take the outputs, `self.picked` or `self.logits`: everything is computed."""
        raise NotImplementedError

    def report_progress(self) -> None:
        """Called after a step that computed a part of the branch."""

    def fail(self, error: BaseException) -> None:
        """End with an error. The scheduler has removed the task already."""
        raise NotImplementedError

    def preempted(self) -> None:
        """Called when the computed part of the branch was dropped, to be computed again later."""

    def run_ahead(self) -> bool:
        """Append a placeholder for the token being sampled, so that its step can be launched.

        Called while the task's step is in flight. Returns False if the next step must wait for the
        sampled token.
        """
        return False

    def side_rows(self, max_rows: int) -> Sequence[EngineTask]:
        """Return rows to compute in the same step, with their pages. Called if `has_side_rows`."""
        return ()

    def penalty_ranges(self, count: int) -> tuple[Ints, list[tuple[int, int]]]:
        """Return the tokens that penalties see, and the range for each of the next picks."""
        raise NotImplementedError

    def find_state_marks(self, page_size: int) -> Collection[int]:
        """Return the positions where a recurrent state is worth keeping.

        That is the position before the part that is computed again if the same text is requested.
        """
        is_long = self.num_remaining >= page_size
        return {self.branch.length - max(1, self.num_logits)} if is_long else ()

    def first_needed(self) -> int:
        """Return the first position that must be computed: outputs come from running a token."""
        first = self.branch.length - max(1, self.num_logits)
        observed = self.observed_positions
        return max(0, min([first, *observed]) if observed else first)

    @property
    def order(self) -> tuple[int, int]:
        return -self.priority, self.arrival

    @property
    def target_len(self) -> int:
        """The position up to which the branch is to be computed."""
        return self.branch.length if self.compute_end is None else self.compute_end

    @property
    def num_remaining(self) -> int:
        """Tokens that are still to be computed."""
        return self.target_len - self.branch.num_computed


def _order(task: EngineTask) -> tuple[int, int]:
    return task.order


def _group(task: EngineTask) -> object:
    return task if task.group is None else task.group


def _split_budget(prompts: list[EngineTask], budget: int) -> list[tuple[EngineTask, int]]:
    """Return how many tokens of each prompt to prefill; `prompts` are in the order of their turn.

    Half of the budget goes to the prompt that waits longest, so that none starves; the other half
    to those with the fewest tokens, so that a short question does not wait for a long document. The
    second row of a request comes after the first row of every other request.
    """
    if not prompts:
        return []
    first = prompts[0]
    reserved = min(first.num_remaining, max(SMALLEST_CHUNK, budget // 2))
    room, others = budget - reserved, list[tuple[EngineTask, int]]()
    ranks = Counter([_group(first)])  # rows of each request so far
    ranked = list[tuple[int, int, int, int, EngineTask]]()
    for task in sorted(prompts[1:], key=lambda task: (task.num_remaining, task.arrival)):
        rank = ranks[_group(task)]
        ranked.append((-task.priority, rank, task.num_remaining, task.arrival, task))
        ranks[_group(task)] += 1
    for *_, task in sorted(ranked, key=lambda row: row[:4]):
        count = min(task.num_remaining, room)
        if count < min(task.num_remaining, SMALLEST_CHUNK):
            break
        others.append((task, count))
        room -= count
    return [(first, min(first.num_remaining, reserved + room)), *others]


class Scheduler:
    """Running and waiting tasks, and the plan of each step. Used by the engine thread only."""

    def __init__(self, tree: Tree, limits: StepLimits, *, echoes: bool = True) -> None:
        self.tree, self.limits = tree, limits
        self.echoes = echoes  # whether the backend can write a token into the pages of several rows
        self.running: list[EngineTask] = []
        self.waiting: list[EngineTask] = []
        self._heads: dict[object, EngineTask] = {}  # of each group, the task in the queue
        self._backlog: dict[
            object, deque[EngineTask]
        ] = {}  # of each group, the tasks after that one
        self._tasks: dict[Branch, EngineTask] = {}
        self.preemptions = 0
        # After rejected drafts a recurrent text restarts from its last kept state: a decoding row
        # may have this many tokens to compute again.
        self._max_recomputed = SMALLEST_CHUNK if tree.states is not None else 0
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def tasks(self) -> list[EngineTask]:
        backlog = [task for tasks in self._backlog.values() for task in tasks]
        return [*self.running, *self.waiting, *backlog]

    def task_of(self, branch: Branch) -> EngineTask | None:
        """Return the task that computes a branch; None if it is idle."""
        return self._tasks.get(branch)

    def check_idle(self, branch: Branch) -> None:
        """Raise UnspoolError if a branch is released, or is being computed."""
        if branch.closed:
            raise UnspoolError("the branch was released")
        if branch in self._tasks:
            raise UnspoolError(
                "this branch is being computed for another caller; wait for that, or fork it"
            )

    def add(self, task: EngineTask) -> None:
        """Queue a task; its branch must be idle."""
        branch = task.branch
        self.check_fits(branch.length)
        self.check_idle(branch)
        self.tree.recompute(branch, task.first_needed())
        self._num_arrived += 1
        task.arrival = self._num_arrived
        self._tasks[branch], task.queued = task, True
        if self.tree.states is not None:
            task.state_marks = task.find_state_marks(self.tree.page_size)
        group = _group(task)
        if group in self._heads:
            self._backlog.setdefault(group, deque()).append(task)
            task.backlogged = True
        else:
            self._heads[group] = task
            insort(self.waiting, task, key=_order)

    def remove(self, task: EngineTask) -> None:
        """Forget a task, wherever it is. Safe to call twice."""
        if task.queued:
            task.queued = False
            del self._tasks[task.branch]
            if task.admitted:
                self.running.remove(task)
            else:
                self._leave_queue(task)
            self._set_running(task, False)

    def _leave_queue(self, task: EngineTask) -> None:
        """Remove a waiting task; the next one of its group joins the end of the queue."""
        group = _group(task)
        backlog = self._backlog.get(group)
        if task.backlogged:
            assert backlog is not None
            backlog.remove(task)
            task.backlogged = False
        else:
            self.waiting.remove(task)
            if self._heads.get(group) is task:  # not a preempted task, which waits besides the head
                del self._heads[group]
                if backlog:
                    self._heads[group] = next_task = backlog.popleft()
                    self._num_arrived += 1
                    next_task.arrival, next_task.backlogged = self._num_arrived, False
                    insort(self.waiting, next_task, key=_order)
        if backlog is not None and not backlog:
            del self._backlog[group]

    def change_branch(self, task: EngineTask, branch: Branch) -> None:
        """Let a task continue on another branch, and close the one it had."""
        del self._tasks[task.branch]
        self.tree.close(task.branch, store=False)
        task.branch = branch
        self._tasks[branch] = task
        self._set_running(task, task.admitted)

    def check_fits(self, length: int) -> None:
        """Raise UnspoolError for a text that would not fit the KV cache even alone."""
        capacity = self.tree.pool.count * self.tree.page_size
        if length > capacity:
            raise UnspoolError(
                f"a text of {length:,} tokens does not fit the KV cache, which holds "
                f"{capacity:,}; allow more memory, or make the text shorter"
            )

    def plan(self) -> list[EngineTask]:
        """Return the rows of the next step, with their pages reserved. Empty: nothing can run."""
        if self.waiting:
            self._admit()
        limits, page_size = self.limits, self.tree.page_size
        rows: list[EngineTask] = []
        prompts: list[EngineTask] = []
        drafted: list[EngineTask] = []
        for task in self.running.copy():
            branch = task.branch
            if not task.admitted or len(rows) == limits.max_rows:
                continue  # preempted for a row planned before it
            if task.steps_in_flight:
                length = branch.length
                if (  # most often nothing needs to be asked or reserved
                    length < task.ahead_until
                    and task.scheduled_end == length
                    and length - branch.start < len(branch.pages) * page_size
                ):
                    branch.tail.append(-1 - task.pick_number)
                    branch.length = task.scheduled_end = length + 1
                    task.scheduled_start, task.has_placeholder = length, True
                    rows.append(task)
                    continue
                if not self._runs_ahead(task):
                    continue
            elif (
                not task.decoding
                or branch.length - branch.num_computed > task.num_logits + self._max_recomputed
            ):
                prompts.append(task)
                continue
            launched_end, end = task.scheduled_end, task.target_len
            reserved = branch.start + len(branch.pages) * page_size
            if end <= reserved or self._reserve(task, end, rows):
                task.scheduled_start = launched_end if task.steps_in_flight else branch.num_computed
                has_adapter = branch.canvas_adapter is not None
                task.scheduled_end = (
                    branch.step_end(task.scheduled_start, end) if has_adapter else end
                )
                if branch.state is not None and not self._reserve_states(task, rows):
                    continue
                rows.append(task)
                if task.has_side_rows:
                    drafted.append(task)
        if prompts:
            budget = limits.prefill_beside_decode if rows else limits.prefill_tokens
            if len(prompts) == 1 and not rows and prompts[0].has_one_output:
                budget = max(budget, limits.prefill_alone)
            for task, count in _split_budget(prompts, budget)[: limits.max_rows - len(rows)]:
                end = self._chunk_end(task, count)
                if not task.admitted:
                    continue  # preempted for a row planned before it
                if self._reserve(task, end, rows) and self._reserve_states(task, rows):
                    rows.append(task)
        for task in drafted:  # last: draft rows use only what the other rows leave free
            rows += task.side_rows(limits.max_rows - max(len(rows), len(self.running)))
        return rows or self._plan_oldest_alone()

    def _chunk_end(self, task: EngineTask, count: int) -> int:
        """Return the end of a chunk of about `count` tokens; tokens that see each other stay
        together."""
        first = task.branch.num_computed
        return min(task.target_len, task.branch.step_end(first, first + count))

    def _runs_ahead(self, task: EngineTask) -> bool:
        """Return whether a task's next step can be launched before the last one is settled."""
        if not task.has_placeholder:
            task.has_placeholder = task.scheduled_end == task.branch.length and task.run_ahead()
        return task.has_placeholder and task.scheduled_end < task.branch.length

    def _admit(self) -> None:
        """Admit waiting tasks that fit, in the order of their turn."""
        # Pages that running prompts still need, and one for each running task to grow into.
        states = self.tree.states
        promised = sum(1 + (0 if t.decoding else self._missing_pages(t)) for t in self.running)
        for _ in range(_MAX_ADMITTED_PER_STEP):
            if not self.waiting or len(self.running) >= self.limits.max_rows:
                return
            task = self.waiting[0]
            # More may be cached since it arrived or was preempted. (A canvas may have pages
            # although nothing is computed.)
            if task.cached and task.branch.num_computed == 0 and not task.branch.pages:
                self.tree.adopt(task.branch)
                self.tree.recompute(task.branch, task.first_needed())
            pages = self._missing_pages(task)
            if self.running and pages + promised > self.tree.available:
                return
            if states is not None and 2 * len(self.running) >= states.count:
                return  # each task reads one state slot and may write another
            promised += 1 + pages
            self._start_running(task)

    def _start_running(self, task: EngineTask) -> None:
        self._leave_queue(task)
        insort(self.running, task, key=_order)
        self._set_running(task, True)

    def _set_running(self, task: EngineTask, running: bool) -> None:
        task.admitted = running
        if self.tree.states is not None and not task.branch.closed:
            self.tree.states.set_running(task.branch, running)

    def _missing_pages(self, task: EngineTask) -> int:
        branch, size = task.branch, self.tree.page_size
        return -(-branch.length // size) - branch.node.depth - len(branch.pages)

    def _reserve(self, task: EngineTask, until: int, rows: list[EngineTask]) -> bool:
        """Get pages for a row, preempting other tasks if needed; False if it has to wait."""
        while True:
            try:
                self.tree.reserve(task.branch, until)
            except OutOfPagesError:
                if not self._preempt_last(task, rows):
                    return False
            else:
                # A shared page may have been lost: then more has to be computed than planned.
                first = task.branch.num_computed
                task.scheduled_start, task.scheduled_end = (
                    first,
                    min(task.target_len, task.branch.step_end(first, until)),
                )
                return True

    def _reserve_states(self, task: EngineTask, rows: list[EngineTask]) -> bool:
        """Get slots for a row's recurrent states, the same way."""
        states, branch = self.tree.states, task.branch
        if states is None:
            return True
        has_draft = task.decoding and branch.provisional is None
        num_draft = (
            min(task.num_logits, task.scheduled_end - task.scheduled_start) - 1 if has_draft else 0
        )
        while True:
            try:
                states.plan(
                    branch,
                    task.scheduled_end,
                    task.state_marks,
                    num_draft,
                    has_forks=task.has_side_rows,
                )
            except OutOfStatesError:
                if not self._preempt_last(task, rows):
                    return False
            else:
                return True

    def _preempt_last(self, task: EngineTask, rows: list[EngineTask]) -> bool:
        """Preempt the last task, in the order of turns, that comes after this one and is not in
        this step; False if there is none."""
        planned = set(rows)
        for victim in sorted(self.tasks(), key=_order, reverse=True):
            if victim is task:
                return False
            if victim not in planned and not victim.steps_in_flight and self._holds_pages(victim):
                self.preempt(victim)
                return True
        return False

    def _holds_pages(self, task: EngineTask) -> bool:
        return task.branch.num_computed > 0 or bool(task.branch.pages)

    def preempt(self, task: EngineTask) -> None:
        """Take the pages of a task; it waits, and is computed again later."""
        if task.admitted:
            self.running.remove(task)
            insort(self.waiting, task, key=_order)
            self._set_running(task, False)
            self.preemptions += 1
        self.tree.preempt(task.branch)
        task.picked.clear()
        task.details.clear()
        task.logits.clear()
        task.inside.clear()
        task.preempted()

    def _plan_oldest_alone(self) -> list[EngineTask]:
        """Preempt every other task, so that the first one can run."""
        if any(task.steps_in_flight for task in self.running):
            return []  # settling the step in flight makes progress
        first = min(self.tasks(), key=_order)
        for task in self.tasks():
            if task is not first and self._holds_pages(task):
                self.preempt(task)
        if not first.admitted:
            self._start_running(first)
        count = min(first.num_remaining, max(SMALLEST_CHUNK, first.num_logits))
        fits = self._reserve(first, self._chunk_end(first, count), [])
        return [first] if fits and self._reserve_states(first, []) else []
