"""Which texts run in the next step.

A task is a branch with tokens to compute. Those that run are in `running`, the others wait. Next
tokens go first (with their drafts), so that texts keep flowing; beside them prompts are read, in
chunks, shared among those that have some left. When memory runs out, the task that came last is
preempted and computed again later: slower, never different. One that waits is let in only when all
of it fits and every running text has a page to grow into (the watermark), so that nobody is let in
only to be preempted again.

Requests take turns, not rows: of the rows that one request brings (`Task.group`), one at a time
waits in the queue, and the next one goes to its end. So a request of 128 texts delays another
request by one text, and not by 128.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Collection, Sequence

from unspool.backends.base import StepLimits
from unspool.backends.step import Inside, Logits
from unspool.engine.branch import Branch
from unspool.engine.pages import OutOfPagesError
from unspool.engine.states import OutOfStatesError
from unspool.engine.tree import Tree
from unspool.errors import UnspoolError
from unspool.sampling.picker import Ints

SMALLEST_CHUNK = 16  # of a prompt that does not end with it
_LOOKED_AT = 64  # of those that wait, at one step


class Task:
    """A branch to be computed, and what is wanted of it. Subclasses say what becomes of it."""

    __slots__ = (
        "admitted", "ahead", "backlogged", "branch", "cached", "decoding", "deep", "first",
        "flights", "group", "inside", "landmarks", "logits", "look", "number", "pick_floats",
        "pick_ints", "pick_number", "picked", "priority", "queued", "sees_history", "splits",
        "stop", "until", "wanted", "watch",
    )  # fmt: skip

    def __init__(self, branch: Branch, wanted: int = 1, priority: int = 0) -> None:
        self.branch = branch
        self.wanted = wanted  # the outcome is wanted of so many of the last tokens:
        self.pick_floats: list[float] | None = None  # a pick, if there are these numbers for it,
        self.pick_ints: list[int] = []
        self.sees_history = False  # whether penalties have a part in it
        self.picked: list[tuple[int, float]] = []  # so far, with log-probabilities,
        self.logits: list[Logits] = []  # or the logits
        self.inside: list[Inside] = []
        self.look: frozenset[int] = frozenset()  # positions to look inside at
        self.deep = True  # at attention and the layers' parts too, not only at the vectors
        self.watch: tuple[int, ...] = ()  # vectors to be seen of whatever is computed
        self.splits = False  # whether some guesses want rows of their own
        self.landmarks: Collection[int] = ()  # places to which it may be of use to come back
        self.priority = priority  # higher first
        self.number = 0  # in order of arrival; within a group, of its turns
        self.group: object = None  # the request that it shares its turns with; None: with no other
        self.cached = True  # whether what others computed may be used
        self.decoding = False  # its prompt is read: what is left are next tokens
        self.stop: int | None = None  # computed up to here, and not to the branch's end
        self.first = 0  # the next step computes the positions from here ...
        self.until = 0  # ... to here
        self.flights = 0  # steps with it that are launched and not settled yet
        self.pick_number = 0  # of its first pick in the last of them
        self.ahead = False  # whether its last token is not known yet
        self.queued = False  # whether the scheduler has it
        self.admitted = False  # whether it is among the running ones
        self.backlogged = False  # whether it waits behind another one of its group

    @property
    def by_hand(self) -> bool:
        """Whether the backend gives logits, and does not pick itself."""
        return self.pick_floats is None

    # -- what a subclass does -----------------------------------------------------------------

    def complete(self) -> None:
        """Everything is computed: `self.picked`, or `self.logits`, are there."""
        raise NotImplementedError

    def report_progress(self) -> None:
        """A step computed a part of the branch, not all of it."""

    def fail(self, error: BaseException) -> None:
        """It cannot be computed; the task is out of the scheduler already."""
        raise NotImplementedError

    def preempted(self) -> None:
        """What was computed of it is lost, and is computed again later."""

    def run_ahead(self) -> bool:
        """Asked while the task's step is running: whether the next one can be launched with the
        token that will be picked. If so, the branch has a placeholder for it afterwards."""
        return False

    def side_rows(self, room: int) -> Sequence[Task]:
        """Asked if it `splits`: rows that are computed in the same step, with pages for them, at
        most so many."""
        return ()

    def penalized(self, count: int) -> tuple[Ints, list[tuple[int, int]]]:
        """The text that penalties see, and which part of it at each of the next so many picks."""
        raise NotImplementedError

    def find_landmarks(self, page_size: int) -> Collection[int]:
        """Where a recurrent state is worth keeping: before what is computed whenever the same is
        asked for again."""
        return {self.branch.length - max(1, self.wanted)} if self.left >= page_size else ()

    # -- what everybody asks ------------------------------------------------------------------

    @property
    def order(self) -> tuple[int, int]:
        return -self.priority, self.number

    @property
    def goal(self) -> int:
        """Up to where it is computed."""
        return self.branch.length if self.stop is None else self.stop

    @property
    def left(self) -> int:
        """Tokens still to compute."""
        return self.goal - self.branch.computed

    @property
    def first_needed(self) -> int:
        """From which token on they must be run: logits and looks come from running a token."""
        first = self.branch.length - max(1, self.wanted)
        return max(0, min([first, *self.look]) if self.look else first)


def _order(task: Task) -> tuple[int, int]:
    return task.order


def _group(task: Task) -> object:
    return task if task.group is None else task.group


def _shares(prompts: list[Task], budget: int) -> list[tuple[Task, int]]:
    """How many tokens of each prompt run next; the prompts come in the order of their turn.

    Half goes to the one that waits longest, so that nobody waits for ever; the other half to those
    that need least, so that a short question is not held up by a long document. The second row of
    a request comes after the first row of every other one.
    """
    if not prompts:
        return []
    first = prompts[0]
    kept = min(first.left, max(SMALLEST_CHUNK, budget // 2))
    room, others = budget - kept, list[tuple[Task, int]]()
    ranks = Counter([_group(first)])  # rows of each request so far
    ranked = list[tuple[int, int, int, int, Task]]()
    for task in sorted(prompts[1:], key=lambda task: (task.left, task.number)):
        ranked.append((-task.priority, ranks[_group(task)], task.left, task.number, task))
        ranks[_group(task)] += 1
    for *_, task in sorted(ranked, key=lambda row: row[:4]):
        count = min(task.left, room)
        if count < min(task.left, SMALLEST_CHUNK):
            break
        others.append((task, count))
        room -= count
    return [(first, min(first.left, kept + room)), *others]


class Scheduler:
    """The tasks, and the choice of what runs next."""

    def __init__(self, tree: Tree, limits: StepLimits, *, echoes: bool = True) -> None:
        self.tree, self.limits = tree, limits
        self.echoes = echoes  # whether the backend writes a token into several rows
        self.running: list[Task] = []
        self.waiting: list[Task] = []
        self._heads: dict[object, Task] = {}  # of each group, the one that waits for its turn
        self._backlog: dict[object, deque[Task]] = {}  # of each group, those behind that one
        self._of: dict[Branch, Task] = {}
        self.preemptions = 0  # how often memory made a task wait and start over
        # A text whose guesses were wrong goes back to its last state: it may be so far behind and
        # still be writing.
        self._behind = SMALLEST_CHUNK if tree.states is not None else 0
        self._count = 0

    def __len__(self) -> int:
        return len(self._of)

    def tasks(self) -> list[Task]:
        backlog = [task for tasks in self._backlog.values() for task in tasks]
        return [*self.running, *self.waiting, *backlog]

    def task_of(self, branch: Branch) -> Task | None:
        """The task that computes a branch at the moment."""
        return self._of.get(branch)

    def check_idle(self, branch: Branch) -> None:
        """Two callers cannot change one branch at once."""
        if branch.closed:
            raise UnspoolError("the branch was released")
        if branch in self._of:
            raise UnspoolError(
                "this branch is being computed for another caller; wait for that, or fork it"
            )

    def add(self, task: Task) -> None:
        branch = task.branch
        self.check_fits(branch.length)
        self.check_idle(branch)
        self.tree.recompute(branch, task.first_needed)
        self._count += 1
        task.number = self._count
        self._of[branch], task.queued = task, True
        if self.tree.states is not None:
            task.landmarks = task.find_landmarks(self.tree.page_size)
        group = _group(task)
        if group in self._heads:
            self._backlog.setdefault(group, deque()).append(task)
            task.backlogged = True
        else:
            self._heads[group] = task
            insort(self.waiting, task, key=_order)

    def remove(self, task: Task) -> None:
        if task.queued:
            task.queued = False
            del self._of[task.branch]
            if task.admitted:
                self.running.remove(task)
            else:
                self._leave_queue(task)
            self._set_running(task, False)

    def _leave_queue(self, task: Task) -> None:
        """Take out a task that waits; the next one of its group goes to the queue's end."""
        group = _group(task)
        backlog = self._backlog.get(group)
        if task.backlogged:
            assert backlog is not None
            backlog.remove(task)
            task.backlogged = False
        else:
            self.waiting.remove(task)
            if self._heads.get(group) is task:  # and not one that ran before, and was preempted
                del self._heads[group]
                if backlog:
                    self._heads[group] = following = backlog.popleft()
                    self._count += 1
                    following.number, following.backlogged = self._count, False
                    insort(self.waiting, following, key=_order)
        if backlog is not None and not backlog:
            del self._backlog[group]

    def change_branch(self, task: Task, branch: Branch) -> None:
        """Let a task go on with another branch; the one it had is not needed any more."""
        del self._of[task.branch]
        self.tree.close(task.branch, store=False)
        task.branch = branch
        self._of[branch] = task
        self._set_running(task, task.admitted)

    def check_fits(self, length: int) -> None:
        """A text that could not even run alone is refused at once."""
        room = self.tree.pool.count * self.tree.page_size
        if length > room:
            raise UnspoolError(
                f"a text of {length:,} tokens does not fit the memory for keys and values, which "
                f"holds {room:,}; allow more memory, or make the text shorter"
            )

    def plan(self) -> list[Task]:
        """The rows of the next step, with pages for what each computes. Empty: nothing can run."""
        if self.waiting:
            self._admit()
        limits = self.limits
        rows: list[Task] = []
        prompts: list[Task] = []
        splitting: list[Task] = []
        for task in self.running.copy():
            branch = task.branch
            if not task.admitted or len(rows) == limits.max_rows:
                continue  # preempted for somebody before it
            if task.flights:
                if not self._runs_ahead(task):
                    continue
            elif not task.decoding or branch.length - branch.computed > task.wanted + self._behind:
                prompts.append(task)
                continue
            # Most often the page at hand has room: no need to ask for more.
            launched, end = task.until, task.goal
            room = branch.start + len(branch.pages) * self.tree.page_size
            if end <= room or self._reserve(task, end, rows):
                task.first = launched if task.flights else branch.computed
                task.until = end if branch.twin is None else branch.step_end(task.first, end)
                if branch.state is not None and not self._slots(task, rows):
                    continue
                rows.append(task)
                if task.splits:
                    splitting.append(task)
        if prompts:
            budget = limits.prefill_beside_decode if rows else limits.prefill_tokens
            for task, count in _shares(prompts, budget)[: limits.max_rows - len(rows)]:
                end = self._chunk_end(task, count)
                if task.admitted and self._reserve(task, end, rows) and self._slots(task, rows):
                    rows.append(task)
        for task in splitting:  # when everybody else has what they need
            rows += task.side_rows(limits.max_rows - max(len(rows), len(self.running)))
        return rows or self._last_resort()

    def _chunk_end(self, task: Task, count: int) -> int:
        """Up to where about so many tokens of a prompt reach, nothing cut that belongs together."""
        first = task.branch.computed
        return min(task.goal, task.branch.step_end(first, first + count))

    def _runs_ahead(self, task: Task) -> bool:
        """Whether a task's next step can be launched before the last one is settled."""
        if not task.ahead:
            task.ahead = task.until == task.branch.length and task.run_ahead()
        return task.ahead and task.until < task.branch.length

    def _admit(self) -> None:
        """Let those in that fit, in the order of their turn."""
        # What the running ones still need for their prompts, and a page for each to grow into.
        states = self.tree.states
        promised = sum(1 + (0 if t.decoding else self._pages(t)) for t in self.running)
        for _ in range(_LOOKED_AT):
            if not self.waiting or len(self.running) >= self.limits.max_rows:
                return
            task = self.waiting[0]
            # Since it came, or since it ran; a canvas may have pages of which nothing holds.
            if task.cached and task.branch.computed == 0 and not task.branch.pages:
                self.tree.adopt(task.branch)
                self.tree.recompute(task.branch, task.first_needed)
            pages = self._pages(task)
            if self.running and pages + promised > self.tree.available:
                return
            if states is not None and 2 * len(self.running) >= states.count:
                return  # each reads one state and may have to write another
            promised += 1 + pages
            self._enter(task)

    def _enter(self, task: Task) -> None:
        self._leave_queue(task)
        insort(self.running, task, key=_order)
        self._set_running(task, True)

    def _set_running(self, task: Task, running: bool) -> None:
        task.admitted = running
        if self.tree.states is not None and not task.branch.closed:
            self.tree.states.run(task.branch, running)

    def _pages(self, task: Task) -> int:
        branch, size = task.branch, self.tree.page_size
        return -(-branch.length // size) - branch.node.depth - len(branch.pages)

    def _reserve(self, task: Task, until: int, rows: list[Task]) -> bool:
        """Get pages for a row, preempting others if need be; False if it has to wait."""
        while True:
            try:
                self.tree.reserve(task.branch, until)
            except OutOfPagesError:
                if not self._preempt_last(task, rows):
                    return False
            else:
                # A borrowed page may have been lost, and more is to be computed then than was said.
                first = task.branch.computed
                task.first, task.until = first, min(task.goal, task.branch.step_end(first, until))
                return True

    def _slots(self, task: Task, rows: list[Task]) -> bool:
        """Get slots for a row's recurrent states, the same way."""
        states, branch = self.tree.states, task.branch
        if states is None:
            return True
        drafted = task.decoding and branch.provisional is None
        guessed = min(task.wanted, task.until - task.first) - 1 if drafted else 0
        while True:
            try:
                states.plan(branch, task.until, task.landmarks, guessed, split=task.splits)
            except OutOfStatesError:
                if not self._preempt_last(task, rows):
                    return False
            else:
                return True

    def _preempt_last(self, task: Task, rows: list[Task]) -> bool:
        """Of those behind this one in their turn, preempt the last that is not in this step."""
        chosen = set(rows)
        for victim in sorted(self.tasks(), key=_order, reverse=True):
            if victim is task:
                return False
            if victim not in chosen and not victim.flights and self._holds_pages(victim):
                self.preempt(victim)
                return True
        return False

    def _holds_pages(self, task: Task) -> bool:
        return task.branch.computed > 0 or bool(task.branch.pages)

    def preempt(self, task: Task) -> None:
        if task.admitted:
            self.running.remove(task)
            insort(self.waiting, task, key=_order)
            self._set_running(task, False)
            self.preemptions += 1
        self.tree.preempt(task.branch)
        task.picked.clear()
        task.logits.clear()
        task.inside.clear()
        task.preempted()

    def _last_resort(self) -> list[Task]:
        """Nobody can go on: the first one may preempt all others, whether it ran before or not."""
        if any(task.flights for task in self.running):
            return []  # when that is settled, there will be something to do
        first = min(self.tasks(), key=_order)
        for task in self.tasks():
            if task is not first and self._holds_pages(task):
                self.preempt(task)
        if not first.admitted:
            self._enter(first)
        count = min(first.left, max(SMALLEST_CHUNK, first.wanted))
        fits = self._reserve(first, self._chunk_end(first, count), []) and self._slots(first, [])
        return [first] if fits else []
